"""Strategy `ring`: experts are split over a mesh axis. All tokens come to every rank, which computes its own experts'
rows; the sums go back by reduce-scatter. Runs inside `shard_map`; what is sent does not grow with K.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from raggedmoe.moe.balance import expert_counts
from raggedmoe.moe.dispatch.local import sorted_slots
from raggedmoe.moe.dispatch.strategy import Strategy, StrategySettings, combine_rows, gather_rows
from raggedmoe.moe.records import RouteMetadata, RouteOutput


def make(settings: StrategySettings) -> Strategy:
    axis = settings.axis
    if axis is None:
        raise ValueError("strategy='ring' needs the mesh axis that experts are split over, got None; pass axis='name'")

    def dispatch(x: Float[Array, "T D"], routing: RouteOutput, metadata: RouteMetadata) -> Float[Array, "R D"]:
        return gather_rows(lax.all_gather(x, axis, tiled=True), metadata, settings)

    def unpermute(rows: Float[Array, "R D"], routing: RouteOutput, metadata: RouteMetadata) -> Float[Array, "T D"]:
        # Each rank's sums are rounded to the rows' type before they meet, as all that crosses the wire is.
        return lax.psum_scatter(combine_rows(rows, metadata, settings), axis, tiled=True)

    return Strategy(
        prepare=lambda routing: prepare(routing, settings.num_experts, axis),
        dispatch=dispatch,
        unpermute=unpermute,
        axis=axis,
    )


def prepare(routing: RouteOutput, num_experts: int, axis: str) -> RouteMetadata:
    """Sort the slots of all ranks by expert, and cut out the range of the experts held here."""
    assert routing.experts is not None
    num_ranks, rank = lax.axis_size(axis), lax.axis_index(axis)
    if num_experts % num_ranks:
        fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"num_experts={num_experts} is not divisible by the {num_ranks} ranks of axis {axis!r}; "
            f"use a number of ranks in {fitting}"
        )
    held = num_experts // num_ranks
    experts = lax.all_gather(routing.experts, axis, tiled=True)
    weights = lax.all_gather(routing.weights, axis, tiled=True)
    num_tokens, per_token = experts.shape
    slots, places = sorted_slots(experts)
    counts = expert_counts(experts, num_experts)
    group_sizes = lax.dynamic_slice_in_dim(counts, rank * held, held)
    first = jnp.where(jnp.arange(num_experts) < rank * held, counts, 0).sum(dtype=jnp.int32)
    # The worst case: all tokens choose as many experts here as they can. Padded by as much, so that a slice that
    # starts near the end is not moved back into another rank's rows.
    buffer = num_tokens * min(per_token, held)
    padded = jnp.concatenate([slots, jnp.full(buffer, -1, jnp.int32)])
    num_rows = group_sizes.sum(dtype=jnp.int32)
    mine = jnp.where(jnp.arange(buffer) < num_rows, lax.dynamic_slice_in_dim(padded, first, buffer), -1)
    return RouteMetadata(
        token_of_row=jnp.where(mine < 0, num_tokens, mine // per_token),
        slot_of_row=mine,
        row_of_slot=jnp.where((places >= first) & (places < first + num_rows), places - first, buffer),
        weights=weights,
        group_sizes=group_sizes,
        num_rows=num_rows,
        dropped=jnp.zeros((), jnp.int32),
    )
