"""The contract of attention variants: what one is asked for, and what it is told about the sequence."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.attention.api import attention
from raggedmoe.kernels.registry import Choice
from raggedmoe.models.rope import RopeCosSin
from raggedmoe.params import Params, ParamSpec
from raggedmoe.sharding.axes import ONE_DEVICE, LogicalMesh
from raggedmoe.sharding.dense_layers import sharded_attention

Memory = dict[str, jax.Array]  # what later tokens need of earlier ones, each [B L ...]: what a cache holds


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """Which keys a query sees, and how that is computed."""

    slots: Int[Array, "B S"] | None  # the slot of each query in a cache, -1: none; None: queries and keys are the same
    segments: Int[Array, "B S"] | None  # documents packed into one row do not see each other
    window: int | None
    implementation: Choice
    hardware: Any = None
    mesh: LogicalMesh = ONE_DEVICE


def run_attention(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B L M H"],
    value: Float[Array, "B L M W"],
    context: AttentionContext,
    *,
    scale: float | None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B S N W"]:
    """Compute the attention of the queries to the keys that the context lets them see."""
    compute: Any = functools.partial(
        attention,
        scale=scale,
        window=context.window,
        implementation=context.implementation,
        hardware=context.hardware,
    )
    options: dict[str, Any] = {"positions": context.slots, "segments": context.segments, "sinks": sinks}
    return sharded_attention(compute, context.mesh, query, key, value, options)


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """One kind of attention, as functions. Between `project_key_value` and `attend` `decoder.py` updates the cache, if
    there is one.
    """

    specs: Callable[[Any, int, Any], dict[str, ParamSpec]]  # (config, model width, dtype) -> its parameters
    project_query: Callable[[Float[Array, "B S D"], Params, Any, RopeCosSin], Any]  # -> queries
    project_key_value: Callable[[Float[Array, "B S D"], Params, Any, RopeCosSin], Memory]  # -> what a cache keeps
    attend: Callable[[Any, Memory, Params, Any, AttentionContext], Float[Array, "B S D"]]  # queries on the cache
    memory_shapes: Callable[[Any], dict[str, tuple[int, ...]]]  # of one token
