"""The oracle of `grouped_matmul`. Short, slow and independent: do not tidy it, do not speed it up."""

import jax
import jax.numpy as jnp
from jax import lax

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.dequantize import dequantize, gradient_type
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.registry import WIDENED, Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype):
    wide = accumulator(lhs.dtype)
    lhs, rhs = dequantize(lhs, wide), dequantize(rhs, wide)
    row = jnp.arange(lhs.shape[0])[:, None]
    out = jnp.zeros((lhs.shape[0], rhs.shape[1] if transpose_rhs else rhs.shape[2]), wide)
    for g in range(rhs.shape[0]):
        mine = (row >= bounds[g]) & (row < bounds[g + 1])
        matrix = (rhs[g].T if transpose_rhs else rhs[g]).astype(wide)
        # Masked before and after, for both passes: a NaN in the matrix is for its own rows alone, and 0 · NaN is NaN.
        product = jnp.matmul(jnp.where(mine, lhs, 0).astype(wide), matrix, precision=lax.Precision.HIGHEST)
        out = jnp.where(mine, product, out)
    return out.astype(out_dtype)


def backward(lhs, rhs, bounds, cotangent, *, transpose_rhs):
    wide = accumulator(lhs.dtype)
    types = gradient_type(lhs), gradient_type(rhs)
    lhs, rhs = dequantize(lhs, wide), dequantize(rhs, wide)
    row = jnp.arange(lhs.shape[0])[:, None]
    here = (row >= bounds[0]) & (row < bounds[-1])

    def product(lhs, rhs):
        return forward(lhs, rhs, bounds, transpose_rhs=transpose_rhs, out_dtype=wide)

    _, vjp = jax.vjp(product, lhs.astype(wide), rhs.astype(wide))
    dlhs, drhs = vjp(jnp.where(here, cotangent, 0).astype(wide))
    return dlhs.astype(types[0]), drhs.astype(types[1])


def transposed_matmul(lhs, rhs, bounds, out_dtype=None):
    out_dtype = lhs.dtype if out_dtype is None else out_dtype
    wide = accumulator(lhs.dtype)
    lhs, rhs = dequantize(lhs, wide).astype(wide), dequantize(rhs, wide).astype(wide)
    row = jnp.arange(lhs.shape[0])[:, None]
    products = []
    for g in range(bounds.shape[0] - 1):
        mine = (row >= bounds[g]) & (row < bounds[g + 1])
        left, right = jnp.where(mine, lhs, 0), jnp.where(mine, rhs, 0)
        products.append(jnp.matmul(left.T, right, precision=lax.Precision.HIGHEST))
    return jnp.stack(products).astype(out_dtype)


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="reference",
    forward=forward,
    backward=backward,
    transposed=transposed_matmul,
    rank={"cpu": 90, "gpu": 90, "tpu": 90},
    proofs=PLAIN_XLA,
    quantized=WIDENED,
    note=lambda call, hardware: "the oracle: slow by design",
)
