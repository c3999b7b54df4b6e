"""`expert_ffn` for CPUs in C++ (cpu_native.cc): both projections of a tile of rows while its hidden rows are in cache.

Differentiated, the forward pass keeps the activation's arguments for the backward pass, which computes the hidden rows
again from them, an expert at a time, and every gradient once.

With quantised operands it is three of its grouped matmuls with the activation between them.
"""

import jax
import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.expert_ffn import matmuls
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.expert_ffn.api import ExpertBiases, ExpertWeights, KeptSums
from raggedmoe.kernels.grouped_matmul import cpu_native as grouped_matmul
from raggedmoe.kernels.native.library import native_call, native_implementation, native_why_not
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.registry import EMULATED, Call

NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}  # as in matmul_types.h


def forward(rows, weights, bounds, *, activation):
    if _has_quantized(rows, weights):
        return matmuls.forward(grouped_matmul, rows, weights, bounds, activation)
    return _forward(rows, weights, bounds, activation, keep=False)[0]


def forward_keeping(rows, weights, bounds, *, activation):
    if _has_quantized(rows, weights):
        return matmuls.forward_keeping(grouped_matmul, rows, weights, bounds, activation)
    out, gate, up = _forward(rows, weights, bounds, activation, keep=True)
    return out, KeptSums(gate, None if weights.wi_1 is None else up)


def _has_quantized(rows, weights):
    return any(isinstance(operand, QArray) for operand in (rows, *weights))


def _forward(rows, weights, bounds, activation, *, keep):
    sums = (rows.shape[0], weights.wi_0.shape[1])
    shapes = rows.shape, sums if keep else (0,), sums if keep and weights.wi_1 is not None else (0,)
    operands = rows, *_operands(weights, rows), bounds
    out = [(shape, rows.dtype) for shape in shapes]
    return native_call("raggedmoe_expert_ffn", out, *operands, activation=NUMBERS[activation])


def backward(rows, weights, bounds, cotangent, *, activation, kept=None):
    if _has_quantized(rows, weights):
        return matmuls.backward(grouped_matmul, rows, weights, bounds, cotangent, activation, kept)
    arrays = rows, *_operands(weights, rows)
    sums = (_or_empty(array, rows) for array in kept or (None, None))
    out = [(array.shape, rows.dtype) for array in arrays]
    drows, dwi_0, dwi_1, dwo, dbias_0, dbias_1, dbias_wo = native_call(
        "raggedmoe_expert_ffn_gradients", out, *arrays, bounds, *sums, cotangent, activation=NUMBERS[activation]
    )
    gated, biases = weights.wi_1 is not None, weights.biases
    if biases is not None:
        gradients = ExpertBiases(dbias_0, dbias_1 if gated else None, dbias_wo)
        biases = jax.tree.map(lambda gradient, bias: gradient.astype(bias.dtype), gradients, biases)
    return drows, ExpertWeights(dwi_0, dwi_1 if gated else None, dwo, biases)


def _operands(weights, rows):
    """List all weights and biases, in the order of the C++ function, in the type of the rows."""
    biases = (None, None, None) if weights.biases is None else weights.biases
    return [_or_empty(array, rows) for array in (weights.wi_0, weights.wi_1, weights.wo, *biases)]


def _or_empty(array, rows):
    return jnp.zeros(0, rows.dtype) if array is None else array.astype(rows.dtype)


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run."""
    weights = tuple(name for name in ("wi_0", "wi_1", "wo") if name in call.arrays)
    reason = grouped_matmul.quantized_why_not(call, "rows", weights)
    return reason or native_why_not(call, hardware, call.arrays["rows"].dtype)


IMPLEMENTATION = native_implementation(
    "expert_ffn",
    forward=forward,
    forward_keeping=forward_keeping,
    backward=backward,
    why_not=why_not,
    quantized=EMULATED,
)
