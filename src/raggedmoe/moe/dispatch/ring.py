"""Strategy `ring`: experts are split over a mesh axis. All tokens come to every rank, which computes its own experts'
rows; the sums go back by reduce-scatter. What is sent does not grow with K.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from raggedmoe.moe.balance import expert_counts
from raggedmoe.moe.dispatch.local import sort_slots
from raggedmoe.moe.dispatch.strategy import combine_rows, gather_rows, num_held, receive_rows, send_rows
from raggedmoe.moe.records import RouteMetadata, RouteOutput, StageSettings
from raggedmoe.sharding.axes import EXPERT


def prepare(routing: RouteOutput, settings: StageSettings) -> RouteMetadata:
    """Sort the slots of all ranks by expert, and cut out the range of the experts held here.

    Where the buffer is full, the rows of later experts are left out, and of one expert those of later slots.
    """
    assert routing.experts is not None
    axes, held, num_experts = settings.on_mesh.axes(EXPERT), num_held(settings), settings.config.num_experts
    rank = lax.axis_index(axes)
    buffer = receive_rows(settings, *routing.experts.shape)
    experts = lax.all_gather(routing.experts, axes, tiled=True)
    weights = lax.all_gather(routing.weights, axes, tiled=True)
    num_tokens, per_token = experts.shape
    slots, places = sort_slots(experts, num_experts)
    counts = expert_counts(experts, num_experts)
    wanted = lax.dynamic_slice_in_dim(counts, rank * held, held)
    first = jnp.where(jnp.arange(num_experts) < rank * held, counts, 0).sum(dtype=jnp.int32)
    group_sizes = jnp.clip(buffer - (jnp.cumsum(wanted) - wanted), 0, wanted).astype(jnp.int32)
    num_rows = group_sizes.sum(dtype=jnp.int32)
    # Padded by as much as is cut out, so that a slice that starts near the end is not moved back into another rank's
    # rows.
    padded = jnp.concatenate([slots, jnp.full(buffer, -1, jnp.int32)])
    mine = jnp.where(jnp.arange(buffer) < num_rows, lax.dynamic_slice_in_dim(padded, first, buffer), -1)
    return RouteMetadata(
        token_of_row=jnp.where(mine < 0, num_tokens, mine // per_token),
        slot_of_row=mine,
        row_of_slot=jnp.where((places >= first) & (places < first + num_rows), places - first, buffer),
        weights=weights,
        group_sizes=group_sizes,
        num_rows=num_rows[None],
        used=None,
        dropped=wanted.sum(dtype=jnp.int32, keepdims=True) - num_rows,
    )


def dispatch(
    x: Float[Array, "T D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "R D"]:
    """Gather the rows of the experts held here from the tokens of all ranks."""
    axes = settings.on_mesh.axes(EXPERT)
    tokens = send_rows(lambda x, _: lax.all_gather(x, axes, tiled=True), x, None, settings)
    return gather_rows(tokens, metadata, settings)


def unpermute(
    rows: Float[Array, "R D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "T D"]:
    """Add up the rows of each token, weighted, over the experts held here and then over the ranks."""
    # Each rank's sums are rounded to the rows' type before they meet, as all that crosses the wire is.
    return lax.psum_scatter(combine_rows(rows, metadata, settings), settings.on_mesh.axes(EXPERT), tiled=True)
