"""`ragged_gather`: rows fanned out from T tokens to R routed rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.arrays import check_array, check_size, int32, scalar, structs
from raggedmoe.kernels.bilinear import RowMoveKernels, product
from raggedmoe.kernels.gradient import refuse_forward_mode
from raggedmoe.kernels.placement import placement, pvary_alike
from raggedmoe.kernels.registry import Choice, select_kernels

NAME = "ragged_gather"


def ragged_gather(
    x: Float[Array, "T D"],
    indices: Integer[Array, " R"],
    *,
    start: int | Integer[Array, ""] | None = None,
    end: int | Integer[Array, ""] | None = None,
    weights: Float[Array, " R"] | None = None,
    inverse: Integer[Array, "T K"] | None = None,
    implementation: Choice = "auto",
    hardware: Hardware | str | None = None,
) -> Float[Array, "R D"]:
    """Compute ``out[i] = weights[i] · x[indices[i]]`` for ``start <= i < end``; every other row is zero.

    Args:
      x: the rows to read.
      indices: the row of ``x`` for each output row. One outside ``[0, T)`` gives a zero row; there is no wrap-around.
      start, end: the valid range of output rows, traced or not; by default all.
      weights: a factor for each output row, applied in float32 at least.
      inverse: where each row of ``x`` went, each valid output row once; -1 or any row out of range: nowhere. With it
        the gradient of ``x`` is a `ragged_gather_reduce`, without it a scatter-add.
      implementation: "auto", a name, a tuple of names in order of preference, or `Directions`.
      hardware: the chip to choose for; by default that of the mesh in use, or of the arrays.

    >>> import jax.numpy as jnp
    >>> ragged_gather(jnp.array([[1.0], [2.0]]), jnp.array([1, 0, 1]), end=2)[:, 0]
    Array([2., 1., 0.], dtype=float32)
    """
    check_array(NAME, "x", x, "T D")
    check_array(NAME, "indices", indices, "R", integer=True)
    if weights is not None:
        check_array(NAME, "weights", weights, "R")
        check_size(NAME, "len(weights)", indices.shape[0], weights.shape[0], "give one weight for each index")
    if inverse is not None:
        check_array(NAME, "inverse", inverse, "T K", integer=True)
        check_size(NAME, "inverse.shape[0]", x.shape[0], inverse.shape[0], "give one line for each row of x")
    refuse_forward_mode(NAME, x, weights)
    if 0 in x.shape or indices.shape[0] == 0:
        return jnp.zeros((indices.shape[0], x.shape[1]), x.dtype)
    indices, inverse = int32(indices), None if inverse is None else int32(inverse)
    target = target_hardware(hardware, (x, indices))
    arrays = structs(x=x, indices=indices, weights=weights, inverse=inverse)
    options = placement(x, indices)
    kernels = select_kernels(NAME, implementation, target, arrays=arrays, options=options)
    static = RowMoveKernels(kernels, jax.ShapeDtypeStruct(x.shape, x.dtype))
    start_row, end_row = scalar(start, 0), scalar(end, indices.shape[0])
    x, indices, weights, inverse = pvary_alike(x, indices, weights, inverse)
    return product(static, x, weights, (indices, start_row, end_row, inverse))
