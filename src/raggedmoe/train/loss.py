"""Cross-entropy over a large vocabulary, a few tokens at a time.

The logits of all tokens, `[T V]` in float32, are often the largest array of a training step: 2 GB for 4096 tokens of a
vocabulary of 129280. Here they exist for one chunk of tokens only, and where a gradient is wanted it is taken while
the chunk's logits are there, so that nothing is computed twice. On a mesh each device cuts its own tokens into chunks,
and has the logits of its own entries of the vocabulary: what the ranks of the tensor axis exchange is a few numbers a
token, and the gradients of its hidden state.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Integer

from raggedmoe.kernels.arrays import accumulator, int32, matmul_precision, varying_like
from raggedmoe.mesh import TENSOR, TOKEN_AXES
from raggedmoe.models.matmul import wide_project
from raggedmoe.models.vocabulary import TOKENS, TableSharding, table_sharding

CHUNK_ELEMENTS = 2**24  # logits that exist at once: 64 MB in float32
LEAST_CHUNKS = 4  # and never more than this part of them


def chunk_tokens(num_tokens: int, vocab_size: int) -> int:
    """Tokens of one chunk: as few chunks as can be, as even as can be."""
    most = max(1, min(CHUNK_ELEMENTS // vocab_size, -(-num_tokens // LEAST_CHUNKS)))
    return -(-num_tokens // -(-num_tokens // most))


def cross_entropy_sum(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Integer[Array, " T"],
    weights: Float[Array, " T"],
    mesh: Mesh | None = None,
) -> Float[Array, ""]:
    """``Σ_t weights[t] · (logsumexp(logits[t]) - logits[t, targets[t]])`` with ``logits = hidden · headᵀ`` in float32.

    Divide by the sum of the weights for the mean. A token of weight zero adds nothing, whatever its hidden state holds.
    The weights are given, not learned: they get no gradient. With a plan's mesh, T is split over its token axes.
    """
    place = None if mesh is None else table_sharding(mesh, head.shape)
    return _cross_entropy_sum(hidden, head, int32(targets), weights, place)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy_sum(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, place: TableSharding | None
) -> jax.Array:
    def own(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        head = _whole(head, hidden.dtype, place)

        def body(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            losses, _ = _losses(place, head, *chunk)
            return total + losses.sum(), None

        start = varying_like(jnp.zeros((), accumulator(hidden.dtype)), hidden, targets, weights)
        return _of_all_tokens(lax.scan(body, start, _chunks(head, hidden, targets, weights))[0], place)

    return _on_each_device(own, place, PartitionSpec())(hidden, head, targets, weights)


def _on_each_device(function: Any, place: TableSharding | None, results: Any) -> Any:
    if place is None:
        return function
    arguments = (TOKENS, place.spec, TOKENS, TOKENS)
    return jax.shard_map(function, mesh=place.mesh, in_specs=arguments, out_specs=results)


def _whole(head: jax.Array, dtype: Any, place: TableSharding | None) -> jax.Array:
    """This device's entries of the vocabulary, with their whole width."""
    return head if place is None else place.whole_width(head.astype(dtype))


def _of_all_tokens(total: jax.Array, place: TableSharding | None) -> jax.Array:
    return total if place is None else lax.psum(total, TOKEN_AXES)


def _over_entries(reduced: Any, array: jax.Array, place: TableSharding | None) -> jax.Array:
    """A reduction over this device's entries made one over all."""
    return array if place is None or not place.is_split else reduced(array, TENSOR)


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, place: TableSharding | None
) -> tuple[jax.Array, tuple]:
    """The value, and both gradients for a cotangent of one."""
    results = None if place is None else (PartitionSpec(), (TOKENS, place.spec))
    own = functools.partial(_value_and_gradients, place=place)
    return _on_each_device(own, place, results)(hidden, head, targets, weights)


def _value_and_gradients(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, place: TableSharding | None
) -> tuple[jax.Array, tuple]:
    stored_dtype, wide = head.dtype, accumulator(hidden.dtype)
    head = _whole(head, hidden.dtype, place)
    product = functools.partial(jnp.einsum, precision=matmul_precision(hidden.dtype), preferred_element_type=wide)

    def body(carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        total, d_head = carry
        rows = jnp.where(chunk[2][:, None] != 0, chunk[0], 0)  # 0 · NaN would be NaN in the head's gradient
        losses, d_logits = _losses(place, head, rows, *chunk[1:])
        narrow = d_logits.astype(hidden.dtype)
        d_rows = _over_entries(lax.psum, product("tv,vd->td", narrow, head.astype(hidden.dtype)), place)
        d_head = d_head + product("tv,td->vd", narrow, rows)
        return (total + losses.sum(), d_head), d_rows.astype(hidden.dtype)

    start = (
        varying_like(jnp.zeros((), wide), hidden, targets, weights),
        varying_like(jnp.zeros(head.shape, wide), head, hidden, targets, weights),
    )
    (total, d_head), d_rows = lax.scan(body, start, _chunks(head, hidden, targets, weights))
    d_hidden = d_rows.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    d_head = d_head if place is None else place.stored_part(d_head)
    return _of_all_tokens(total, place), (d_hidden, d_head.astype(stored_dtype))


def _backward(place: TableSharding | None, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple:
    d_hidden, d_head = saved
    return (d_hidden * cotangent).astype(d_hidden.dtype), (d_head * cotangent).astype(d_head.dtype), None, None


_cross_entropy_sum.defvjp(_forward, _backward)


def _losses(
    place: TableSharding | None, head: jax.Array, rows: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[Float[Array, " C"], Float[Array, "C V"]]:
    """Weighted losses of a chunk, and their gradient for the logits of the entries that are here."""
    logits = wide_project(rows, head)
    counts = weights != 0
    logits = jnp.where(counts[:, None], logits, 0)
    peak = _over_entries(lax.pmax, logits.max(axis=1, keepdims=True), place)
    exponentials = jnp.exp(logits - peak)
    sums = _over_entries(lax.psum, exponentials.sum(axis=1, keepdims=True), place)
    first = 0 if place is None else place.first_entry(head.shape[0])
    hit = (jnp.arange(head.shape[0]) + first)[None] == targets[:, None]
    if place is None:
        of_target = jnp.take_along_axis(logits, targets[:, None], axis=1)
    else:  # it may be another rank's
        of_target = _over_entries(lax.psum, jnp.where(hit, logits, 0).sum(axis=1, keepdims=True), place)
    losses = weights * (jnp.log(sums) + peak - of_target)[:, 0]
    return losses, weights[:, None] * (exponentials / sums - hit)


def _chunks(
    head: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens in equal chunks; those added to fill the last one have weight zero."""
    num_tokens = hidden.shape[0]
    size = chunk_tokens(num_tokens, head.shape[0])
    missing = -num_tokens % size

    def cut(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
        return padded.reshape(-1, size, *array.shape[1:])

    return cut(hidden), cut(targets), cut(weights.astype(accumulator(hidden.dtype)))
