"""How our contract is put to tokamax's ragged dot on a GPU.

Its groups start at row 0, ours at ``bounds[0]``. Its Triton kernel leaves the rows of no group as they are in memory,
and gives the matrix of an empty group the products of rows that are not its own (tokamax 0.0.12): both are set to zero
here.
"""

import importlib.util

import jax.numpy as jnp
from jax import lax

from raggedmoe.kernels.arrays import matmul_precision
from raggedmoe.kernels.tokamax_flags import leave_command_line_alone


def has_triton() -> bool:
    """Say whether this tokamax can make its Triton kernel, which was written in Pallas once, and is in Triton now."""
    in_pallas = importlib.util.find_spec("tokamax._src.ops.ragged_dot.pallas_triton") is not None
    return in_pallas or importlib.util.find_spec("jax_triton") is not None


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, backend="triton"):
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    rows = jnp.roll(lhs, -bounds[0], axis=0)
    out = jnp.roll(_ragged_dot(rows, rhs, bounds, numbers, out_dtype, backend), bounds[0], axis=0)
    row = jnp.arange(lhs.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where((row >= bounds[0]) & (row < bounds[-1]), out, 0)


def transposed_matmul(lhs, rhs, bounds, *, backend="triton"):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    lhs, rhs = (jnp.roll(array, -bounds[0], axis=0) for array in (lhs, rhs))
    out = _ragged_dot(lhs, rhs, bounds, numbers, lhs.dtype, backend)
    return jnp.where((bounds[1:] > bounds[:-1])[:, None, None], out, 0)


def _ragged_dot(lhs, rhs, bounds, numbers, out_dtype, backend):
    import tokamax
    from tokamax._src import config

    leave_command_line_alone()
    with config.cross_compile(True):  # what is compiled for is the caller's choice, not the device that is attached
        return tokamax.ragged_dot_general(
            lhs,
            rhs,
            bounds[1:] - bounds[:-1],
            numbers,
            precision=matmul_precision(lhs.dtype),
            preferred_element_type=out_dtype,
            implementation=backend,
        )
