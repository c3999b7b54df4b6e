"""Rows by their experts' matrices where every expert has as many rows: one batched matmul, by XLA."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from raggedmoe.kernels.arrays import accumulator, matmul_precision


def batched_matmul(
    rows: Float[Array, "R _"],
    matrices: Float[Array, "G _ _"],
    *,
    used: Bool[Array, " R"] | None,
    matrix_dim: int,
    dtype: Any,
) -> Float[Array, "R _"]:
    """Multiply the R/G rows of each expert by its matrix, of which ``matrix_dim`` is contracted, into ``dtype``.

    Rows that are not ``used`` are zero. What an expert's matrix holds, NaN too, is for the rows that are used alone.
    """

    def mask(rows: Array) -> Array:
        return rows if used is None else jnp.where(used[:, None], rows, 0)

    parts = mask(rows).reshape(matrices.shape[0], -1, rows.shape[1])
    out = lax.dot_general(
        parts,
        matrices,
        (((2,), (matrix_dim,)), ((0,), (0,))),
        precision=matmul_precision(rows.dtype),
        preferred_element_type=accumulator(rows.dtype),
    )
    return mask(out.astype(dtype).reshape(rows.shape[0], out.shape[-1]))
