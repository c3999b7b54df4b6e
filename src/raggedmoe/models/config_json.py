"""A model's configuration as JSON and back."""

import reprlib
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import jax.numpy as jnp

from raggedmoe.lora import LoraConfig
from raggedmoe.models.config import GroupedQueryConfig, LatentConfig, ModelConfig, RopeConfig, YarnConfig
from raggedmoe.models.execution import ModelExecution
from raggedmoe.moe.config import ExpertConfig, MoEConfig, RouterConfig
from raggedmoe.moe.execution import MoEExecution

KINDS: dict[str, type] = {
    "model": ModelConfig,
    "grouped_query": GroupedQueryConfig,
    "latent": LatentConfig,
    "rope": RopeConfig,
    "yarn": YarnConfig,
    "moe": MoEConfig,
    "router": RouterConfig,
    "experts": ExpertConfig,
    "lora": LoraConfig,
}
# The fields that are configurations themselves: nothing else is nested, so a file cannot be without end.
PART_NAMES: dict[str, tuple[str, ...]] = {
    "attention": ("grouped_query", "latent"),
    "rope": ("rope",),
    "yarn": ("yarn",),
    "moe": ("moe",),
    "router": ("router",),
    "experts": ("experts",),
    "lora": ("lora",),
}
# What older files may hold beside the architecture: how the model was run when it was saved. It is left out.
EXECUTION: dict[str, frozenset[str]] = {
    "model": frozenset(entry.name for entry in fields(ModelExecution)) - {"moe"},
    "moe": frozenset(entry.name for entry in fields(MoEExecution)),
}
DTYPES = ("dtype", "param_dtype")


def to_json(config: Any) -> Any:
    """Write a configuration as nested objects, each with its kind; fields that have their default are left out."""
    kind = next(name for name, known in KINDS.items() if type(config) is known)
    entries: dict[str, Any] = {"kind": kind}
    for entry in fields(config):
        value = getattr(config, entry.name)
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if value == default and default is not MISSING:
            continue
        if is_dataclass(value):
            value = to_json(value)
        elif entry.name in DTYPES:
            value = str(jnp.dtype(value))
        entries[entry.name] = list(value) if isinstance(value, tuple) else value
    return entries


def _dtype(name: Any, where: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError:
        raise ValueError(f"{where}: expected the name of a type such as bfloat16, got {name!r}") from None


def from_json(value: Any, where: str = "config", kinds: tuple[str, ...] = tuple(KINDS)) -> Any:
    """Read the configuration that `to_json` wrote, which is of one of these kinds."""
    if not isinstance(value, dict) or value.get("kind") not in kinds:
        raise ValueError(
            f"{where}: expected an object with a kind out of {', '.join(kinds)}, got {reprlib.repr(value)}"
        )
    kind = KINDS[value["kind"]]
    left_out = EXECUTION.get(value["kind"], frozenset())
    value = {name: entry_value for name, entry_value in value.items() if name not in left_out}
    names = {entry.name for entry in fields(kind)}
    extra = sorted(value.keys() - names - {"kind"})
    if extra:
        raise ValueError(f"{where}: {kind.__name__} has no {', '.join(extra)}; was it written by a newer version?")
    read: dict[str, Any] = {}
    for name, entry_value in value.items():
        if name == "kind":
            continue
        if isinstance(entry_value, dict):
            if name not in PART_NAMES:
                raise ValueError(f"{where}.{name}: expected no object, got {reprlib.repr(entry_value)}")
            entry_value = from_json(entry_value, f"{where}.{name}", PART_NAMES[name])
        elif name in DTYPES:
            entry_value = _dtype(entry_value, f"{where}.{name}")
        elif isinstance(entry_value, int) and abs(entry_value) >= 2**63:
            raise ValueError(f"{where}.{name}: expected a number of 64 bits, got {entry_value}")
        read[name] = tuple(entry_value) if isinstance(entry_value, list) else entry_value
    try:
        return kind(**read)
    except TypeError as error:
        raise ValueError(f"{where}: expected a complete {kind.__name__}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
