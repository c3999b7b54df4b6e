"""`ragged_gather_reduce`: R routed rows summed back into T tokens, weighted."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.arrays import check_array, check_size, int32, scalar, structs
from raggedmoe.kernels.bilinear import RowMoveKernels, product
from raggedmoe.kernels.gradient import refuse_forward_mode
from raggedmoe.kernels.placement import placement, pvary_alike
from raggedmoe.kernels.registry import Choice, select_kernels

NAME = "ragged_gather_reduce"


def ragged_gather_reduce(
    rows: Float[Array, "R D"],
    indices: Integer[Array, "T K"],
    *,
    weights: Float[Array, "T K"] | None = None,
    start: int | Integer[Array, ""] | None = None,
    end: int | Integer[Array, ""] | None = None,
    inverse: Integer[Array, " R"] | None = None,
    implementation: Choice = "auto",
    hardware: Hardware | str | None = None,
) -> Float[Array, "T D"]:
    """Compute ``out[t] = Σ_k weights[t, k] · rows[indices[t, k]]`` over the slots whose index is in ``[start, end)``.

    Args:
      rows: the rows to sum, of which those in ``[start, end)`` are valid.
      indices: the row of each slot. A slot whose index is outside ``[start, end)``, or outside the array, adds nothing.
      weights: a factor for each slot, applied in float32 at least; its gradient is the row-dot of rows and cotangent.
      start, end: the valid range of rows, traced or not; by default all.
      inverse: the slot ``t·K + k`` that each row serves, -1 for none. With it the gradient of ``rows`` is a
        `ragged_gather`, without it a scatter-add.
      implementation: "auto", a name, a tuple of names in order of preference, or `Directions`.
      hardware: the chip to choose for; by default that of the mesh in use, or of the arrays.

    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[1.0], [10.0], [100.0]])
    >>> ragged_gather_reduce(rows, jnp.array([[0, 1], [2, 0]]), end=2)[:, 0]
    Array([11.,  1.], dtype=float32)
    """
    check_array(NAME, "rows", rows, "R D")
    check_array(NAME, "indices", indices, "T K", integer=True)
    if weights is not None:
        check_array(NAME, "weights", weights, "T K")
        if weights.shape != indices.shape:
            raise ValueError(
                f"{NAME}: expected weights of the shape of indices, {list(indices.shape)}, got {list(weights.shape)}; "
                "give one weight for each slot"
            )
    if inverse is not None:
        check_array(NAME, "inverse", inverse, "R", integer=True)
        check_size(NAME, "len(inverse)", rows.shape[0], inverse.shape[0], "give one slot for each row")
    refuse_forward_mode(NAME, rows, weights)
    if 0 in rows.shape or 0 in indices.shape:
        return jnp.zeros((indices.shape[0], rows.shape[1]), rows.dtype)
    indices, inverse = int32(indices), None if inverse is None else int32(inverse)
    target = target_hardware(hardware, (rows, indices))
    arrays = structs(rows=rows, indices=indices, weights=weights, inverse=inverse)
    options = placement(rows, indices)
    kernels = select_kernels(NAME, implementation, target, arrays=arrays, options=options)
    static = RowMoveKernels(kernels, jax.ShapeDtypeStruct(rows.shape, rows.dtype))
    start_row, end_row = scalar(start, 0), scalar(end, rows.shape[0])
    rows, indices, weights, inverse = pvary_alike(rows, indices, weights, inverse)
    return product(static, rows, weights, (indices, start_row, end_row, inverse))
