"""The few ways in which a decoder multiplies by a dense weight: sums in float32 at least, results in the input's type.

Written with two dimensions, which XLA's CPU backend multiplies by one token 8 times faster than the same einsum with
heads spelled out (docs/log.md, decoding).
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import accumulator, matmul_precision


def project(x: Float[Array, "... I"], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """``x [..., I]`` by ``weight [*O, I]``: ``[..., *O]``."""
    return wide_project(x, weight).astype(x.dtype)


def wide_project(x: Float[Array, "... I"], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """Like `project`, but returns the float32 accumulator."""
    *outs, inner = weight.shape
    rows, matrix = x.reshape(-1, inner), weight.astype(x.dtype).reshape(-1, inner)
    if rows.shape[0] == 1 and x.dtype.itemsize == 2:
        # One row of a 16-bit type goes to no matmul of XLA's CPU backend: 1.8 GB/s, and 5.8 as a sum (docs/log.md).
        out = (rows.astype(jnp.float32) * matrix.astype(jnp.float32)).sum(-1)
    else:
        out = _einsum("ti,oi->to", rows, matrix)
    return out.reshape(*x.shape[:-1], *outs)


def project_back(x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """``x [..., *I]`` by ``weight [*I, O]``: ``[..., O]``."""
    *inner, out = weight.shape
    size = math.prod(inner)
    rows, matrix = x.reshape(-1, size), weight.astype(x.dtype).reshape(size, out)
    if rows.shape[0] == 1 and x.dtype.itemsize == 2:
        product = (rows.astype(jnp.float32).reshape(size, 1) * matrix.astype(jnp.float32)).sum(0, keepdims=True)
    else:
        product = _einsum("ti,io->to", rows, matrix)
    return product.astype(x.dtype).reshape(*x.shape[: x.ndim - len(inner)], out)


def per_head(
    x: Float[Array, "B S N I"], weight: Float[Array, "N X Y"], *, back: bool = False
) -> Float[Array, "B S N O"]:
    """Every head by a matrix of its own, ``weight [N, O, I]``, or with ``back`` ``[N, I, O]``.

    Heads come first: with two or more tokens XLA's CPU backend has no other such product of bfloat16.
    """
    rows = jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 1, 0)
    out = _einsum("nti,nio->nto" if back else "nti,noi->nto", rows, weight.astype(x.dtype))
    return jnp.moveaxis(out, 0, 1).astype(x.dtype).reshape(*x.shape[:3], -1)


def _einsum(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    precision, wide = matmul_precision(x.dtype), accumulator(x.dtype)
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=wide)
