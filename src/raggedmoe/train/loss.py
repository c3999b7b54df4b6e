"""Cross-entropy over a large vocabulary, a few tokens at a time.

The logits of all tokens, `[T V]` in float32, are often the largest array of a training step: 2 GB for 4096 tokens of a
vocabulary of 129280. Here they exist for one chunk of tokens only, and where a gradient is wanted it is taken while
the chunk's logits are there, so that nothing is computed twice.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import accumulator, matmul_precision
from raggedmoe.models.matmul import wide_project

CHUNK_ELEMENTS = 2**24  # logits that exist at once: 64 MB in float32
LEAST_CHUNKS = 4  # and never more than this part of them


def chunk_tokens(num_tokens: int, vocab_size: int) -> int:
    """Tokens of one chunk: as few chunks as can be, as even as can be."""
    most = max(1, min(CHUNK_ELEMENTS // vocab_size, -(-num_tokens // LEAST_CHUNKS)))
    return -(-num_tokens // -(-num_tokens // most))


@jax.custom_vjp
def cross_entropy_sum(
    hidden: Float[Array, "T D"], head: Float[Array, "V D"], targets: Int[Array, " T"], weights: Float[Array, " T"]
) -> Float[Array, ""]:
    """``Σ_t weights[t] · (logsumexp(logits[t]) - logits[t, targets[t]])`` with ``logits = hidden · headᵀ`` in float32.

    Divide by the sum of the weights for the mean. A token of weight zero adds nothing, whatever its hidden state holds.
    The weights are given, not learned: they get no gradient.
    """

    def body(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        losses, _ = _losses(head, *chunk)
        return total + losses.sum(), None

    return lax.scan(body, jnp.zeros((), accumulator(hidden.dtype)), _chunks(head, hidden, targets, weights))[0]


def _forward(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, tuple]:
    """The value, and both gradients for a cotangent of one."""
    wide = accumulator(hidden.dtype)
    product = functools.partial(jnp.einsum, precision=matmul_precision(hidden.dtype), preferred_element_type=wide)

    def body(carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        total, d_head = carry
        rows = jnp.where(chunk[2][:, None] != 0, chunk[0], 0)  # 0 · NaN would be NaN in the head's gradient
        losses, d_logits = _losses(head, rows, *chunk[1:])
        narrow = d_logits.astype(hidden.dtype)
        d_rows = product("tv,vd->td", narrow, head.astype(hidden.dtype))
        d_head = d_head + product("tv,td->vd", narrow, rows)
        return (total + losses.sum(), d_head), d_rows.astype(hidden.dtype)

    start = (jnp.zeros((), wide), jnp.zeros(head.shape, wide))
    (total, d_head), d_rows = lax.scan(body, start, _chunks(head, hidden, targets, weights))
    d_hidden = d_rows.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    return total, (d_hidden, d_head.astype(head.dtype))


def _backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple:
    d_hidden, d_head = saved
    return (d_hidden * cotangent).astype(d_hidden.dtype), (d_head * cotangent).astype(d_head.dtype), None, None


cross_entropy_sum.defvjp(_forward, _backward)


def _losses(
    head: jax.Array, rows: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[Float[Array, " C"], Float[Array, "C V"]]:
    """Weighted losses of a chunk, and their gradient for the logits."""
    logits = wide_project(rows, head)
    counts = weights != 0
    logits = jnp.where(counts[:, None], logits, 0)
    peak = logits.max(axis=1, keepdims=True)
    exponentials = jnp.exp(logits - peak)
    sums = exponentials.sum(axis=1, keepdims=True)
    of_target = jnp.take_along_axis(logits, targets[:, None], axis=1)
    losses = weights * (jnp.log(sums) + peak - of_target)[:, 0]
    hit = jnp.arange(head.shape[0])[None] == targets[:, None]
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
