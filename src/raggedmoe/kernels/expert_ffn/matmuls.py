"""`expert_ffn` out of grouped matmuls: the forward pass unfused, and the backward pass that fused ones use as well."""

import jax
import jax.numpy as jnp

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.expert_ffn.api import ExpertBiases, ExpertWeights


def group_of_row(bounds, num_rows):
    """The group of each row, and whether it has one."""
    row = jnp.arange(num_rows, dtype=jnp.int32)
    group = jnp.searchsorted(bounds, row, side="right").astype(jnp.int32) - 1
    return jnp.clip(group, 0, bounds.shape[0] - 2), (row >= bounds[0]) & (row < bounds[-1])


def add_bias(rows, bias, bounds):
    """``rows + bias[group]`` for the valid rows; the others are left as they are."""
    if bias is None:
        return rows
    group, valid = group_of_row(bounds, rows.shape[0])
    return rows + jnp.where(valid[:, None], jnp.take(bias, group, axis=0).astype(rows.dtype), 0)


def up_projections(matmul, rows, weights, bounds):
    """The activation's arguments, ``(gate, up)`` in float32, biases added; ``up`` is None for ungated experts."""

    def project(weight, bias):
        sums = matmul.forward(rows, weight, bounds, transpose_rhs=True, out_dtype=accumulator(rows.dtype))
        return add_bias(sums, bias, bounds)

    biases = weights.biases
    gate = project(weights.wi_0, None if biases is None else biases.wi_0)
    if weights.wi_1 is None:
        return gate, None
    return gate, project(weights.wi_1, None if biases is None else biases.wi_1)


def forward(matmul, rows, weights, bounds, activation):
    """The three matmuls and the activation between them."""
    hidden = ACTIVATIONS[activation](*up_projections(matmul, rows, weights, bounds)).astype(rows.dtype)
    if weights.biases is None:
        return matmul.forward(hidden, weights.wo, bounds, transpose_rhs=False, out_dtype=rows.dtype)
    out = matmul.forward(hidden, weights.wo, bounds, transpose_rhs=False, out_dtype=accumulator(rows.dtype))
    return add_bias(out, weights.biases.wo, bounds).astype(rows.dtype)


def backward(matmul, rows, weights, bounds, cotangent, activation):
    """Gradients of the rows and of all weights; the activation's arguments are computed again."""
    (gate, up) = up_projections(matmul, rows, weights, bounds)
    hidden, activation_vjp = jax.vjp(ACTIVATIONS[activation], gate, up)
    dhidden, dwo = matmul.backward(hidden.astype(rows.dtype), weights.wo, bounds, cotangent, transpose_rhs=False)
    _, valid = group_of_row(bounds, rows.shape[0])
    dgate, dup = activation_vjp(jnp.where(valid[:, None], dhidden, 0).astype(gate.dtype))
    dgate = dgate.astype(rows.dtype)
    drows, dwi_0 = matmul.backward(rows, weights.wi_0, bounds, dgate, transpose_rhs=True)
    dwi_1 = None
    if dup is not None:
        dup = dup.astype(rows.dtype)
        more, dwi_1 = matmul.backward(rows, weights.wi_1, bounds, dup, transpose_rhs=True)
        wide = accumulator(rows.dtype)
        drows = (drows.astype(wide) + more.astype(wide)).astype(rows.dtype)
    biases = weights.biases
    dbiases = None
    if biases is not None:
        dbiases = ExpertBiases(
            wi_0=group_sums(matmul, dgate, bounds, biases.wi_0),
            wi_1=None if dup is None else group_sums(matmul, dup, bounds, biases.wi_1),
            wo=group_sums(matmul, cotangent, bounds, biases.wo),
        )
    return drows, ExpertWeights(dwi_0, dwi_1, dwo, dbiases)


def group_sums(matmul, rows, bounds, like):
    """The sum of each group's rows: a transposed grouped matmul with a column of ones."""
    ones = jnp.ones((rows.shape[0], 1), rows.dtype)
    return matmul.transposed(ones, rows, bounds)[:, 0].astype(like.dtype)
