"""`save`: a model as a Hugging Face folder."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.interop.arrays import PIECE_BYTES, on_host
from raggedmoe.interop.families.registry import family_named
from raggedmoe.interop.layout import first_axis, parts_of
from raggedmoe.interop.matching import Target, copies, targets
from raggedmoe.interop.safetensors_file import NewTensor
from raggedmoe.interop.writing import SHARD_BYTES, copy_companions, new_folder, write_json, write_tensors
from raggedmoe.models.config import GroupedQueryConfig, ModelConfig
from raggedmoe.models.module import Decoder
from raggedmoe.names import unknown


def save(
    model: Decoder,
    folder: str | os.PathLike[str],
    *,
    layout: str | None = None,
    dtype: Any = None,
    companions: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> None:
    """Write a model as its family's checkpoints are written.

    Args:
      model: what to write.
      folder: a new or an empty one. It is whole or not there.
      layout: of the experts: "per_expert" or "fused"; by default as the family publishes them.
      dtype: of the weights; by default the model's.
      companions: a folder whose tokenizer goes along.
      shard_bytes: size of a file, above which there are several and an index.
      progress: show a bar on standard error.
    """
    config = model.config
    family = family_named(config.family, "the model")
    layout = layout or next(iter(family.experts))
    writable = [name for name in family.experts if name not in family.import_only]
    if layout not in writable:
        raise unknown(f"layout of {config.family}", layout, writable)
    dtype = np.dtype(jnp.dtype(dtype or config.param_dtype))
    described = hf_config(config, str(dtype))
    params = model.params
    again = [target for target in copies(family, config) if target.name.startswith("model.layers.")]
    tensors = [_new_tensor(target, params, dtype) for target in [*targets(family, config, layout), *again]]
    with new_folder(Path(folder)) as partial:
        write_json(partial / "config.json", described)
        write_tensors(partial, tensors, metadata={"format": "pt"}, shard_bytes=shard_bytes, progress=progress)
        if companions is not None:
            copy_companions(companions, partial)


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json. Reading it back must give the model: a setting that the family cannot say is refused."""
    family = family_named(config.family, "the model")
    written = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_experts_per_tok": config.moe.experts_per_token,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
        **family.write_config(config),
    }
    _check_same(config, written)
    return written


def _check_same(config: ModelConfig, written: dict[str, Any]) -> None:
    from raggedmoe.interop.hf_config import ConfigReader
    from raggedmoe.models.config_json import to_json

    read = family_named(config.family, "the model").read_config(ConfigReader("config.json", written))
    different = sorted(_differences(*(_of_the_model(to_json(_spelled_out(each))) for each in (config, read))))
    if different:
        raise ValueError(
            f"a {config.family} checkpoint cannot say {'; '.join(different)}; change the configuration to what the "
            "family has, or save it with raggedmoe.interop.save_native"
        )


def _spelled_out(config: ModelConfig) -> ModelConfig:
    """The configuration in its one written form: a window for each layer, and no setting that nothing reads."""
    attention = config.attention
    if isinstance(attention, GroupedQueryConfig) and attention.qk_norm == "none":
        attention = replace(attention, norm_epsilon=1.0)
    return replace(
        config,
        attention=attention,
        windows=tuple(config.kind(layer).window for layer in range(config.num_layers)),
        mlp_dim=config.mlp_dim if config.dense_layers else None,
        activation=config.activation if config.dense_layers else "silu",
    )


TRAINING = {"param_dtype", "dtype", "aux_loss", "aux_loss_weight", "z_loss_weight", "jitter"}


def _of_the_model(described: Any) -> Any:
    """Without what no checkpoint says: types, losses, and noise in training."""
    if not isinstance(described, dict):
        return described
    return {name: _of_the_model(value) for name, value in described.items() if name not in TRAINING}


def _differences(ours: dict[str, Any], read: dict[str, Any], where: str = "") -> Iterator[str]:
    for name in ours.keys() | read.keys():
        mine, other = ours.get(name), read.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            yield from _differences(mine, other, f"{where}{name}.")
        elif mine != other:
            yield f"{where}{name}={mine!r} (it would be read as {other!r})"


def _new_tensor(target: Target, params: dict[str, jax.Array], dtype: np.dtype) -> NewTensor:
    written = np.dtype(target.specs[0].dtype) if _is_kept_wide(target, params, dtype) else dtype
    return NewTensor(name=target.name, dtype=written, shape=target.shape, pieces=_pieces(target, params, written))


def _is_kept_wide(target: Target, params: dict[str, jax.Array], dtype: np.dtype) -> bool:
    """Whether a tensor is a router's that stays in float32, as it is kept, although the model is narrower.

    Selection biases are published so. Others are narrow in checkpoints: they stay so until training has moved them.
    """
    name = target.params[0].rpartition(".")[2]
    if not name.startswith("router_") or name == "router_selection_bias":
        return name == "router_selection_bias"
    values = on_host(params[target.params[0]], target.index)
    return not np.array_equal(values.astype(dtype), values)


def _pieces(target: Target, params: dict[str, jax.Array], dtype: np.dtype) -> Iterator[np.ndarray]:
    """The stored tensor, some of its layout's first atom at a time."""
    layout, specs, shape = target.entry.layout, target.specs, target.shape
    num = specs[0].shape[first_axis(layout, specs[0])]
    rows = shape[0] // num
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    step = max(1, PIECE_BYTES * num // max(num_bytes, 1))
    for first in range(0, num, step):
        last = min(first + step, num)
        piece = np.empty((rows * (last - first), *shape[1:]), dtype)
        for param, spec, part in zip(target.params, specs, parts_of(piece, layout, specs, last - first)):
            where: list[slice] = [slice(None)] * len(spec.shape)
            where[first_axis(layout, spec)] = slice(first, last)
            part[...] = on_host(params[param], (*target.index, *where))
        yield piece
