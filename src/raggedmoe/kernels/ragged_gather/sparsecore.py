"""`ragged_gather` on the SparseCores: a stream for each row, weights in the same pass (docs/sparsecore.md)."""

import jax.numpy as jnp

from raggedmoe.kernels import sparsecore
from raggedmoe.kernels.ragged_gather import xla
from raggedmoe.kernels.registry import BACKWARD, Call


def forward(x, indices, start, end, weights, *, hardware):
    from raggedmoe.kernels.ragged_gather.sparsecore_kernel import gather

    return gather(x, indices, start, end, weights, hardware=hardware)


def backward(x, indices, start, end, weights, inverse, cotangent, *, hardware):
    if inverse is None:
        return xla.backward(x, indices, start, end, weights, None, cotangent)
    from raggedmoe.kernels.ragged_gather_reduce.sparsecore_kernel import gather_reduce
    from raggedmoe.kernels.sparsecore_dots_kernel import row_dots

    slot_weights = None if weights is None else jnp.take(weights, inverse, mode="clip")
    dx = gather_reduce(cotangent, inverse, start, end, slot_weights, hardware=hardware)
    if weights is None:
        return dx, None
    row = jnp.arange(indices.shape[0], dtype=jnp.int32)
    valid = xla.valid_rows(indices, start, end, x.shape[0])
    dots = row_dots(x, indices, cotangent, row, valid, hardware=hardware)
    return dx, dots.astype(weights.dtype)


def note(call: Call) -> str:
    """Return the cost caveat that `explain` shows, for a call whose gradient is not XLA's."""
    if call.direction == BACKWARD:
        return "all R rows of the cotangent, valid or not, are first rewritten as 32-bit words"
    return "x is first rewritten as 32-bit words; the rest of the cost grows with the valid rows"


IMPLEMENTATION = sparsecore.gather_implementation("ragged_gather", "x", forward, backward, note)
