"""Our own folder: raggedmoe.json and safetensors with our names and layouts, which load without a transposition."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.interop.arrays import PIECE_BYTES, aligned_empty, on_host, to_device
from raggedmoe.interop.folder import stored_tensors
from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.progress import bytes_bar
from raggedmoe.interop.safetensors_file import NewTensor
from raggedmoe.interop.writing import SHARD_BYTES, copy_companions, new_folder, write_json, write_tensors
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.config_json import from_json, to_json
from raggedmoe.models.module import Decoder
from raggedmoe.models.specs import param_specs

CONFIG, FORMAT = "raggedmoe.json", 1
MOST_SHOWN = 20  # tensors that are wrong, of perhaps very many


def is_native(folder: Path) -> bool:
    """Whether a folder is one of ours."""
    return (folder / CONFIG).is_file()


def save(
    model: Decoder,
    folder: str | os.PathLike[str],
    *,
    companions: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> None:
    """Write a model. ``companions``: a folder whose tokenizer goes along."""
    with new_folder(Path(folder)) as partial:
        specs = param_specs(model.config)
        described = {
            "format": FORMAT,
            "config": to_json(model.config),
            "axes": {name: list(spec.axes) for name, spec in specs.items()},
        }
        write_json(partial / CONFIG, described)
        tensors = [
            NewTensor(name=name, dtype=np.dtype(array.dtype), shape=array.shape, pieces=_pieces(array))
            for name, array in model.params.items()
        ]
        write_tensors(partial, tensors, metadata={"format": "raggedmoe"}, shard_bytes=shard_bytes, progress=progress)
        if companions is not None:
            copy_companions(companions, partial)


def _pieces(array: jax.Array | np.ndarray) -> Iterator[np.ndarray]:
    """A parameter, some of its first dimension at a time."""
    step = max(1, PIECE_BYTES * array.shape[0] // max(array.nbytes, 1))
    for start in range(0, array.shape[0], step):
        yield on_host(array, (slice(start, start + step),))


def load(folder: Path, *, dtype: Any = None, param_dtype: Any = None, progress: bool = False) -> Decoder:
    """Read a folder that `save` wrote. Where only another type of weights is asked for, activations have it too."""
    config, axes = _described(folder)
    specs, found = param_specs(config), stored_tensors(folder)
    wrong = [f"{name}: missing" for name in sorted(specs.keys() - found.keys())]
    wrong += [f"{name}: unknown" for name in sorted(found.keys() - specs.keys())]
    for name, spec in specs.items():
        if name not in found:
            continue
        expected = (spec.axes, spec.shape, np.dtype(spec.dtype))
        got = (tuple(axes.get(name, ())), found[name].shape, found[name].dtype)
        if expected != got:
            wrong.append(f"{name} in {found[name].path.name}: expected {expected}, found {got}")
    if wrong:
        more = [f"and {len(wrong) - MOST_SHOWN} more"] if len(wrong) > MOST_SHOWN else []
        raise ValueError(
            "\n  ".join(
                [f"{folder}: the tensors are not those of {CONFIG}; nothing was loaded", *wrong[:MOST_SHOWN], *more]
            )
        )
    config = replace(
        config,
        param_dtype=jnp.dtype(param_dtype or config.param_dtype),
        dtype=jnp.dtype(dtype or param_dtype or config.dtype),
    )
    wanted, params = param_specs(config), {}
    with bytes_bar("loading", sum(tensor.num_bytes for tensor in found.values()), progress) as advance:
        for name, tensor in found.items():
            buffer = aligned_empty(tensor.shape, wanted[name].dtype)
            step = max(1, PIECE_BYTES * tensor.shape[0] // max(tensor.num_bytes, 1))
            for start in range(0, tensor.shape[0], step):
                stop = min(start + step, tensor.shape[0])
                piece = tensor.read(start, stop)
                buffer[start:stop] = piece
                advance(piece.nbytes)
            params[name] = to_device(buffer)
    return Decoder(config, params=params)


def _described(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    path = folder / CONFIG
    described = read_json_object(path)
    missing = [key for key in ("format", "config", "axes") if key not in described]
    if missing:
        raise ValueError(f"{path}: expected format, config and axes, got no {', '.join(missing)}")
    version, config, axes = described["format"], described["config"], described["axes"]
    if version != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {version!r}; was it written by a newer version?")
    if not isinstance(axes, dict) or not all(isinstance(names, list) for names in axes.values()):
        raise ValueError(f"{path}: expected axes to be a list of names for each parameter, got {axes!r}")
    try:
        read = from_json(config, str(path))
    except TypeError as error:  # a value that its configuration cannot even compare or convert
        raise ValueError(f"{path}: expected the configuration of a model, got {error}") from None
    if not isinstance(read, ModelConfig):
        raise ValueError(f"{path}: expected the configuration of a model, got that of {config['kind']!r}")
    return read, axes
