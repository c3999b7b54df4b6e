"""Rows by their experts' matrices where every expert has as many rows: one batched matmul, by XLA."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from raggedmoe.kernels.arrays import accumulator, matmul_precision


def batched_matmul(
    used: Bool[Array, " R"], sums: str, dtype: Any, rows: Float[Array, "R _"], matrices: Float[Array, "G _ _"]
) -> Float[Array, "R _"]:
    """Multiply the R/G rows of each expert by its matrix, into ``dtype``; ``sums`` is for einsum.

    Rows that are not ``used`` are zero.
    """
    # Masked before and after: what an expert's matrix holds, NaN too, is for the rows of its own tokens alone.
    parts = jnp.where(used[:, None], rows, 0).reshape(matrices.shape[0], -1, rows.shape[1])
    wide, precision = accumulator(rows.dtype), matmul_precision(rows.dtype)
    out = jnp.einsum(sums, parts, matrices, precision=precision, preferred_element_type=wide)
    return jnp.where(used[:, None], out.astype(dtype).reshape(rows.shape[0], out.shape[-1]), 0)
