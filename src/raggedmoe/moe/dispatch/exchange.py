"""Rows sent between the ranks of a mesh axis, any number from each to each: the one move of `all_to_all`.

The way back, which is also the gradient, is the same move with the two sides' places exchanged.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Num

from raggedmoe.kernels.arrays import pvary_like
from raggedmoe.moe.records import Moves


def reverse_moves(moves: Moves) -> Moves:
    """Return the moves that bring every row back to where it was."""
    return Moves(
        sent=moves.received,
        sent_from=moves.received_at,
        sent_to=moves.received_from,
        received=moves.sent,
        received_from=moves.sent_to,
        received_at=moves.sent_from,
        grouped=moves.ungrouped,
        ungrouped=moves.grouped,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def exchange_rows(
    rows: Num[Array, "R D"], moves: Moves, num_rows: int, most: int, axes: tuple[str, ...], ragged: bool
) -> Num[Array, "N D"]:
    """Send rows to other ranks, and return what this rank receives in a buffer of ``num_rows``, zero where nobody sent.

    ``most``: the rows that one rank can send to another. ``ragged``: by `jax.lax.ragged_all_to_all`, which sends just
    the rows there are; otherwise, for platforms without it, by an all-to-all of equal parts.
    """
    if ragged:
        buffer = pvary_like(jnp.zeros((num_rows, rows.shape[1]), rows.dtype), rows, moves.sent)
        places = (moves.sent_from, moves.sent, moves.sent_to, moves.received)
        return lax.ragged_all_to_all(pvary_like(rows, buffer), buffer, *places, axis_name=axes)
    parts = _take_rows(rows, moves.sent_from[:, None] + _upto(most), _upto(most) < moves.sent[:, None])
    parts = lax.all_to_all(parts, axes, split_axis=0, concat_axis=0, tiled=True)
    at = jnp.arange(num_rows, dtype=jnp.int32)
    ends = moves.received_at + moves.received
    # Blocks do not overlap: a row is in at most one of them.
    within = (at[:, None] >= moves.received_at[None]) & (at[:, None] < ends[None])
    source = jnp.argmax(within, axis=1).astype(jnp.int32)
    place = source * most + at - moves.received_at[source]
    return _take_rows(parts.reshape(-1, rows.shape[1]), place, within.any(1))


def _forward(
    rows: jax.Array, moves: Moves, num_rows: int, most: int, axes: tuple[str, ...], ragged: bool
) -> tuple[jax.Array, tuple[Moves, jax.Array]]:
    return exchange_rows(rows, moves, num_rows, most, axes, ragged), (moves, jnp.zeros((rows.shape[0], 0)))


def _backward(
    num_rows: int, most: int, axes: tuple[str, ...], ragged: bool, saved: tuple[Moves, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    moves, like = saved
    return exchange_rows(cotangent, reverse_moves(moves), like.shape[0], most, axes, ragged), None


exchange_rows.defvjp(_forward, _backward)


def _upto(number: int) -> Int[Array, "1 N"]:
    return jnp.arange(number, dtype=jnp.int32)[None]


def _take_rows(rows: Num[Array, "R D"], indices: Int[Array, "..."], valid: jax.Array) -> Num[Array, "... D"]:
    """Take rows by their numbers; zero where not valid."""
    taken = jnp.take(rows, jnp.where(valid, indices, 0), axis=0, mode="clip")
    return jnp.where(valid[..., None], taken, 0)
