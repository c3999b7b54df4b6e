"""The contract of attention variants: what one is asked for, and what it is told about the sequence."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.attention.api import attention
from raggedmoe.kernels.registry import Choice
from raggedmoe.models.placement import divided_attention
from raggedmoe.models.rope import Turns
from raggedmoe.params import ParamSpec

Weights = Mapping[str, jax.Array]
Memory = dict[str, jax.Array]  # what later tokens need of earlier ones, each [B L ...]: what a cache holds


@dataclass(frozen=True, kw_only=True)
class Sight:
    """Which keys a query sees, and how that is computed."""

    slots: Int[Array, "B S"] | None  # the slot of each query in a cache, -1: none; None: queries and keys are the same
    segments: Int[Array, "B S"] | None  # documents packed into one row do not see each other
    window: int | None
    implementation: Choice
    hardware: Any = None
    mesh: Mesh | None = None


def attended(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B L M H"],
    value: Float[Array, "B L M W"],
    sight: Sight,
    *,
    scale: float | None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B S N W"]:
    """Attention to the keys that are in sight."""
    compute: Any = functools.partial(
        attention,
        scale=scale,
        window=sight.window,
        implementation=sight.implementation,
        hardware=sight.hardware,
    )
    given: dict[str, Any] = {"positions": sight.slots, "segments": sight.segments, "sinks": sinks}
    if sight.mesh is None:
        return compute(query, key, value, **given)
    return divided_attention(compute, sight.mesh, query, key, value, **given)


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """One kind of attention, as functions. `decoder.py` puts a cache between `remember` and `attend`, or nothing."""

    specs: Callable[[Any, int, Any], dict[str, ParamSpec]]  # (config, model width, dtype) -> its parameters
    ask: Callable[[Float[Array, "B S D"], Weights, Any, Turns], Any]  # -> queries
    remember: Callable[[Float[Array, "B S D"], Weights, Any, Turns], Memory]  # -> what the tokens leave behind
    attend: Callable[[Any, Memory, Weights, Any, Sight], Float[Array, "B S D"]]  # queries on all that is remembered
    memory_shapes: Callable[[Any], dict[str, tuple[int, ...]]]  # of one token
