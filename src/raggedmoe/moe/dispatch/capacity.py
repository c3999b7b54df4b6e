"""Strategy `capacity`: every expert has C slots in each sequence, full or not; what does not fit is counted as dropped.

Where experts are split over a mesh axis, the slots of each expert are sent to the rank that holds it, and back: as many
from each rank to each, so that an all-to-all of equal parts does it.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.moe.balance import expert_counts
from raggedmoe.moe.dispatch.local import sort_slots
from raggedmoe.moe.dispatch.strategy import combine_rows, gather_rows, num_held, weighs_input
from raggedmoe.moe.records import RouteMetadata, RouteOutput, StageSettings
from raggedmoe.sharding.axes import EXPERT


def prepare(routing: RouteOutput, settings: StageSettings) -> RouteMetadata:
    """Make a row for every slot of every expert, and mark those that stand for a token's choice."""
    if routing.tokens is not None:
        metadata = prepare_expert_choice(routing)
    else:
        config, num_sequences = settings.config, settings.num_sequences
        capacity = config.capacity(routing.mask.shape[0] // num_sequences)
        metadata = prepare_token_choice(routing, config.num_experts, capacity, num_sequences)
    assert metadata.used is not None
    used, held = to_experts(metadata.used, settings), num_held(settings)
    return replace(metadata, used=used, group_sizes=jnp.full(held, used.size // held, jnp.int32))


def dispatch(
    x: Float[Array, "T D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "R D"]:
    """Gather the token of every slot, and send it to the slot's expert."""
    return to_experts(gather_rows(x, metadata, settings), settings)


def unpermute(
    rows: Float[Array, "R D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "T D"]:
    """Send the slots' rows back, and add up each token's, weighted."""
    rows = from_experts(rows, settings)
    if routing.tokens is None:
        return combine_rows(rows, metadata, settings)
    weights = None if weighs_input(settings) else metadata.weights
    return add_to_tokens(rows, metadata.token_of_row, weights, routing.mask.shape[0])


def to_experts(rows: jax.Array, settings: StageSettings) -> jax.Array:
    """Send every slot's row to the rank of its expert; there, rows lie by expert, then by the rank they are from."""
    if settings.on_mesh.size(EXPERT) == 1:
        return rows
    parts = rows.reshape(settings.on_mesh.size(EXPERT), num_held(settings), -1, *rows.shape[1:])
    parts = lax.all_to_all(parts, settings.on_mesh.axes(EXPERT), split_axis=0, concat_axis=0, tiled=True)
    return parts.swapaxes(0, 1).reshape(rows.shape)


def from_experts(rows: jax.Array, settings: StageSettings) -> jax.Array:
    """Send every slot's row back to the rank that `to_experts` had it from."""
    if settings.on_mesh.size(EXPERT) == 1:
        return rows
    parts = rows.reshape(num_held(settings), settings.on_mesh.size(EXPERT), -1, *rows.shape[1:]).swapaxes(0, 1)
    parts = lax.all_to_all(parts, settings.on_mesh.axes(EXPERT), split_axis=0, concat_axis=0, tiled=True)
    return parts.reshape(rows.shape)


def prepare_token_choice(routing: RouteOutput, num_experts: int, capacity: int, num_sequences: int) -> RouteMetadata:
    """Place the slots of each sequence in the order of its tokens, and of a token in that of its choices.

    Row ``(e · B + b) · C + c`` is slot c of expert e in sequence b.
    """
    assert routing.experts is not None
    num_tokens, per_token = routing.experts.shape
    routed = routing.experts < num_experts
    sequence = jnp.arange(num_tokens, dtype=jnp.int32)[:, None] // max(num_tokens // num_sequences, 1)
    num_groups = num_experts * num_sequences
    group = jnp.where(routed, routing.experts * num_sequences + sequence, num_groups)
    _, places = sort_slots(group, num_groups)
    counts = expert_counts(group, num_groups)
    firsts = jnp.cumsum(counts) - counts
    position = places - jnp.take(firsts, group, mode="clip")
    kept = routed & (position < capacity)
    num_rows = num_groups * capacity
    row_of_slot = jnp.where(kept, group * capacity + position, num_rows).astype(jnp.int32)
    slots = jnp.arange(num_tokens * per_token, dtype=jnp.int32)
    slot_of_row = jnp.full(num_rows, -1, jnp.int32).at[row_of_slot.reshape(-1)].set(slots, mode="drop")
    return RouteMetadata(
        token_of_row=jnp.where(slot_of_row < 0, num_tokens, slot_of_row // per_token),
        slot_of_row=slot_of_row,
        row_of_slot=row_of_slot,
        weights=routing.weights,
        group_sizes=jnp.full(num_experts, num_rows // num_experts, jnp.int32),
        num_rows=jnp.full(1, num_rows, jnp.int32),
        used=slot_of_row >= 0,
        dropped=(routed & ~kept).sum(dtype=jnp.int32).reshape(1),
    )


def prepare_expert_choice(routing: RouteOutput) -> RouteMetadata:
    """Make a row for every choice of an expert, and count the tokens that no expert took as dropped."""
    assert routing.tokens is not None
    tokens = routing.tokens.reshape(-1).astype(jnp.int32)
    taken = jnp.zeros(routing.mask.shape, bool).at[tokens].set(True, mode="drop")
    return RouteMetadata(
        token_of_row=tokens,
        slot_of_row=None,
        row_of_slot=None,
        weights=routing.weights.reshape(-1),
        group_sizes=jnp.full(routing.tokens.shape[0], routing.tokens.shape[1], jnp.int32),
        num_rows=jnp.full(1, tokens.size, jnp.int32),
        used=tokens < routing.mask.shape[0],
        dropped=(routing.mask & ~taken).sum(dtype=jnp.int32, keepdims=True),
    )


def add_to_tokens(
    rows: Float[Array, "R D"], tokens: Int[Array, " R"], weights: Float[Array, " R"] | None, num_tokens: int
) -> Float[Array, "T D"]:
    """Add every row, weighted, to its token: the combine of expert choice, where a token has any number of rows."""
    wide = accumulator(rows.dtype)
    # Empty slots compute something from a zero row (biases): masked, not only dropped, for the weights' gradient.
    present = (tokens < num_tokens)[:, None]
    terms = jnp.where(present, rows, 0).astype(wide)
    if weights is not None:
        terms = terms * weights.astype(wide)[:, None]
    return jnp.zeros((num_tokens, rows.shape[1]), wide).at[tokens].add(terms, mode="drop").astype(rows.dtype)
