"""Strategy `all_to_all`: experts are split over a mesh axis, and every row is sent to the rank that holds its expert.

A rank's rows are in the order of their experts, hence of the ranks that hold them. The ranks tell each other how many
rows each expert gets from them, which says where everything lies; then the rows go, and come back the same way. What
is sent is K rows a token, less those whose expert is here.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from raggedmoe.hardware import target_hardware
from raggedmoe.kernels.ragged_gather.api import ragged_gather
from raggedmoe.moe.dispatch import local
from raggedmoe.moe.dispatch.exchange import exchange_rows, reverse_moves
from raggedmoe.moe.dispatch.strategy import (
    combine_rows,
    gather_rows,
    most_rows,
    num_held,
    receive_rows,
    send_rows,
    weighs_input,
)
from raggedmoe.moe.records import Moves, RouteMetadata, RouteOutput, StageSettings
from raggedmoe.sharding.axes import EXPERT


def prepare(routing: RouteOutput, settings: StageSettings) -> RouteMetadata:
    """Sort the slots by expert, and find out who sends how much to whom.

    Where a receiver's buffer is full, later ranks' rows are left out, and of one rank's those of its later experts and
    slots: all ranks know all counts, so they agree.
    """
    metadata = local.prepare(routing, settings)
    assert routing.experts is not None
    axes, held = settings.on_mesh.axes(EXPERT), num_held(settings)
    rank, ranks = lax.axis_index(axes), settings.on_mesh.size(EXPERT)
    buffer = receive_rows(settings, *routing.experts.shape)
    counts = lax.all_gather(metadata.group_sizes, axes, tiled=True)
    by_rank = counts.reshape(ranks, ranks, held)  # [from, to, expert there]
    sizes = by_rank.sum(2, dtype=jnp.int32)
    sent_from = _firsts(sizes, axis=1)
    arrives_at = jnp.minimum(_firsts(sizes, axis=0), buffer)
    kept = jnp.minimum(sizes, buffer - arrives_at)
    # Of the rows that come here, how many of each expert have room: a block is filled from its front.
    arriving = by_rank[:, rank]
    starts = _firsts(arriving, axis=1)
    here = jnp.clip(kept[:, rank][:, None] - starts, 0, arriving)
    grouped, ungrouped = _order_by_expert(here, arrives_at[:, rank], buffer)
    # A slot has its row unless that is past what its receiver has room for (or, of a masked token, past all rows).
    row_of_slot, slot_of_row = metadata.row_of_slot, metadata.slot_of_row
    assert row_of_slot is not None
    assert slot_of_row is not None
    ends = (sent_from[rank] + kept[rank])[jnp.minimum(routing.experts // held, ranks - 1)]
    has_room = row_of_slot < ends
    row_has_room = jnp.take(has_room.reshape(-1), slot_of_row)
    return RouteMetadata(
        token_of_row=jnp.where(row_has_room, metadata.token_of_row, routing.experts.shape[0]),
        slot_of_row=jnp.where(row_has_room, slot_of_row, -1),
        row_of_slot=jnp.where(has_room, row_of_slot, row_of_slot.size),
        weights=metadata.weights,
        group_sizes=here.sum(0, dtype=jnp.int32),
        num_rows=metadata.num_rows,
        used=None,
        dropped=(sizes[rank] - kept[rank]).sum(dtype=jnp.int32, keepdims=True),
        moves=Moves(
            sent=kept[rank],
            sent_from=sent_from[rank],
            sent_to=arrives_at[rank],
            received=kept[:, rank],
            received_from=sent_from[:, rank],
            received_at=arrives_at[:, rank],
            grouped=grouped,
            ungrouped=ungrouped,
        ),
    )


def dispatch(
    x: Float[Array, "T D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "R D"]:
    """Send each token's rows to the ranks of their experts, and put them into the order of the experts there."""
    moves = metadata.moves
    assert moves is not None
    assert routing.experts is not None
    if weighs_input(settings):  # the weights multiply what 8 bits hold, as in `ring`
        x = send_rows(lambda x, _: x, x, None, settings)
    rows, buffer = gather_rows(x, metadata, settings), receive_rows(settings, *routing.experts.shape)
    shape = routing.experts.shape
    received = send_rows(lambda rows, moves: _exchange(rows, moves, buffer, shape, settings), rows, moves, settings)
    return _reorder(received, moves.grouped, moves.ungrouped, moves, settings)


def unpermute(
    rows: Float[Array, "R D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "T D"]:
    """Send the rows back to the ranks of their tokens, and add up each token's, weighted."""
    moves = metadata.moves
    assert moves is not None
    assert routing.experts is not None
    rows = _reorder(rows, moves.ungrouped, moves.grouped, moves, settings)
    shape = routing.experts.shape
    back = _exchange(rows, reverse_moves(moves), shape[0] * shape[1], shape, settings)
    return combine_rows(back, metadata, settings)


def _exchange(
    rows: Num[Array, "R D"], moves: Moves, num_rows: int, shape: tuple[int, ...], settings: StageSettings
) -> Num[Array, "N D"]:
    """Send the rows of ``shape`` T and K to other ranks, and return those received, in a buffer of ``num_rows``."""
    ragged = target_hardware(settings.execution.hardware).platform != "cpu"  # XLA has no ragged all-to-all there
    return exchange_rows(rows, moves, num_rows, most_rows(settings, *shape), settings.on_mesh.axes(EXPERT), ragged)


def _reorder(
    rows: Float[Array, "R D"],
    indices: Int[Array, " R"],
    inverse: Int[Array, " R"],
    moves: Moves,
    settings: StageSettings,
) -> Float[Array, "R D"]:
    """Put the rows that this rank received into the order of the indices."""
    if num_held(settings) == 1:  # rows of one expert are in order as they come
        return rows
    return ragged_gather(
        rows,
        indices,
        end=moves.received.sum(dtype=jnp.int32),
        inverse=inverse[:, None],
        implementation=settings.execution.kernel_choice.ragged_gather,
        hardware=settings.execution.hardware,
    )


def _order_by_expert(
    sizes: Int[Array, "P G"], arrives_at: Int[Array, " P"], buffer: int
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Return the permutation from the order of arrival (by rank, then expert) to that of experts, and its inverse.

    ``sizes``: the rows of each block. Rows without a place are sent out of range.
    """
    arrival = (arrives_at[:, None] + _firsts(sizes, axis=1)).T.reshape(-1)  # of the blocks in the experts' order
    by_expert = sizes.T.reshape(-1)
    firsts = _firsts(by_expert, axis=0)
    at = jnp.arange(buffer, dtype=jnp.int32)
    block = jnp.searchsorted(firsts + by_expert, at, side="right", method="compare_all")
    place = jnp.minimum(block, by_expert.shape[0] - 1)
    grouped = jnp.where(block < by_expert.shape[0], arrival[place] + at - firsts[place], buffer)
    ungrouped = jnp.full(buffer, buffer, jnp.int32).at[grouped].set(at, mode="drop")
    return grouped, ungrouped


def _firsts(sizes: jax.Array, axis: int) -> jax.Array:
    """Return where each block begins when blocks follow each other along an axis."""
    return (jnp.cumsum(sizes, axis=axis) - sizes).astype(jnp.int32)
