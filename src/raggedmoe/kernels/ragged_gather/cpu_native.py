"""`ragged_gather` for CPUs in C++ (cpu_native.cc): rows are copied on all threads, and only the valid ones are read."""

import functools

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.native.library import native_call, native_implementation, native_why_not
from raggedmoe.kernels.ragged_gather import xla
from raggedmoe.kernels.registry import Call


def forward(x, indices, start, end, weights):
    out = (indices.shape[0], x.shape[1]), x.dtype
    return native_call("raggedmoe_gather", out, x, indices, jnp.stack([start, end]), optional_weights(weights))


def backward(x, indices, start, end, weights, inverse, cotangent):
    if inverse is None:
        return xla.backward(x, indices, start, end, weights, inverse, cotangent)
    # Imported here because that file's backward pass is this one's forward.
    from raggedmoe.kernels.ragged_gather_reduce import cpu_native as ragged_gather_reduce

    dweights = slots = None
    if weights is not None:
        dweights = ragged_gather_reduce.row_dots(x, indices[:, None], start, end, cotangent, range_of_lines=True)
        dweights, slots = dweights[:, 0].astype(weights.dtype), jnp.take(weights, inverse, mode="clip")
    return ragged_gather_reduce.forward(cotangent, inverse, start, end, slots), dweights


def optional_weights(weights):
    """Return the weights as the C++ functions read them: none are an empty array."""
    return jnp.zeros(0) if weights is None else weights.astype(jnp.float32)


def why_not(call: Call, hardware: Hardware, rows: str) -> str | None:
    """Say why it cannot run; ``rows`` is the operation's name for the array whose rows it reads."""
    weights = call.arrays.get("weights")
    if weights is not None and weights.dtype == jnp.float64:
        return "it multiplies by weights in float32, not in float64"
    return native_why_not(call, hardware, call.arrays[rows].dtype)


IMPLEMENTATION = native_implementation(
    "ragged_gather",
    forward=forward,
    backward=backward,
    why_not=functools.partial(why_not, rows="x"),
    note=xla.scatter_add_note,
)
