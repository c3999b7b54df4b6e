"""The oracle of `expert_ffn`. Short, slow and independent: do not tidy it, do not speed it up."""

import jax
import jax.numpy as jnp
from jax import lax

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.dequantize import dequantize, gradient_type
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.registry import WIDENED, Implementation


def forward(rows, weights, bounds, *, activation):
    return forward_with(ACTIVATIONS[activation], rows, weights, bounds)


def forward_with(function, rows, weights, bounds):
    wide, dtype = accumulator(rows.dtype), rows.dtype
    rows, weights = jax.tree.map(lambda operand: dequantize(operand, wide), (rows, weights), is_leaf=_is_quantized)
    row = jnp.arange(rows.shape[0])[:, None]
    out = jnp.zeros(rows.shape, wide)
    for g in range(weights.wi_0.shape[0]):
        mine = (row >= bounds[g]) & (row < bounds[g + 1])
        one = jax.tree.map(lambda weight: weight[g].astype(wide), weights)  # noqa: B023 (used in this turn only)
        x = jnp.where(mine, rows, 0).astype(wide)
        gate = jnp.matmul(x, one.wi_0.T, precision=lax.Precision.HIGHEST)
        up = None if one.wi_1 is None else jnp.matmul(x, one.wi_1.T, precision=lax.Precision.HIGHEST)
        if one.biases is not None:
            gate = gate + one.biases.wi_0[None]
            up = None if up is None else up + one.biases.wi_1[None]
        # Between the matmuls too, for the backward pass: a NaN in a weight is for its own rows, and 0 · NaN is NaN.
        gate, up = jnp.where(mine, gate, 0), None if up is None else jnp.where(mine, up, 0)
        y = jnp.matmul(function(gate, up), one.wo, precision=lax.Precision.HIGHEST)
        if one.biases is not None:
            y = y + one.biases.wo[None]
        out = out + jnp.where(mine, y, 0)
    return out.astype(dtype)


def backward(rows, weights, bounds, cotangent, *, activation, kept=None):
    wide = accumulator(rows.dtype)

    def whole(rows, weights):
        return forward(rows, weights, bounds, activation=activation)

    types = jax.tree.map(gradient_type, (rows, weights), is_leaf=_is_quantized)
    wide_inputs = jax.tree.map(
        lambda operand: dequantize(operand, wide).astype(wide), (rows, weights), is_leaf=_is_quantized
    )
    row = jnp.arange(rows.shape[0])[:, None]
    here = (row >= bounds[0]) & (row < bounds[-1])
    _, vjp = jax.vjp(whole, *wide_inputs)
    gradients = vjp(jnp.where(here, cotangent, 0).astype(wide))
    return jax.tree.map(lambda gradient, dtype: gradient.astype(dtype), gradients, types)


def _is_quantized(operand):
    return isinstance(operand, QArray)


IMPLEMENTATION = Implementation(
    operation="expert_ffn",
    name="reference",
    forward=forward,
    backward=backward,
    rank={"cpu": 90, "gpu": 90, "tpu": 90},
    proofs=PLAIN_XLA,
    quantized=WIDENED,
    note=lambda call, hardware: "the oracle: slow by design",
)
