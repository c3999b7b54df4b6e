"""`ragged_gather_reduce` for CPUs in C++ (cpu_native.cc): a token's rows are summed in float32 on all threads."""

import functools

import jax.numpy as jnp

from raggedmoe.kernels.native.library import native_call, native_implementation
from raggedmoe.kernels.ragged_gather import cpu_native as ragged_gather
from raggedmoe.kernels.ragged_gather.xla import scatter_add_note
from raggedmoe.kernels.ragged_gather_reduce import xla


def forward(rows, indices, start, end, weights):
    out, row_range = ((indices.shape[0], rows.shape[1]), rows.dtype), jnp.stack([start, end])
    return native_call(
        "raggedmoe_gather_reduce", out, rows, indices, row_range, ragged_gather.optional_weights(weights)
    )


def row_dots(rows, indices, start, end, cotangent, *, range_of_lines=False):
    """Compute ``out[l, k] = rows[indices[l, k]] · cotangent[l]`` in float32 where the index, or l, is in range."""
    out, row_range = (indices.shape, jnp.float32), jnp.stack([start, end])
    return native_call("raggedmoe_row_dots", out, rows, indices, row_range, cotangent, range_of_lines=range_of_lines)


def backward(rows, indices, start, end, weights, inverse, cotangent):
    if inverse is None:
        return xla.backward(rows, indices, start, end, weights, inverse, cotangent)
    num_slots, dweights, row_weights = indices.shape[1], None, None
    inverse = jnp.where(inverse < 0, -num_slots, inverse)  # so that the token's index is negative as well
    if weights is not None:
        dweights = row_dots(rows, indices, start, end, cotangent).astype(weights.dtype)
        row_weights = jnp.take(weights.reshape(-1), inverse, mode="clip")
    return ragged_gather.forward(cotangent, inverse // num_slots, start, end, row_weights), dweights


IMPLEMENTATION = native_implementation(
    "ragged_gather_reduce",
    forward=forward,
    backward=backward,
    why_not=functools.partial(ragged_gather.why_not, rows="rows"),
    note=scatter_add_note,
)
