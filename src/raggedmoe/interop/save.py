"""`save` writes a model as a Hugging Face folder."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from raggedmoe.interop.arrays import PIECE_BYTES, fetch_to_host
from raggedmoe.interop.companions import TOKEN_KEYS, companions_of, write_companions
from raggedmoe.interop.families.registry import family_by_model_type
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.layout import first_axis, parameter_views
from raggedmoe.interop.matching import Target, copies, targets
from raggedmoe.interop.safetensors_file import NewTensor
from raggedmoe.interop.save_kept import KeptFormat, kept_format, kept_tensors, widened_modules
from raggedmoe.interop.writing import SHARD_BYTES, new_folder, write_json, write_tensors
from raggedmoe.kernels.qarray import QArray
from raggedmoe.models.companions import Companions
from raggedmoe.models.config import GroupedQueryConfig, ModelConfig
from raggedmoe.models.module import Decoder
from raggedmoe.names import check_known
from raggedmoe.params import Params
from raggedmoe.storage import AnyPath, ObjectPath, as_path


def save(
    model: Decoder,
    folder: str | os.PathLike[str],
    *,
    layout: str | None = None,
    dtype: DTypeLike | None = None,
    companions: Companions | AnyPath | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> None:
    """Write a model as a Hugging Face folder of its family.

    Matrices that stayed quantised are written in the format in which they came, the other weights in ``dtype``.

    Args:
      model: the model to write.
      folder: a new or an empty folder. It is written whole or not at all.
      layout: the layout of the experts, "per_expert" or "fused"; by default as the family publishes them.
      dtype: the type of the weights; by default the model's.
      companions: the tokenizer, generation_config.json, chat template and licence that are written as well, or a
        folder that has them; by default those of the folder that the model was loaded from. Keys of that folder's
        config.json that say nothing of the architecture stay as they are.
      shard_bytes: the largest size of a file; a larger model is several files and an index.
      progress: show a bar on standard error.
    """
    config = model.config
    if config.lora is not None:
        raise ValueError(
            "expected a model of weights alone, got one with adapters: merge them (raggedmoe.merge_lora, or "
            "`raggedmoe export --merge`), or write them alone for PEFT (raggedmoe.interop.save_peft, or `--adapters`)"
        )
    family = family_by_model_type(config.family, "the model")
    belongings = companions_of(model, companions)
    kept = kept_format(model, belongings.config_json)
    layout = layout or (kept.expert_layout if kept else next(iter(family.experts)))
    writable = [name for name in family.experts if name not in family.import_only]
    check_known(f"layout of {config.family}", layout, [kept.expert_layout] if kept else writable)
    dtype = np.dtype(jnp.dtype(dtype or config.param_dtype))
    config_json = with_kept_keys(make_config_json(config, str(dtype)), belongings.config_json, config)
    mtp_copies = [target for target in copies(family, config) if target.name.startswith("model.layers.")]
    written = [*targets(family, config, layout), *mtp_copies]
    if kept is not None:
        config_json["quantization_config"] = kept.quantization_config(widened_modules(written, model.params))
    tensors = [tensor for target in written for tensor in _new_tensors(target, model.params, dtype, kept)]
    path = as_path(folder)
    if isinstance(path, ObjectPath):
        raise ValueError(f"{path}: expected a folder of this machine to export to; write there, and copy it")
    with new_folder(path) as partial:
        write_json(partial / "config.json", config_json)
        write_tensors(partial, tensors, metadata={"format": "pt"}, shard_bytes=shard_bytes, progress=progress)
        write_companions(belongings, partial)


def make_config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Make the config.json of a model. A setting that the family's config.json cannot express is refused."""
    family = family_by_model_type(config.family, "the model")
    config_json = {
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
    _check_round_trip(config, config_json)
    return config_json


# Keys that say how large a model is, or of what type, although nothing is read from them here.
UNREAD_SIZES = {
    *("architectures", "dtype", "ep_size", "experts_per_token", "head_dim", "initial_context_length", "layer_types"),
    *("max_window_layers", "model_type", "moe_layer_freq", "num_key_value_heads", "num_local_experts", "qk_head_dim"),
    *("quantization_config", "torch_dtype"),
}


def with_kept_keys(config_json: dict[str, Any], original: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Add the keys of the config.json that a model was imported with, but for those that say what it is.

    That is said by ours: the model may have other sizes now, and all that `read_config` reads of the original is
    written anew. Of another family's config.json only the tokens that begin and end a text are kept.
    """
    reader = ConfigReader("config.json", dict(original))
    try:
        is_same_family = family_by_model_type(original.get("model_type"), "config.json").model_type == config.family
        if is_same_family:
            family_by_model_type(config.family, "the model").read_config(reader)
    except ValueError:  # half a file, or one that was edited: what cannot be read is not kept
        is_same_family = False
    if not is_same_family:
        return config_json | {key: original[key] for key in TOKEN_KEYS if key in original}
    kept = {key: value for key, value in original.items() if key not in reader.read | UNREAD_SIZES}
    made = {key: value for key, value in config_json.items() if key not in kept}
    if "dtype" in original:  # as transformers has called it since version 4.56
        made["dtype"] = made.pop("torch_dtype")
    return dict(sorted((made | kept).items()))


def _check_round_trip(config: ModelConfig, config_json: dict[str, Any]) -> None:
    """Require that reading a config.json back gives the configuration that it was made of."""
    from raggedmoe.models.config_json import to_json

    restored = family_by_model_type(config.family, "the model").read_config(ConfigReader("config.json", config_json))
    different = sorted(
        _differences(*(_drop_training_settings(to_json(_canonicalize(model))) for model in (config, restored)))
    )
    if different:
        raise ValueError(
            f"a {config.family} checkpoint cannot say {'; '.join(different)}; change the configuration to what the "
            "family has, or save it with raggedmoe.interop.save_native"
        )


def _canonicalize(config: ModelConfig) -> ModelConfig:
    """Bring a configuration into one form, in which equal models are equal: settings that nothing reads are reset."""
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


TRAINING_SETTINGS = {"param_dtype", "dtype", "aux_loss", "aux_loss_weight", "z_loss_weight", "jitter"}


def _drop_training_settings(config: Any) -> Any:
    """Leave out the settings that no checkpoint has: types, losses, and noise in training."""
    if not isinstance(config, dict):
        return config
    return {name: _drop_training_settings(value) for name, value in config.items() if name not in TRAINING_SETTINGS}


def _differences(ours: dict[str, Any], restored: dict[str, Any], where: str = "") -> Iterator[str]:
    for name in ours.keys() | restored.keys():
        our_value, restored_value = ours.get(name), restored.get(name)
        if isinstance(our_value, dict) and isinstance(restored_value, dict):
            yield from _differences(our_value, restored_value, f"{where}{name}.")
        elif our_value != restored_value:
            yield f"{where}{name}={our_value!r} (it would be read as {restored_value!r})"


def _new_tensors(target: Target, params: Params, dtype: np.dtype, kept: KeptFormat | None) -> list[NewTensor]:
    """Describe the stored tensors of a target: one, or of a quantised parameter values and what belongs to them."""
    if kept is not None and isinstance(params[target.params[0]], QArray):
        return kept_tensors(target, params, kept, dtype)
    return [_new_tensor(target, params, dtype)]


def _new_tensor(target: Target, params: Params, dtype: np.dtype) -> NewTensor:
    """Describe the stored tensor of a target, which is cut from the parameters when it is written."""
    stored_dtype = np.dtype(target.specs[0].dtype) if _stays_float32(target, params, dtype) else dtype
    return NewTensor(
        name=target.name, dtype=stored_dtype, shape=target.shape, pieces=_pieces(target, params, stored_dtype)
    )


def _stays_float32(target: Target, params: Params, dtype: np.dtype) -> bool:
    """Tell whether a router's tensor is written in float32, as routers are held, although the model is narrower.

    Selection biases are published in float32. Other tensors of a router are not, so they are written in the narrower
    type as long as that loses nothing, which is until training has changed them.
    """
    name = target.params[0].rpartition(".")[2]
    if not name.startswith("router_") or name == "router_selection_bias":
        return name == "router_selection_bias"
    values = fetch_to_host(params[target.params[0]], target.index)
    return not np.array_equal(values.astype(dtype), values)


def _pieces(target: Target, params: Params, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the stored tensor in pieces, cut along the first axis of its layout."""
    layout, specs, shape = target.entry.layout, target.specs, target.shape
    num = specs[0].shape[first_axis(layout, specs[0])]
    rows = shape[0] // num
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    step = max(1, PIECE_BYTES * num // max(num_bytes, 1))
    for first in range(0, num, step):
        last = min(first + step, num)
        piece = np.empty((rows * (last - first), *shape[1:]), dtype)
        for param, spec, part in zip(target.params, specs, parameter_views(piece, layout, specs, last - first)):
            where: list[slice] = [slice(None)] * len(spec.shape)
            where[first_axis(layout, spec)] = slice(first, last)
            part[...] = fetch_to_host(params[param], (*target.index, *where))
        yield piece
