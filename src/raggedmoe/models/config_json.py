"""A model's configuration as JSON and back. What belongs to a run and not to the model is left out."""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import jax.numpy as jnp

from raggedmoe.models.config import GroupedQueryConfig, LatentConfig, ModelConfig, RopeConfig, YarnConfig
from raggedmoe.moe.config import ExpertConfig, MoEConfig, RouterConfig

KINDS: dict[str, type] = {
    "model": ModelConfig,
    "grouped_query": GroupedQueryConfig,
    "latent": LatentConfig,
    "rope": RopeConfig,
    "yarn": YarnConfig,
    "moe": MoEConfig,
    "router": RouterConfig,
    "experts": ExpertConfig,
}
OF_A_RUN = {"kernels", "hardware", "attention_implementation", "remat", "scan_layers", "moe_backend", "width_chunks"}
DTYPES = ("dtype", "param_dtype")


def to_json(config: Any) -> Any:
    """Nested objects, each with its kind; fields that have their default are left out."""
    kind = next(name for name, known in KINDS.items() if type(config) is known)
    found: dict[str, Any] = {"kind": kind}
    for entry in fields(config):
        value = getattr(config, entry.name)
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if entry.name in OF_A_RUN or (value == default and default is not MISSING):
            continue
        if is_dataclass(value):
            value = to_json(value)
        elif entry.name in DTYPES:
            value = str(jnp.dtype(value))
        found[entry.name] = list(value) if isinstance(value, tuple) else value
    return found


def _dtype(given: Any, where: str) -> Any:
    try:
        return jnp.dtype(given)
    except TypeError:
        raise ValueError(f"{where}: expected the name of a type such as bfloat16, got {given!r}") from None


def from_json(value: Any, where: str = "config") -> Any:
    """The configuration that `to_json` wrote."""
    if not isinstance(value, dict) or value.get("kind") not in KINDS:
        raise ValueError(f"{where}: expected an object with a kind out of {', '.join(KINDS)}, got {value!r}")
    kind = KINDS[value["kind"]]
    names = {entry.name for entry in fields(kind)}
    extra = sorted(value.keys() - names - {"kind"})
    if extra:
        raise ValueError(f"{where}: {kind.__name__} has no {', '.join(extra)}; was it written by a newer version?")
    read: dict[str, Any] = {}
    for name, given in value.items():
        if name == "kind":
            continue
        if isinstance(given, dict):
            given = from_json(given, f"{where}.{name}")
        elif name in DTYPES:
            given = _dtype(given, f"{where}.{name}")
        read[name] = tuple(given) if isinstance(given, list) else given
    try:
        return kind(**read)
    except TypeError as error:
        raise ValueError(f"{where}: expected a complete {kind.__name__}: {error}") from None
