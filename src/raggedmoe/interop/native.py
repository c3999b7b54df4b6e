"""Our own format of a model's folder: raggedmoe.json, and safetensors files that load without a transposition."""

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from raggedmoe.interop.arrays import PIECE_BYTES, aligned_empty, fetch_to_host, to_device
from raggedmoe.interop.companions import companions_of, read_companions, write_companions, write_kept_config
from raggedmoe.interop.folder import read_tensor_headers
from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.kept_weights import check_are_arrays
from raggedmoe.interop.progress import bytes_bar
from raggedmoe.interop.safetensors_file import NewTensor
from raggedmoe.interop.writing import SHARD_BYTES, new_folder, replaced_objects, write_json, write_tensors
from raggedmoe.kernels.qarray import cast_array
from raggedmoe.models.companions import AdapterBase, Companions
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.config_json import from_json, to_json
from raggedmoe.models.module import Decoder
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import Params, Specs
from raggedmoe.storage import AnyPath, ObjectPath, as_path

CONFIG, FORMAT = "raggedmoe.json", 1
MAX_SHOWN = 20  # wrong tensors that an error lists


def is_native(folder: AnyPath) -> bool:
    """Tell whether a folder has our own format."""
    return (folder / CONFIG).is_file()


def save(
    model: Decoder,
    folder: str | os.PathLike[str] | ObjectPath,
    *,
    companions: Companions | AnyPath | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> None:
    """Write a model in our own format, with the tokenizer and all else that belongs to it, as `interop.save` does.

    A folder of this machine must be new or empty. In an object store a model that is there is replaced. Of a model with
    adapters that was loaded beside a base, the frozen weights are not written, but where they are and how they are
    known again.
    """
    base = None if model.companions is None or model.config.lora is None else model.companions.base
    specs = param_specs(model.config)
    if base is not None:
        specs = {name: spec for name, spec in specs.items() if spec.updated_by is not None}
    check_are_arrays({name: model.params[name] for name in specs})
    belongings, path = companions_of(model, companions), as_path(folder)
    with replaced_objects(path) if isinstance(path, ObjectPath) else new_folder(path) as partial:
        description = {
            "format": FORMAT,
            "config": to_json(model.config),
            "axes": {name: list(spec.axes) for name, spec in param_specs(model.config).items()},
        }
        if base is not None:
            description["base"] = vars(base)
        write_json(partial / CONFIG, description)
        tensors = [
            NewTensor(name=name, dtype=np.dtype(array.dtype), shape=array.shape, pieces=_pieces(array))
            for name, array in model.params.items()
            if name in specs
        ]
        write_companions(belongings, partial)
        write_kept_config(belongings, partial)
        write_tensors(partial, tensors, metadata={"format": "raggedmoe"}, shard_bytes=shard_bytes, progress=progress)


def read_model_config(folder: AnyPath) -> ModelConfig:
    """Read the configuration of a model's folder, and none of its tensors."""
    return _read_description(folder)[0]


def read_base(folder: AnyPath) -> AdapterBase | None:
    """Read which base the adapters of a folder are for; None: the folder has a whole model."""
    return _read_description(folder)[2]


def _pieces(array: jax.Array | np.ndarray) -> Iterator[np.ndarray]:
    """Yield a parameter in pieces, cut along its first dimension."""
    step = max(1, PIECE_BYTES * array.shape[0] // max(array.nbytes, 1))
    for start in range(0, array.shape[0], step):
        yield fetch_to_host(array, (slice(start, start + step),))


def load(
    folder: AnyPath,
    load_base: Callable[..., tuple[Params, AdapterBase]],
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    keep_quantised: bool = False,
    progress: bool = False,
) -> Decoder:
    """Read a folder that `save` wrote. By default activations have the type of the weights that is asked for.

    ``load_base`` is given what the folder says of the base of its adapters, if it has no frozen weights, which may stay
    quantised.
    """
    config, axes, base = _read_description(folder)
    if keep_quantised and base is None:
        raise ValueError(f"{folder}: expected a checkpoint with quantised matrices, found one of arrays")
    specs, tensors = param_specs(config), read_tensor_headers(folder)
    frozen: Params = {}
    if base is not None:
        frozen, base = load_base(base, config, str(folder / CONFIG), keep_quantised=keep_quantised, progress=progress)
        specs = {name: spec for name, spec in specs.items() if name not in frozen}
    problems = [f"{name}: missing" for name in sorted(specs.keys() - tensors.keys())]
    problems += [f"{name}: unknown" for name in sorted(tensors.keys() - specs.keys())]
    for name, spec in specs.items():
        if name not in tensors:
            continue
        expected = (spec.axes, spec.shape, np.dtype(spec.dtype))
        got = (tuple(axes.get(name, ())), tensors[name].shape, tensors[name].dtype)
        if expected != got:
            problems.append(f"{name} in {tensors[name].path.name}: expected {expected}, found {got}")
    if problems:
        more = [f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        raise ValueError(
            "\n  ".join(
                [f"{folder}: the tensors are not those of {CONFIG}; nothing was loaded", *problems[:MAX_SHOWN], *more]
            )
        )
    config = replace(
        config,
        param_dtype=jnp.dtype(param_dtype or config.param_dtype),
        dtype=jnp.dtype(dtype or param_dtype or config.dtype),
    )
    target_specs, params = param_specs(config), {}
    with bytes_bar("loading", sum(tensor.num_bytes for tensor in tensors.values()), progress) as advance:
        for name, tensor in tensors.items():
            buffer = aligned_empty(tensor.shape, target_specs[name].dtype)
            step = max(1, PIECE_BYTES * tensor.shape[0] // max(tensor.num_bytes, 1))
            for start in range(0, tensor.shape[0], step):
                stop = min(start + step, tensor.shape[0])
                piece = tensor.read(start, stop)
                buffer[start:stop] = piece
                advance(piece.nbytes)
            params[name] = to_device(buffer)
    params |= cast_arrays(frozen, target_specs)
    return Decoder(config, params=params, companions=replace(read_companions(folder), base=base))


def cast_arrays(params: Params, specs: Specs) -> Params:
    """Cast parameters to the types that are declared; those that stayed quantised have none."""
    return {name: cast_array(value, specs[name].dtype) for name, value in params.items()}


def _read_description(folder: AnyPath) -> tuple[ModelConfig, dict[str, Any], AdapterBase | None]:
    """Read the model's configuration, the axes of its parameters, and its adapters' base, from raggedmoe.json."""
    path = folder / CONFIG
    description = read_json_object(path)
    missing = [key for key in ("format", "config", "axes") if key not in description]
    if missing:
        raise ValueError(f"{path}: expected format, config and axes, got no {', '.join(missing)}")
    version, config, axes = description["format"], description["config"], description["axes"]
    if version != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {version!r}; was it written by a newer version?")
    if not isinstance(axes, dict) or not all(isinstance(names, list) for names in axes.values()):
        raise ValueError(f"{path}: expected axes to be a list of names for each parameter, got {axes!r}")
    try:
        model = from_json(config, str(path))
    except TypeError as error:  # a value that its configuration cannot even compare or convert
        raise ValueError(f"{path}: expected the configuration of a model, got {error}") from None
    if not isinstance(model, ModelConfig):
        raise ValueError(f"{path}: expected the configuration of a model, got that of {config['kind']!r}")
    return model, axes, None if "base" not in description else _base_of(description["base"], path, model)


def _base_of(written: Any, path: AnyPath, model: ModelConfig) -> AdapterBase:
    names = {entry.name for entry in fields(AdapterBase)}
    is_record = isinstance(written, dict) and written.keys() == names
    if model.lora is None or not is_record or not all(isinstance(value, str) for value in written.values()):
        raise ValueError(f"{path}: expected base to be the {' and '.join(sorted(names))} of adapters, got {written!r}")
    return AdapterBase(**written)
