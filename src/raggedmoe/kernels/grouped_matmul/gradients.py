"""The backward pass of `grouped_matmul` from two functions that every implementation has."""

from collections.abc import Callable
from typing import Any

import jax

from raggedmoe.kernels.dequantize import gradient_type
from raggedmoe.kernels.qarray import QArray


def matmul_gradients(
    forward: Callable[..., jax.Array],
    transposed_matmul: Callable[..., jax.Array],
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
    bounds: jax.Array,
    cotangent: jax.Array,
    *,
    transpose_rhs: bool,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute lhs's gradient, the forward pass with the other layout, and rhs's, each group's ``lhsᵀ @ cotangent``.

    Of a quantised operand they are the gradients of what it stands for, in the type of sums.

    ``options``: what both functions take beside the contract's arguments, such as the hardware.
    """
    dlhs = forward(cotangent, rhs, bounds, transpose_rhs=not transpose_rhs, out_dtype=gradient_type(lhs), **options)
    first, second = (cotangent, lhs) if transpose_rhs else (lhs, cotangent)
    if isinstance(rhs, QArray):
        options["out_dtype"] = gradient_type(rhs)
    return dlhs, transposed_matmul(first, second, bounds, **options)
