"""`grouped_matmul` by XLA's own ragged dot.

Where XLA has no kernel for it, the ragged dot is one dense product with zeros for the rows of other groups, and 0 · NaN
is NaN. So it is given finite numbers alone; where those of a group were not, its own results are made NaN afterwards.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import accumulator, matmul_precision, pvary_like
from raggedmoe.kernels.dequantize import decode_scale, decode_values, dequantize
from raggedmoe.kernels.grouped_matmul import masked_dot
from raggedmoe.kernels.grouped_matmul.api import group_of_row
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.proof import COMPILED_XLA
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.registry import WIDENED, Call, Implementation

WIDENED_OR_HALVED = (
    f"{WIDENED}; where rows are bfloat16 and scales are for all that is summed, in bfloat16, and sums are scaled"
)
FINITE_COPY = "a pass over the weights copies what is finite in them: NaN in one group's must not reach another's rows"


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype):
    lhs, rhs, row_scale, column_scale = _operands(lhs, rhs, transpose_rhs)
    here = _row_is_here(lhs, bounds)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    # The ragged dot's groups start at row 0; ours at bounds[0].
    rows = jnp.roll(jnp.where(here, lhs, 0), -bounds[0], axis=0)
    out = jnp.roll(_ragged_dot(rows, _finite(rhs), bounds, numbers), bounds[0], axis=0)
    spoilt = (~jnp.isfinite(rhs)).any(2 if transpose_rhs else 1)  # [G O]
    group = group_of_row(bounds, lhs.shape[0])[0]
    out = jnp.where(jnp.take(spoilt, group, axis=0), jnp.nan, out)
    out = out if row_scale is None else out * row_scale
    out = out if column_scale is None else out * jnp.take(column_scale, group, axis=0)
    return jnp.where(here, out, 0).astype(out_dtype)


def transposed_matmul(lhs, rhs, bounds, out_dtype=None):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    out_dtype = lhs.dtype if out_dtype is None else out_dtype
    lhs, rhs = _arrays(lhs, rhs)
    here = _row_is_here(lhs, bounds)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    lhs = jnp.roll(jnp.where(here, lhs, 0), -bounds[0], axis=0)
    rhs = jnp.roll(jnp.where(here, rhs, 0), -bounds[0], axis=0)
    out = _ragged_dot(_finite(lhs), _finite(rhs), bounds, numbers)
    group = group_of_row(bounds - bounds[0], lhs.shape[0])[0]
    of_lhs, of_rhs = (_spoilt_columns(array, group, out.shape[0]) for array in (lhs, rhs))  # [G I], [G O]
    return jnp.where(of_lhs[:, :, None] | of_rhs[:, None, :], jnp.nan, out).astype(out_dtype)


def _operands(lhs, rhs, transpose_rhs):
    """Make the arrays of a matmul, and factors of its float32 sums: [R 1] and [G O], or None.

    Every value of every format is exact in bfloat16. Where a scale is for all that is summed, and the rows are bfloat16
    or such values, values are multiplied as bfloat16, and the sums by the scales: half the copy, and one pass of a
    TPU's matrix unit instead of the six of float32. The roundings are as many, one for each scale.
    """
    sum_dim = 2 if transpose_rhs else 1
    can_wait = isinstance(rhs, QArray) and rhs.scale.shape[sum_dim] == 1
    if isinstance(lhs, QArray):
        can_wait = can_wait and lhs.scale.shape[1] == 1 and accumulator(lhs.dtype, rhs.dtype) == jnp.float32
    else:
        can_wait = can_wait and lhs.dtype == jnp.bfloat16
    if not can_wait:
        return *_arrays(lhs, rhs), None, None
    row_scale = None
    if isinstance(lhs, QArray):
        row_scale = decode_scale(lhs.scale, jnp.float32)
        lhs = decode_values(lhs.qvalue, lhs.qtype, jnp.bfloat16)
    num_groups, num_columns = rhs.shape[0], rhs.shape[3 - sum_dim]
    column_scale = decode_scale(rhs.scale, jnp.float32).squeeze(sum_dim)  # [G or 1, blocks of O]
    column_scale = jnp.repeat(column_scale, num_columns // column_scale.shape[1], axis=1)
    column_scale = jnp.broadcast_to(column_scale, (num_groups, num_columns))
    return lhs, decode_values(rhs.qvalue, rhs.qtype, jnp.bfloat16), row_scale, column_scale


def _arrays(*operands):
    """Dequantise operands of which some are quantised, to one type, the one of sums."""
    if not any(isinstance(operand, QArray) for operand in operands):
        return operands
    wide = accumulator(operands[0].dtype)
    return tuple(dequantize(operand, wide).astype(wide) for operand in operands)


def _finite(array):
    return jnp.where(jnp.isfinite(array), array, 0)


def _spoilt_columns(rows, group, num_groups):
    """Mark, ``[G columns]``, where a row of the group holds something that is not finite."""
    none = pvary_like(jnp.zeros((num_groups, rows.shape[1]), bool), rows, group)
    return none.at[group].max(~jnp.isfinite(rows), indices_are_sorted=True)


def _row_is_here(lhs, bounds):
    row = jnp.arange(lhs.shape[0], dtype=jnp.int32)[:, None]
    return (row >= bounds[0]) & (row < bounds[-1])


def _ragged_dot(lhs, rhs, bounds, numbers):
    # Under a mesh with explicit axes JAX has no rule for the result's sharding, and must be told.
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    plain = functools.partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=numbers,
        precision=matmul_precision(lhs.dtype),
        preferred_element_type=accumulator(lhs.dtype),
        out_sharding=P() if explicit else None,
    )
    call = jax.custom_batching.custom_vmap(lambda lhs, rhs, sizes: plain(lhs, rhs, sizes))

    @call.def_vmap
    def batch_operands(axis_size, in_batched, *operands):
        # JAX batches it only if every operand is, so a vmap that shares the weights has to repeat them.
        repeated = [
            operand if is_batched else jnp.broadcast_to(operand, (axis_size, *operand.shape))
            for operand, is_batched in zip(operands, in_batched)
        ]
        return jax.vmap(plain)(*repeated), True

    return call(lhs, rhs, bounds[1:] - bounds[:-1])


def note(call: Call, hardware: Hardware) -> str | None:
    """Return the cost caveat that `explain` shows."""
    rolls = "group_offset costs two rolls of the rows" if call.options["group_offset"] else None
    return "; ".join(filter(None, (masked_dot.note(call, hardware), FINITE_COPY, rolls)))


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="xla",
    forward=forward,
    backward=functools.partial(matmul_gradients, forward, transposed_matmul),
    transposed=transposed_matmul,
    rank={"cpu": 20, "gpu": 20, "tpu": 20},
    proofs=COMPILED_XLA,
    why_not=masked_dot.why_not,
    note=note,
    quantized=WIDENED_OR_HALVED,
)
