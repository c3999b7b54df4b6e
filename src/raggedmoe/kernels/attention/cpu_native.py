"""`attention` for CPUs in C++ (cpu_native.cc): a block of queries by the keys that they see, its scores in cache."""

import jax.numpy as jnp
import numpy as np

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.attention.operands import Operands
from raggedmoe.kernels.native.library import native_call, native_implementation, native_why_not
from raggedmoe.kernels.registry import Call


def forward(operands, *, scale, window):
    batch, length, heads, _ = operands.query.shape
    out = (batch, length, heads, operands.value.shape[3]), operands.query.dtype
    results = [out, ((batch, heads, length), jnp.float32)]
    return tuple(native_call("raggedmoe_attention", results, *_arrays(operands), **_attributes(scale, window)))


def backward(operands, out, logsumexp, cotangent, *, scale, window):
    arrays = (*_arrays(operands), out, logsumexp, cotangent)
    results = [(array.shape, array.dtype) for array in (operands.query, operands.key, operands.value)]
    dquery, dkey, dvalue = native_call("raggedmoe_attention_gradients", results, *arrays, **_attributes(scale, window))
    dsinks = None
    if operands.sinks is not None:
        mean = jnp.einsum("bsnw,bsnw->bns", cotangent, out, preferred_element_type=jnp.float32)
        sinks = operands.sinks.astype(jnp.float32)[None, :, None]
        dsinks = -(jnp.exp(sinks - logsumexp) * mean).sum((0, 2)).astype(operands.sinks.dtype)
    return dquery, dkey, dvalue, dsinks


def _arrays(operands: Operands):
    """List the arrays in the order of the C++ functions, with empty ones for those that are not there."""
    none, sinks = jnp.zeros(0, jnp.int32), operands.sinks
    positions, segments = (none if array is None else array for array in (operands.positions, operands.segments))
    sinks = jnp.zeros(0) if sinks is None else sinks.astype(jnp.float32)
    return operands.query, operands.key, operands.value, positions, segments, sinks


def _attributes(scale, window):
    return {"scale": np.float32(scale), "window": np.int64(window or 0)}


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run."""
    return native_why_not(call, hardware, call.arrays["query"].dtype)


IMPLEMENTATION = native_implementation(
    "attention",
    forward=forward,
    backward=backward,
    why_not=why_not,
)
