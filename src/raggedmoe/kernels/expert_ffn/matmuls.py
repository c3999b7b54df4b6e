"""`expert_ffn` out of grouped matmuls: the forward pass unfused, and the backward pass that fused ones use as well."""

import jax
import jax.numpy as jnp

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.dequantize import gradient_type
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.expert_ffn.api import ExpertBiases, ExpertWeights, KeptSums
from raggedmoe.kernels.grouped_matmul.api import group_of_row
from raggedmoe.kernels.qarray import QArray


def add_bias(rows, bias, bounds):
    """Add ``bias[group]`` to the valid rows; the others are left as they are."""
    if bias is None:
        return rows
    group, valid = group_of_row(bounds, rows.shape[0])
    return rows + jnp.where(valid[:, None], jnp.take(bias, group, axis=0).astype(rows.dtype), 0)


def up_projections(matmul, rows, weights, bounds):
    """Compute the activation's arguments ``(gate, up)`` in float32, with biases; ``up`` is None for ungated experts."""

    def project(weight, bias):
        sums = matmul.forward(rows, weight, bounds, transpose_rhs=True, out_dtype=accumulator(rows.dtype))
        return add_bias(sums, bias, bounds)

    biases = weights.biases
    gate = project(weights.wi_0, None if biases is None else biases.wi_0)
    if weights.wi_1 is None:
        return gate, None
    return gate, project(weights.wi_1, None if biases is None else biases.wi_1)


def forward(matmul, rows, weights, bounds, activation):
    """Compute the three matmuls and the activation between them."""
    return forward_keeping(matmul, rows, weights, bounds, activation)[0]


def forward_keeping(matmul, rows, weights, bounds, activation):
    """Compute what `forward` does, and return the activation's arguments too, in the type of the rows."""
    sums = KeptSums(*up_projections(matmul, rows, weights, bounds))
    return project_down(matmul, sums, rows, weights, bounds, activation), jax.tree.map(
        lambda s: s.astype(rows.dtype), sums
    )


def project_down(matmul, sums, rows, weights, bounds, activation):
    """Compute the activation and the matmul after it."""
    hidden = ACTIVATIONS[activation](*sums).astype(rows.dtype)
    if weights.biases is None:
        return matmul.forward(hidden, weights.wo, bounds, transpose_rhs=False, out_dtype=rows.dtype)
    out = matmul.forward(hidden, weights.wo, bounds, transpose_rhs=False, out_dtype=accumulator(rows.dtype))
    return add_bias(out, weights.biases.wo, bounds).astype(rows.dtype)


def backward(matmul, rows, weights, bounds, cotangent, activation, kept=None):
    """Compute the gradients of the rows and of all weights; the activation's arguments again, if they were not kept."""
    wide, dtype = accumulator(rows.dtype), rows.dtype
    if kept is None:
        sums = up_projections(matmul, rows, weights, bounds)
    else:
        sums = jax.tree.map(lambda array: array.astype(wide), tuple(kept))
    hidden, activation_vjp = jax.vjp(ACTIVATIONS[activation], *sums)
    dhidden = matmul.forward(cotangent, weights.wo, bounds, transpose_rhs=True, out_dtype=wide)
    dgate, dup = jax.tree.map(lambda sums: sums.astype(dtype), activation_vjp(dhidden))
    drows = matmul.forward(dgate, weights.wi_0, bounds, transpose_rhs=False, out_dtype=wide)
    if dup is not None:
        drows = drows + matmul.forward(dup, weights.wi_1, bounds, transpose_rhs=False, out_dtype=wide)
    dbiases = None
    if weights.biases is not None:
        dbiases = ExpertBiases(
            wi_0=group_sums(matmul, dgate, bounds, weights.biases.wi_0),
            wi_1=None if dup is None else group_sums(matmul, dup, bounds, weights.biases.wi_1),
            wo=group_sums(matmul, cotangent, bounds, weights.biases.wo),
        )

    def dweight(first, second, weight):
        wide = {"out_dtype": gradient_type(weight)} if isinstance(weight, QArray) else {}
        return matmul.transposed_matmul(first, second, bounds, **wide)

    return drows.astype(gradient_type(rows)), ExpertWeights(
        wi_0=dweight(dgate, rows, weights.wi_0),
        wi_1=None if dup is None else dweight(dup, rows, weights.wi_1),
        wo=dweight(hidden.astype(dtype), cotangent, weights.wo),
        biases=dbiases,
    )


def group_sums(matmul, rows, bounds, like):
    """Sum each group's rows by a transposed grouped matmul with a column of ones."""
    ones = jnp.ones((rows.shape[0], 1), rows.dtype)
    return matmul.transposed_matmul(ones, rows, bounds)[:, 0].astype(like.dtype)
