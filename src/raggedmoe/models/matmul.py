"""The few ways in which a decoder multiplies by a dense weight: sums in float32 at least, results in the input's type.

Weights are arrays, or stay quantised as a checkpoint stores them. They are multiplied as two dimensions: so XLA's CPU
backend multiplies by one token 8 times faster than in an einsum with heads spelled out (docs/log.md).
"""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.dense_matmul import dense_matmul, matmul_per_head, merge_rows
from raggedmoe.kernels.qarray import Quantized, cast_array
from raggedmoe.lora import B, dense_adapter, first_matrix
from raggedmoe.params import Params

Weight = Float[Array, "..."] | Quantized


def project(x: Float[Array, "... I"], weight: Weight) -> Float[Array, "..."]:
    """Multiply ``x [..., I]`` by ``weight [*O, I]``: the result is ``[..., *O]``."""
    return _project(x, weight, x.dtype)


def wide_project(x: Float[Array, "... I"], weight: Weight) -> Float[Array, "..."]:
    """Multiply as `project` does, but return the float32 accumulator."""
    return _project(x, weight, accumulator(x.dtype))


def _project(x: Float[Array, "... I"], weight: Any, out_dtype: Any) -> Float[Array, "..."]:
    *outs, inner = weight.shape
    rows, matrix = x.reshape(-1, inner), merge_rows(cast_array(weight, x.dtype))
    return dense_matmul(rows, matrix, transpose_rhs=True, out_dtype=out_dtype).reshape(*x.shape[:-1], *outs)


def project_back(x: Float[Array, "..."], weight: Weight) -> Float[Array, "..."]:
    """Multiply ``x [..., *I]`` by ``weight [*I, O]``: the result is ``[..., O]``."""
    return _project_back(x, weight, x.dtype)


def _project_back(x: Float[Array, "..."], weight: Any, out_dtype: Any) -> Float[Array, "..."]:
    *inner, out = weight.shape
    rows, matrix = x.reshape(-1, math.prod(inner)), merge_rows(cast_array(weight, x.dtype))
    product = dense_matmul(rows, matrix, transpose_rhs=False, out_dtype=out_dtype)
    return product.reshape(*x.shape[: x.ndim - len(inner)], out)


def linear(x: Float[Array, "... I"], weights: Params, name: str) -> Float[Array, "..."]:
    """Multiply by a weight as `project` does, and by its adapter, if it has one."""
    added = dense_adapter(x.reshape(-1, x.shape[-1]), weights, name)
    if added is None:
        return project(x, weights[name])
    sums = wide_project(x, weights[name])
    return (sums + added.reshape(sums.shape)).astype(x.dtype)


def linear_back(x: Float[Array, "..."], weights: Params, name: str) -> Float[Array, "..."]:
    """Multiply by a weight as `project_back` does, and by its adapter, if it has one."""
    *inner, _ = weights[name].shape
    added = dense_adapter(x.reshape(-1, math.prod(inner)), weights, name)
    if added is None:
        return project_back(x, weights[name])
    sums = _project_back(x, weights[name], accumulator(x.dtype))
    return (sums + added.reshape(sums.shape)).astype(x.dtype)


def linear_per_head(
    x: Float[Array, "B S N I"], weights: Params, name: str, *, back: bool = False
) -> Float[Array, "B S N O"]:
    """Multiply as `per_head` does, and by the weight's adapter, if it has one, whose first matrix all heads share."""
    out = per_head(x, weights[name], back=back)
    if f"{name}{B}" not in weights:
        return out
    of_heads = jnp.moveaxis(weights[f"{name}{B}"], 0, 1)  # [N rank X]
    shared = weights[first_matrix(name)]
    if back:
        return out + project_back(per_head(x, of_heads), shared)
    return out + per_head(project(x, shared), of_heads, back=True)


def per_head(x: Float[Array, "B S N I"], weight: Weight, *, back: bool = False) -> Float[Array, "B S N O"]:
    """Multiply every head by a matrix of its own, ``weight [N, O, I]``, or with ``back`` ``[N, I, O]``."""
    rows = jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 1, 0)
    out = matmul_per_head(rows, cast_array(weight, x.dtype), transpose_rhs=not back)
    return jnp.moveaxis(out, 0, 1).reshape(*x.shape[:3], -1)
