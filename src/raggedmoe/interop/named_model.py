"""A model's configuration by what a user calls it: the name of a preset, or a folder with a checkpoint of any size."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from raggedmoe.interop import native
from raggedmoe.interop.families.registry import family_by_model_type
from raggedmoe.interop.folder import has_tensors, read_tensor_headers
from raggedmoe.interop.hf_config import ConfigReader, logger, read_config_json, read_model_config
from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.peft import is_peft, read_adapters
from raggedmoe.interop.quantized import ReadableTensor, dequantize_tensors
from raggedmoe.interop.table import Family
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.presets import ALIASES, PRESETS, model_preset
from raggedmoe.storage import AnyPath, ObjectPath, as_path


def is_folder(name: str) -> bool:
    """Tell whether a model's name is that of a folder. A preset's name never is: a folder ``demo`` is ``./demo``.

    A name with a slash is one even where nothing is there, so that a mistyped path is called a folder that is missing.
    """
    return name not in PRESETS and name not in ALIASES and ("/" in name or os.sep in name or Path(name).is_dir())


def named_model(name: str) -> ModelConfig:
    """Return the configuration of a preset, or read that of a folder."""
    return load_config(name) if is_folder(name) else model_preset(name)


def load_config(folder: str | os.PathLike[str] | ObjectPath) -> ModelConfig:
    """Read a model's architecture from a Hugging Face folder, or from one of ours. No tensor is read.

    The weights need not be there. Where they are, and lack the multi-token prediction that config.json names, the model
    has none.
    """
    path = as_path(folder)
    if not path.is_dir():
        is_hub_name = isinstance(path, Path) and not path.is_absolute() and len(path.parts) == 2
        hub = f"; `hf download {path} --local-dir {path}` makes it" if is_hub_name else ""
        raise ValueError(f"{path}: expected a preset or a folder with a model, found neither{hub}")
    if native.is_native(path):
        return native.read_model_config(path)
    if is_peft(path):
        return read_adapters(path, load_config).config
    reader = read_config_json(path)
    config = read_model_config(reader, read_family(reader).read_config)
    return without_missing_mtp(path, config, read_tensor_headers(path)) if has_tensors(path) else config


def stored_dtype(folder: AnyPath) -> Any:
    """Read the type of most of a folder's weights; where only its config.json is there, the one that says."""
    if is_peft(folder):
        return stored_dtype(read_adapters(folder, load_config).base)
    if not native.is_native(folder) and not has_tensors(folder):
        config = read_json_object(folder / "config.json")
        named = config.get("dtype") or config.get("torch_dtype") or "float32"
        return jnp.dtype(named if named in ("bfloat16", "float16") else "float32")
    if native.is_native(folder):
        return native.read_model_config(folder).param_dtype
    return majority_dtype(dequantize_tensors(read_config_json(folder), read_tensor_headers(folder)))


def majority_dtype(tensors: Mapping[str, ReadableTensor]) -> Any:
    """Return the type of most elements of a checkpoint; float32 where JAX has no float64."""
    sizes: Counter[Any] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    majority = sizes.most_common(1)[0][0] if sizes else np.dtype(np.float32)
    return np.dtype(np.float32) if majority == np.float64 and not has_float64() else majority


def has_float64() -> bool:
    """Tell whether JAX has numbers of 64 bits switched on."""
    return jnp.result_type(float) == np.float64


def read_family(reader: ConfigReader) -> Family:
    """Look up the family of a config.json."""
    return family_by_model_type(reader.get_required("model_type"), as_path(reader.path).parent)


def without_missing_mtp(path: AnyPath, config: ModelConfig, tensor_names: Iterable[str]) -> ModelConfig:
    """Leave out the modules of multi-token prediction that a config.json names and the checkpoint does not have."""
    prefix = f"model.layers.{config.num_layers}."
    if config.mtp_layers and not any(name.startswith(prefix) for name in tensor_names):
        logger.info("%s: no tensors of multi-token prediction, which its config.json names; left out", path)
        return replace(config, mtp_layers=0)
    return config
