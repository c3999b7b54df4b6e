"""`load` reads a model from a Hugging Face folder, or from one that `raggedmoe import` made."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from raggedmoe.interop import kept_weights, native
from raggedmoe.interop.arrays import PIECE_BYTES, aligned_empty, to_device
from raggedmoe.interop.companions import read_companions
from raggedmoe.interop.folder import has_tensors, read_tensor_headers
from raggedmoe.interop.hf_config import read_config_json, read_model_config
from raggedmoe.interop.layout import first_axis, parameter_views
from raggedmoe.interop.matching import Target, match_tensors
from raggedmoe.interop.named_model import has_float64, load_config, majority_dtype, read_family, without_missing_mtp
from raggedmoe.interop.peft import is_peft, load_peft, read_adapters
from raggedmoe.interop.progress import Advance, bytes_bar
from raggedmoe.interop.quantized import ReadableTensor, dequantize_tensors, read_as
from raggedmoe.kernels.qarray import QuantizedForm
from raggedmoe.models.companions import AdapterBase
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.fingerprint import fingerprint, has_no_type, is_fingerprint_of
from raggedmoe.models.module import Decoder
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import Params
from raggedmoe.storage import AnyPath, ObjectPath, as_path

Pairs = list[tuple[Target, ReadableTensor]]


def load(
    folder: str | os.PathLike[str] | ObjectPath,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    keep_quantised: bool = False,
    progress: bool = False,
) -> Decoder:
    """Load a model with the weights of a checkpoint.

    Args:
      folder: a folder with config.json and model.safetensors (or several files and their index), or one that
        `raggedmoe import` or a run made; it may be in an object store, ``s3://bucket/folder``.
      dtype: the type of activations; by default that of the weights.
      param_dtype: the type of the weights; by default that of most of the checkpoint. Routers stay in float32.
      keep_quantised: leave the layers' matrices in the fp8, int8 or mxfp4 that the folder has, or the folder of the
        model that its adapters are for. Otherwise they are dequantised.
      progress: show a bar on standard error.

    Raises:
      ValueError: if anything is missing, unknown, stored twice, misshapen or unreadable; the message lists all of it by
        name, and nothing has been loaded.
    """
    path = as_path(folder)
    if any(jnp.dtype(name) == np.float64 for name in (dtype, param_dtype) if name is not None) and not has_float64():
        raise ValueError("float64 is switched off in JAX; switch it on with JAX_ENABLE_X64=1, or use float32")
    options: dict[str, Any] = {"keep_quantised": keep_quantised, "progress": progress}
    if is_peft(path):
        return load_peft(path, load, load_config, dtype=dtype, param_dtype=param_dtype, **options)
    if native.is_native(path):
        return native.load(path, load_base, dtype=dtype, param_dtype=param_dtype, **options)
    config, pairs = _match_folder(path, dtype, param_dtype, warns=True)
    kept = kept_weights.kept_forms(pairs) if keep_quantised else {}
    if keep_quantised and not kept:
        raise ValueError(
            f"{path}: expected matrices that are quantised, with blocks that fit, for keep_quantised; found none"
        )
    params = _load_params(pairs, config, kept, progress)
    return Decoder(config, params=params, companions=read_companions(path))


def read_kept_forms(folder: AnyPath) -> dict[str, QuantizedForm]:
    """Read how `load` stores matrices of a folder, or of its adapters' base, that stay quantised; {}: none can.

    No tensor is read.
    """
    if is_peft(folder):
        return read_kept_forms(read_adapters(folder, load_config).base)
    if native.is_native(folder):
        base = native.read_base(folder)
        return {} if base is None else read_kept_forms(as_path(base.folder))
    if not has_tensors(folder) or read_config_json(folder).get("quantization_config") is None:
        return {}
    return kept_weights.kept_forms(_match_folder(folder, None, None)[1])


def _match_folder(
    path: AnyPath, dtype: DTypeLike | None, param_dtype: DTypeLike | None, *, warns: bool = False
) -> tuple[ModelConfig, Pairs]:
    """Read the configuration of a Hugging Face folder, and match its tensors with the parameters that they hold."""
    reader = read_config_json(path)
    family = read_family(reader)
    tensors = dequantize_tensors(reader, read_tensor_headers(path))
    config = without_missing_mtp(path, read_model_config(reader, family.read_config), tensors)
    if warns:
        reader.warn_of_unread()
    param_dtype = param_dtype or majority_dtype(tensors)
    config = replace(config, param_dtype=jnp.dtype(param_dtype), dtype=jnp.dtype(dtype or param_dtype))
    pairs = match_tensors(path, family, config, tensors)
    return config, [(target, read_as(tensor, target.specs[0].dtype)) for target, tensor in pairs]


def load_base(
    base: AdapterBase, config: ModelConfig, where: str, *, keep_quantised: bool = False, progress: bool = False
) -> tuple[Params, AdapterBase]:
    """Load the frozen weights of a model with adapters, and require that they are those that the adapters are for.

    They have the type of ``config``, or a wider one. ``where`` is the file that names them. The base is returned as it
    is to be written from now on.
    """
    if not as_path(base.folder).is_dir():
        raise ValueError(
            f"{where}: expected the model that its adapters are for at {base.folder}, found no folder there; put it "
            "back, or correct the folder's name in that file"
        )
    # Rounded to float16, weights in bfloat16 could not be told from others.
    config = replace(config, param_dtype=jnp.promote_types(config.param_dtype, jnp.bfloat16))
    options: dict[str, Any] = {"keep_quantised": keep_quantised, "progress": progress}
    params = load(base.folder, param_dtype=config.param_dtype, **options).params
    specs = {name: spec for name, spec in param_specs(config).items() if spec.updated_by is None}
    frozen = {name: value for name, value in params.items() if name in specs}
    wrong = sorted(
        name for name, spec in specs.items() if name not in frozen or tuple(frozen[name].shape) != spec.shape
    )
    if wrong or not is_fingerprint_of(base.fingerprint, frozen, config):
        shapes = f" ({', '.join(wrong[:3])} differ in shape)" if wrong else ""
        raise ValueError(
            f"{where}: its adapters are for another model than the one that is now at {base.folder}{shapes}; restore "
            "that one"
        )
    if has_no_type(base.fingerprint):
        base = replace(base, fingerprint=fingerprint(frozen, config))
    return frozen, base


def _load_params(
    pairs: Pairs, config: ModelConfig, kept: Mapping[str, QuantizedForm], progress: bool
) -> dict[str, Any]:
    """Read the parameters one after the other. A buffer becomes a JAX array as soon as its last tensor is in it.

    Those in ``kept`` stay quantised.
    """
    specs = param_specs(config)
    waiting = Counter(param for target, _ in pairs for param in target.params)
    buffers: dict[str, Any] = {}
    params: dict[str, Any] = {}
    with bytes_bar("loading", sum(tensor.num_bytes for _, tensor in pairs), progress) as advance:
        for target, tensor in pairs:
            for param in target.params:
                if param not in buffers and param in kept:
                    buffers[param] = kept_weights.make_buffer(specs[param], kept[param])
                elif param not in buffers:
                    buffers[param] = aligned_empty(specs[param].shape, specs[param].dtype)
            if all(param in kept for param in target.params):
                _keep(target, tensor, buffers, advance)
            elif target.copy:
                _compare(target, tensor, buffers, advance)
            else:
                _fill(target, tensor, buffers, advance)
            for param in target.params:
                waiting[param] -= 1
                if not waiting[param]:
                    buffer = buffers.pop(param)
                    params[param] = buffer.to_device() if param in kept else to_device(buffer)
    return params


def _pieces(target: Target, tensor: ReadableTensor) -> list[tuple[int, int, int, int]]:
    """Cut a tensor into pieces: (first, last) along the layout's first axis, and (start, stop) in stored rows."""
    num = target.specs[0].shape[first_axis(target.entry.layout, target.specs[0])]
    rows = tensor.shape[0] // num
    step = max(1, PIECE_BYTES * num // max(tensor.num_bytes, 1))
    return [(i, min(i + step, num), i * rows, min(i + step, num) * rows) for i in range(0, num, step)]


def _keep(target: Target, tensor: Any, buffers: dict[str, Any], advance: Advance) -> None:
    """Copy a stored tensor's values and scales into those of its parameters."""
    arrays = [buffers[param] for param in target.params]
    kept_weights.fill_scales(target, tensor, arrays)
    axis = first_axis(target.entry.layout, target.specs[0])
    for first, last, start, stop in _pieces(target, tensor):
        kept_weights.fill_values(target, tensor.read_codes(start, stop), slice(first, last), axis, arrays)
        advance((stop - start) * tensor.num_bytes // tensor.shape[0])


def _fill(target: Target, tensor: ReadableTensor, buffers: dict[str, np.ndarray], advance: Advance) -> None:
    """Copy a stored tensor into the buffers of its parameters, piece by piece."""
    for first, last, start, stop in _pieces(target, tensor):
        piece = tensor.read(start, stop)
        parts = parameter_views(piece, target.entry.layout, target.specs, last - first)
        for param, spec, part in zip(target.params, target.specs, parts):
            where: list[slice] = [slice(None)] * len(spec.shape)
            where[first_axis(target.entry.layout, spec)] = slice(first, last)
            at: tuple[int | slice, ...] = (*target.index, *where)
            buffers[param][at] = part
        advance(piece.nbytes)


def _compare(target: Target, tensor: ReadableTensor, buffers: dict[str, np.ndarray], advance: Advance) -> None:
    """Require that a stored copy of a parameter is equal to it."""
    (param,) = target.params
    for _, _, start, stop in _pieces(target, tensor):
        piece = tensor.read(start, stop)
        if not np.array_equal(piece.astype(buffers[param].dtype), buffers[param][start:stop]):
            raise ValueError(
                f"{tensor.path}: {target.name} differs from {param}, of which it should be a copy; nothing was loaded"
            )
        advance(piece.nbytes)
