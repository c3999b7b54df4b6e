"""`attention` with bounded memory, as a plain XLA program: chunks of queries against chunks of slots.

The softmax is summed up as the chunks of slots come by (Milakov & Gimelshein, arXiv:1805.02867), and the backward pass
makes the weights again from their logsumexp (Dao et al., arXiv:2205.14135), so no more scores are held than one chunk
against another. Chunks of slots that no query of a chunk can see, later ones or outside the window, are not visited.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from raggedmoe.kernels.arrays import accumulator, pvary_like
from raggedmoe.kernels.attention.operands import Operands, by_key_head, einsum, sees_any_slot, visible
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.registry import Implementation

# A forward-only prototype at B1 S2048 N16 M4 H128 float32 on 2 cores: 256 x 256 127 ms, 128 x 512 133, 512 x 512 137,
# 512 x 1024 172; one key head at a time 140 (docs/log.md).
# Forward and backward on 2 cores, CPU milliseconds by chunk 64, 128, 256, 512 (docs/log.md, training):
#   B16 S256 N4 H48 43, 43, 82, -;  B8 S512 N4 H48 77, 64, 83, 150;  B4 S1024 N4 H48 176, 115, 110, 155
CHUNK = 256
SHORT_CHUNK, SHORT = 128, 1024  # and for sequences shorter than that
_PAST = 2**31 - 1  # where padding is, past every query


class _Queries(NamedTuple):
    """Chunks of C queries of P heads for each key head; or, inside a loop, one of the chunks."""

    query: Any  # [chunks, B M C P H]
    position: Any  # [chunks, B C], or [chunks, 1 C] where all sequences have the same
    segments: Any  # [chunks, B C] or None


class _Slots(NamedTuple):
    """All slots, padded to whole chunks; or, inside a loop, one of the chunks."""

    key: Any  # [B L M H]
    value: Any  # [B L M W]
    position: Any  # [L]
    segments: Any  # [B L] or None


def forward(operands, *, scale, window):
    queries, slots, sinks = _queries(operands), _slots(operands), _by_head(operands)
    wide = accumulator(operands.query.dtype)

    def one_chunk(_, chunk):
        rows = chunk.query.shape[:-1]
        # The highest so far is never minus infinity, even where a sink is: from itself it could not be subtracted.
        peak, total = jnp.full(rows, jnp.finfo(wide).min, wide), jnp.zeros(rows, wide)
        if sinks is not None:
            peak = jnp.maximum(peak, sinks)
            total = jnp.exp(sinks - peak)
        mean = jnp.zeros((*rows, slots.value.shape[-1]), wide)

        def add(j, state):
            peak, total, mean = state
            here = _chunk(slots, j)
            scores = _scores(chunk, here, scale, window)
            higher = jnp.maximum(peak, scores.max(-1))
            weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
            mean = mean * shrink[..., None] + einsum("bmcpk,bkmw->bmcpw", weights.astype(here.value.dtype), here.value)
            return higher, total * shrink + weights.sum(-1), mean

        first, last = _seen_chunks(chunk.position, operands.key.shape[1], window)
        peak, total, mean = lax.fori_loop(first, last, add, _pvary_tree((peak, total, mean), operands))
        seeing = sees_any_slot(chunk.position, operands.key.shape[1], window)[:, None, :, None]
        total = jnp.where(seeing, total, 1)
        out = (mean / total[..., None]).astype(operands.query.dtype)
        return None, (out, jnp.where(seeing, peak + jnp.log(total), jnp.inf))

    _, (out, logsumexp) = lax.scan(one_chunk, None, queries)
    return _join_chunks(out, operands), jnp.moveaxis(_join_chunks(logsumexp, operands), 1, 2)


def backward(operands, out, logsumexp, cotangent, *, scale, window):
    query, key, value, _, _, sinks = operands
    queries, slots = _queries(operands), _slots(operands)
    wide = accumulator(query.dtype)
    mean = jnp.einsum("bsnw,bsnw->bsn", cotangent.astype(wide), out.astype(wide))
    logsumexp = jnp.moveaxis(logsumexp, 1, 2)

    def one_chunk(gradients, chunk):
        chunk, cotangent, mean, logsumexp = chunk

        def add(j, state):
            dquery, dkey, dvalue = state
            here = _chunk(slots, j)
            weights = jnp.exp(_scores(chunk, here, scale, window) - logsumexp[..., None])
            slopes = einsum("bmcpw,bkmw->bmcpk", cotangent, here.value) - mean[..., None]
            slopes = (weights * slopes * scale).astype(query.dtype)
            dquery = dquery + einsum("bmcpk,bkmh->bmcph", slopes, here.key)
            dkey = _add_to_chunk(dkey, einsum("bmcpk,bmcph->bkmh", slopes, chunk.query), j)
            dvalue = _add_to_chunk(dvalue, einsum("bmcpk,bmcpw->bkmw", weights.astype(value.dtype), cotangent), j)
            return dquery, dkey, dvalue

        dquery = _pvary_tree(jnp.zeros(chunk.query.shape, wide), (operands, cotangent))
        first, last = _seen_chunks(chunk.position, key.shape[1], window)
        dquery, *gradients = lax.fori_loop(first, last, add, (dquery, *gradients))
        return tuple(gradients), dquery.astype(query.dtype)

    start = _pvary_tree((jnp.zeros(slots.key.shape, wide), jnp.zeros(slots.value.shape, wide)), (operands, cotangent))
    num_key_heads = key.shape[2]
    rows = [_query_chunks(by_key_head(array, num_key_heads), fill) for array, fill in ((cotangent, 0), (mean, 0))]
    rows.append(_query_chunks(by_key_head(logsumexp, num_key_heads), jnp.inf))
    (dkey, dvalue), dquery = lax.scan(one_chunk, start, (queries, *rows))
    dkey, dvalue = (array[:, : key.shape[1]].astype(key.dtype) for array in (dkey, dvalue))
    dsinks = None
    if sinks is not None:
        dsinks = -(jnp.exp(sinks.astype(wide)[None, None] - logsumexp) * mean).sum((0, 1)).astype(sinks.dtype)
    return _join_chunks(dquery, operands), dkey, dvalue, dsinks


def _queries(operands: Operands) -> _Queries:
    position = jnp.minimum(operands.query_positions(), _PAST - 1)
    query = _query_chunks(by_key_head(operands.query, operands.key.shape[2]), 0)
    segments = None if operands.segments is None else _in_chunks(operands.segments, 0)
    return _Queries(query, _in_chunks(position, -1), segments)


def _slots(operands: Operands) -> _Slots:
    key, value = _pad(operands.key, 0), _pad(operands.value, 0)
    position = jnp.arange(operands.key.shape[1], dtype=jnp.int32)
    segments = None if operands.segments is None else _pad(operands.segments, 0)
    return _Slots(key, value, _pad(position[None], _PAST)[0], segments)


def _by_head(operands: Operands):
    """Return the sinks as ``[B M C P]``, in the accumulator's type."""
    if operands.sinks is None:
        return None
    return operands.sinks.astype(accumulator(operands.query.dtype)).reshape(1, operands.key.shape[2], 1, -1)


def _scores(chunk: _Queries, here: _Slots, scale, window):
    """Compute the scores ``[B M C P K]``, minus infinity where a query does not see a slot."""
    segments = None if chunk.segments is None else (chunk.segments, here.segments)
    seen = visible(chunk.position, here.position, window, segments)
    scores = einsum("bmcph,bkmh->bmcpk", chunk.query, here.key) * scale
    return jnp.where(seen[:, None, :, None, :], scores, -jnp.inf)


def _seen_chunks(position, num_slots, window):
    """Return the first chunk of slots that any of the positions sees, and one past the last."""
    size = _sizes(num_slots)[1]
    last = jnp.minimum(position.max(), num_slots - 1)
    if window is None:
        return jnp.zeros_like(last), last // size + 1
    first = jnp.where(position < 0, num_slots, position).min() - window + 1
    return jnp.maximum(first, 0) // size, last // size + 1


def _sizes(length: int) -> tuple[int, int]:
    """Return how many chunks there are, and how long each is: as even as can be, so that little is padding."""
    count = -(-length // (SHORT_CHUNK if length < SHORT else CHUNK))
    return count, -(-length // count)


def _pad(array, fill):
    """Pad ``[B S ...]`` to whole chunks."""
    count, size = _sizes(array.shape[1])
    widths = [(0, 0), (0, count * size - array.shape[1])] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, widths, constant_values=fill)


def _in_chunks(array, fill):
    """Cut ``[B S ...]`` into chunks ``[chunks, B C ...]``."""
    count, size = _sizes(array.shape[1])
    array = _pad(array, fill)
    return jnp.moveaxis(array.reshape(array.shape[0], count, size, *array.shape[2:]), 1, 0)


def _query_chunks(array, fill):
    """Cut ``[B S M P ...]`` into chunks with heads first, ``[chunks, B M C P ...]``."""
    return jnp.moveaxis(_in_chunks(array, fill), 3, 2)


def _join_chunks(chunks, operands: Operands):
    """Join the chunks ``[chunks, B M C P ...]`` of the queries to ``[B S N ...]``."""
    batch, length, heads, _ = operands.query.shape
    rows = jnp.moveaxis(chunks, (0, 3), (1, 2))
    return rows.reshape(batch, -1, heads, *chunks.shape[5:])[:, :length]


def _chunk(slots: _Slots, j) -> _Slots:
    size = _sizes(slots.key.shape[1])[1]
    axes = _Slots(1, 1, 0, None if slots.segments is None else 1)
    return jax.tree.map(lambda array, axis: lax.dynamic_slice_in_dim(array, j * size, size, axis), slots, axes)


def _add_to_chunk(array, part, j):
    """Add ``part`` to chunk j of the array's slots."""
    start = j * part.shape[1]
    old = lax.dynamic_slice_in_dim(array, start, part.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(array, old + part, start, 1)


def _pvary_tree(values, arrays):
    return jax.tree.map(lambda value: pvary_like(value, *jax.tree.leaves(arrays)), values)


IMPLEMENTATION = Implementation(
    operation="attention",
    name="chunked",
    forward=forward,
    backward=backward,
    rank={"cpu": 40, "gpu": 40, "tpu": 40},
    proofs=PLAIN_XLA,
)
