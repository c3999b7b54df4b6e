"""`ragged_gather_reduce` on the SparseCores: the valid slots' rows summed in float32 (docs/sparsecore.md)."""

import jax.numpy as jnp

from raggedmoe.kernels import sparsecore
from raggedmoe.kernels.ragged_gather_reduce import xla
from raggedmoe.kernels.registry import BACKWARD, Call


def forward(rows, indices, start, end, weights, *, hardware):
    from raggedmoe.kernels.ragged_gather_reduce.sparsecore_kernel import gather_reduce

    return gather_reduce(rows, indices, start, end, weights, hardware=hardware)


def backward(rows, indices, start, end, weights, inverse, cotangent, *, hardware):
    if inverse is None:
        return xla.backward(rows, indices, start, end, weights, None, cotangent)
    from raggedmoe.kernels.ragged_gather.sparsecore_kernel import gather
    from raggedmoe.kernels.sparsecore_dots_kernel import row_dots

    num_tokens, num_slots = indices.shape
    token = jnp.where(inverse < 0, -1, inverse // num_slots)
    row_weights = None if weights is None else jnp.take(weights.reshape(-1), inverse, mode="clip")
    drows = gather(cotangent, token, start, end, row_weights, hardware=hardware)
    if weights is None:
        return drows, None
    token_of_slot = jnp.repeat(jnp.arange(num_tokens, dtype=jnp.int32), num_slots)
    valid = xla.valid_slots(indices, start, end, rows.shape[0]).reshape(-1)
    dots = row_dots(rows, indices.reshape(-1), cotangent, token_of_slot, valid, hardware=hardware)
    return drows, dots.reshape(indices.shape).astype(weights.dtype)


def note(call: Call) -> str:
    """Return the cost caveat that `explain` shows, for a call whose gradient is not XLA's."""
    if call.direction == BACKWARD and "weights" not in call.arrays:
        return "the cotangent is first rewritten as 32-bit words; the rest of the cost grows with the valid rows"
    return "all R rows, valid or not, are first rewritten as 32-bit words; the rest grows with the valid slots"


IMPLEMENTATION = sparsecore.gather_implementation("ragged_gather_reduce", "rows", forward, backward, note)
