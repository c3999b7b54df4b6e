"""The contract of attention variants: what one is asked for, and what it is told about the sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.attention.api import attention
from raggedmoe.kernels.registry import Choice
from raggedmoe.models.rope import RopeCosSin
from raggedmoe.params import Params, ParamSpec
from raggedmoe.sharding.axes import ONE_DEVICE, TENSOR, TOKEN_AXES, LogicalMesh
from raggedmoe.sharding.stage import TOKENS, stage

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
    """Compute the attention of the queries to the keys that the context lets them see.

    On a mesh each device does so for its own sequences and heads, as XLA cannot divide a Pallas kernel. Heads are split
    over the tensor axis where it divides their numbers, or where all query heads read one key head.
    """
    num_keys, num_ranks = key.shape[2], context.mesh.size(TENSOR)
    keys_divide = num_keys % num_ranks == 0
    of_queries = TENSOR if query.shape[2] % num_ranks == 0 and (keys_divide or num_keys == 1) else None
    of_keys = of_queries if keys_divide else None
    queries, keys = (PartitionSpec(TOKEN_AXES, None, heads) for heads in (of_queries, of_keys))
    arguments = {"query": queries, "key": keys, "value": keys, "positions": TOKENS, "segments": TOKENS}

    # Unchecked, as kernels of others do not say over which axes their results vary.
    @stage(**arguments, sinks=PartitionSpec(of_queries), result=queries, checked=False)
    def attend(query: Any, key: Any, value: Any, positions: Any, segments: Any, sinks: Any) -> jax.Array:
        return attention(
            query,
            key,
            value,
            scale=scale,
            positions=positions,
            segments=segments,
            window=context.window,
            sinks=sinks,
            implementation=context.implementation,
            hardware=context.hardware,
        )

    return context.mesh.run(attend, query, key, value, context.slots, context.segments, sinks)


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
