"""Cross-entropy over a large vocabulary, computed for a chunk of tokens at a time.

The logits of all tokens, `[T V]` in float32, are often the largest array of a training step: 2 GB for 4096 tokens of a
vocabulary of 129280. Here they exist for one chunk of tokens only, and gradients are taken while the chunk's logits are
there, so that nothing is computed twice. On a mesh each device cuts its own tokens into chunks,
and has the logits of its own entries of the vocabulary: what the ranks of the tensor axis exchange is a few numbers a
token, and the gradients of its hidden state.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from raggedmoe.kernels.arrays import accumulator, int32, matmul_precision, pvary_like
from raggedmoe.models.matmul import wide_project
from raggedmoe.sharding.axes import TOKEN_AXES, AnyMesh, logical_mesh
from raggedmoe.sharding.dense_layers import TableSharding, table_sharding
from raggedmoe.sharding.stage import REPLICATED, TOKENS, stage

CHUNK_ELEMENTS = 2**24  # logits that exist at once: 64 MB in float32
LEAST_CHUNKS = 4  # tokens are cut into at least this many chunks


def chunk_tokens(num_tokens: int, vocab_size: int) -> int:
    """Return the tokens of one chunk, such that there are as few chunks as possible, and these are even."""
    most = max(1, min(CHUNK_ELEMENTS // vocab_size, -(-num_tokens // LEAST_CHUNKS)))
    return -(-num_tokens // -(-num_tokens // most))


def cross_entropy_sum(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Integer[Array, " T"],
    weights: Float[Array, " T"],
    mesh: AnyMesh | None = None,
) -> Float[Array, ""]:
    """Compute the weighted sum of the cross-entropy of all tokens.

    This is ``Σ_t weights[t] · (logsumexp(logits[t]) - logits[t, targets[t]])`` with ``logits = hidden · headᵀ`` in
    float32. Divide by the sum of the weights for the mean. A token of weight zero adds nothing, whatever its
    hidden state holds. The weights get no gradient, as they are not learned. With a mesh, T is
    split over its token axes.
    """
    sharding = table_sharding(logical_mesh(mesh), head.shape)
    return _cross_entropy_sum(hidden, head, int32(targets), weights, sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy_sum(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, sharding: TableSharding
) -> jax.Array:
    @stage(hidden=TOKENS, head=sharding.spec, targets=TOKENS, weights=TOKENS, result=REPLICATED)
    def local_sum(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        head = sharding.gather_width(head.astype(hidden.dtype))

        def body(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            losses, _ = _losses(sharding, head, *chunk)
            return total + losses.sum(), None

        start = pvary_like(jnp.zeros((), accumulator(hidden.dtype)), hidden, targets, weights)
        return _sum_over_tokens(lax.scan(body, start, _chunks(head, hidden, targets, weights))[0], sharding)

    return sharding.mesh.run(local_sum, hidden, head, targets, weights)


def _sum_over_tokens(total: jax.Array, sharding: TableSharding) -> jax.Array:
    """Sum over the devices that tokens are split over."""
    return lax.psum(total, sharding.mesh.axes(*TOKEN_AXES))


def _reduce_over_vocab(reduce: Any, array: jax.Array, sharding: TableSharding) -> jax.Array:
    """Complete a reduction over this device's entries of the vocabulary to one over all of them."""
    return reduce(array, sharding.entry_axes) if sharding.entry_axes else array


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, sharding: TableSharding
) -> tuple[jax.Array, tuple]:
    """Compute the value, and both gradients for a cotangent of one."""
    result = (REPLICATED, (TOKENS, sharding.spec))
    on_device = stage(hidden=TOKENS, head=sharding.spec, targets=TOKENS, weights=TOKENS, result=result)
    return sharding.mesh.run(on_device(_value_and_gradients), hidden, head, targets, weights, sharding=sharding)


def _value_and_gradients(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, *, sharding: TableSharding
) -> tuple[jax.Array, tuple]:
    stored_dtype, wide = head.dtype, accumulator(hidden.dtype)
    _, scatter_gradient = jax.vjp(sharding.gather_width, head.astype(wide))
    head = sharding.gather_width(head.astype(hidden.dtype))
    product = functools.partial(jnp.einsum, precision=matmul_precision(hidden.dtype), preferred_element_type=wide)

    def body(carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        total, d_head = carry
        rows = jnp.where(chunk[2][:, None] != 0, chunk[0], 0)  # 0 · NaN would be NaN in the head's gradient
        losses, d_logits = _losses(sharding, head, rows, *chunk[1:])
        narrow = d_logits.astype(hidden.dtype)
        d_rows = _reduce_over_vocab(lax.psum, product("tv,vd->td", narrow, head.astype(hidden.dtype)), sharding)
        d_head = d_head + product("tv,td->vd", narrow, rows)
        return (total + losses.sum(), d_head), d_rows.astype(hidden.dtype)

    start = (
        pvary_like(jnp.zeros((), wide), hidden, targets, weights),
        pvary_like(jnp.zeros(head.shape, wide), head, hidden, targets, weights),
    )
    (total, d_head), d_rows = lax.scan(body, start, _chunks(head, hidden, targets, weights))
    d_hidden = d_rows.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    return _sum_over_tokens(total, sharding), (d_hidden, scatter_gradient(d_head)[0].astype(stored_dtype))


def _backward(sharding: TableSharding, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple:
    d_hidden, d_head = saved
    return (d_hidden * cotangent).astype(d_hidden.dtype), (d_head * cotangent).astype(d_head.dtype), None, None


_cross_entropy_sum.defvjp(_forward, _backward)


def _losses(
    sharding: TableSharding, head: jax.Array, rows: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[Float[Array, " C"], Float[Array, "C V"]]:
    """Compute the weighted losses of a chunk, and their gradient with respect to this device's logits."""
    logits = wide_project(rows, head)
    counts = weights != 0
    logits = jnp.where(counts[:, None], logits, 0)
    peak = _reduce_over_vocab(lax.pmax, logits.max(axis=1, keepdims=True), sharding)
    exponentials = jnp.exp(logits - peak)
    sums = _reduce_over_vocab(lax.psum, exponentials.sum(axis=1, keepdims=True), sharding)
    is_target = jnp.arange(head.shape[0])[None] == sharding.local_ids(targets, head)[:, None]
    if sharding.mesh.mesh is None:
        target_logit = jnp.take_along_axis(logits, targets[:, None], axis=1)
    else:  # it may be another rank's
        target_logit = _reduce_over_vocab(
            lax.psum, jnp.where(is_target, logits, 0).sum(axis=1, keepdims=True), sharding
        )
    losses = weights * (jnp.log(sums) + peak - target_logit)[:, 0]
    return losses, weights[:, None] * (exponentials / sums - is_target)


def _chunks(
    head: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cut the tokens into equal chunks; padding in the last one has weight zero."""
    num_tokens = hidden.shape[0]
    size = chunk_tokens(num_tokens, head.shape[0])
    missing = -num_tokens % size

    def cut(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
        return padded.reshape(-1, size, *array.shape[1:])

    return cut(hidden), cut(targets), cut(weights.astype(accumulator(hidden.dtype)))
