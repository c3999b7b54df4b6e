"""`grouped_matmul` by XLA's own ragged dot."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import accumulator, matmul_precision
from raggedmoe.kernels.grouped_matmul import masked_dot
from raggedmoe.kernels.grouped_matmul.gradients import gradients
from raggedmoe.kernels.proof import COMPILED_XLA
from raggedmoe.kernels.registry import Call, Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype):
    here = _row_is_here(lhs, bounds)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    # The ragged dot's groups start at row 0; ours at bounds[0].
    rows = jnp.roll(jnp.where(here, lhs, 0), -bounds[0], axis=0)
    out = _ragged_dot(rows, rhs, bounds, numbers)
    return jnp.where(here, jnp.roll(out, bounds[0], axis=0), 0).astype(out_dtype)


def transposed(lhs, rhs, bounds):
    """``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    here = _row_is_here(lhs, bounds)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    lhs = jnp.roll(jnp.where(here, lhs, 0), -bounds[0], axis=0)
    rhs = jnp.roll(jnp.where(here, rhs, 0), -bounds[0], axis=0)
    return _ragged_dot(lhs, rhs, bounds, numbers).astype(lhs.dtype)


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
    def batched(axis_size, in_batched, *operands):
        # JAX batches it only if every operand is, so a vmap that shares the weights has to repeat them.
        repeated = [
            operand if is_batched else jnp.broadcast_to(operand, (axis_size, *operand.shape))
            for operand, is_batched in zip(operands, in_batched)
        ]
        return jax.vmap(plain)(*repeated), True

    return call(lhs, rhs, bounds[1:] - bounds[:-1])


def note(call: Call, hardware: Hardware) -> str | None:
    """What the contract's sixth point makes us say."""
    rolls = "group_offset costs two rolls of the rows" if call.options["group_offset"] else None
    return "; ".join(filter(None, (masked_dot.note(call, hardware), rolls))) or None


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="xla",
    forward=forward,
    backward=functools.partial(gradients, forward, transposed),
    rank={"cpu": 20, "gpu": 20, "tpu": 20},
    proofs=COMPILED_XLA,
    why_not=masked_dot.why_not,
    note=note,
)
