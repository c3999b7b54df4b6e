"""`grouped_matmul`: each group of rows times its own matrix."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.arrays import FLOATS, MOST, check_array, check_size, check_sizes_fit, int32, scalar
from raggedmoe.kernels.bilinear import product
from raggedmoe.kernels.dequantize import operand_gradient
from raggedmoe.kernels.gradient import refuse_forward_mode
from raggedmoe.kernels.placement import placement, pvary_alike
from raggedmoe.kernels.qarray import (
    LHS_FORMATS,
    QArray,
    Quantized,
    check_operand,
    check_scale_values,
    has_group,
    operand_structs,
)
from raggedmoe.kernels.registry import Choice, Kernels, select_kernels

NAME = "grouped_matmul"


@dataclass(frozen=True)
class _StaticPart:
    """The static part of a call: its kernels, layout and type of the result."""

    kernels: Kernels
    transpose_rhs: bool
    out_dtype: Any

    def value(self, lhs, rhs, bounds):
        return self.kernels.forward(lhs, rhs, bounds, transpose_rhs=self.transpose_rhs, out_dtype=self.out_dtype)

    def gradients(self, lhs, rhs, bounds, cotangent):
        cotangent = cotangent.astype(lhs.dtype)
        dlhs, drhs = self.kernels.backward(lhs, rhs, bounds, cotangent, transpose_rhs=self.transpose_rhs)
        dlhs = operand_gradient(lhs, dlhs, has_group(bounds, lhs.shape[0]))
        return dlhs, operand_gradient(rhs, drhs, bounds[1:] > bounds[:-1])


def grouped_matmul(
    lhs: Float[Array, "R I"] | Quantized,
    rhs: Float[Array, "G I O"] | Float[Array, "G O I"] | Quantized,
    group_sizes: Integer[Array, " E"],
    *,
    transpose_rhs: bool = False,
    group_offset: int | Integer[Array, ""] | None = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Choice = "auto",
    hardware: Hardware | str | None = None,
) -> Float[Array, "R _"]:  # R O; beside quantised rows only transpose_rhs tells which dimension of rhs is O
    """Compute ``out[r] = lhs[r] @ rhs[g]`` for the rows r of group g; rows of no group that is here are zero.

    Args:
      lhs: rows, ordered by group. What stands past the last group is never used, NaN included.
      rhs: one matrix for each group held here, ``[G I O]``, or ``[G O I]`` with ``transpose_rhs``. What a matrix holds,
        NaN and infinity included, reaches its own group's rows and gradients only. Both operands may be quantised, as
        `raggedmoe.QArray` or qwix's: see docs/quantised.md for formats, scales and gradients.
      group_sizes: the rows in each of the model's groups. An empty group costs and contributes nothing, and its
        matrix's gradient is zero. Sizes that are negative or run past the end of ``lhs`` are
        refused where they are known; where they are traced, a negative one is none and groups are cut at the end.
      group_offset: None, and G == E; or the number of the group that ``rhs[0]`` is, whose rows start at
        ``sum(group_sizes[:group_offset])``.
      preferred_element_type: type of the result, by default that of ``lhs``. Sums are float32 at least in any case.
        The cotangent is rounded to the type of ``lhs`` before the gradients' own matmuls. The type of a quantised array
        is that of its scales.
      implementation: "auto", a name, a tuple of names in order of preference, or `Directions`.
      hardware: the chip to choose for; by default that of the mesh in use, or of the arrays.

    >>> import jax.numpy as jnp
    >>> lhs, rhs = jnp.ones((3, 2)), jnp.array([[[1.0], [1.0]], [[5.0], [5.0]]])
    >>> grouped_matmul(lhs, rhs, jnp.array([1, 1]))[:, 0]
    Array([ 2., 10.,  0.], dtype=float32)
    """
    lhs = check_operand(NAME, "lhs", lhs, "R I", LHS_FORMATS)
    rhs = check_operand(NAME, "rhs", rhs, "G O I" if transpose_rhs else "G I O")
    check_matmul(lhs, rhs, group_sizes, transpose_rhs, group_offset)
    refuse_forward_mode(NAME, lhs, rhs)
    out_dtype = jnp.dtype(lhs.dtype if preferred_element_type is None else preferred_element_type)
    if str(out_dtype) not in FLOATS:
        raise TypeError(f"{NAME}: expected preferred_element_type to be one of {', '.join(FLOATS)}, got {out_dtype}")
    out_dim = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    if 0 in lhs.shape or 0 in rhs.shape:
        return jnp.zeros((lhs.shape[0], out_dim), out_dtype)
    target = target_hardware(hardware, jax.tree.leaves((lhs, rhs)))
    arrays, formats = operand_structs(lhs=lhs, rhs=rhs, group_sizes=group_sizes)
    options = {"transpose_rhs": transpose_rhs, "group_offset": group_offset is not None, "out_dtype": str(out_dtype)}
    options |= placement(*jax.tree.leaves((lhs, rhs)), group_sizes)
    kernels = select_kernels(NAME, implementation, target, arrays=arrays, options=options, formats=formats)
    static = _StaticPart(kernels, transpose_rhs, out_dtype)
    bounds = group_bounds(group_sizes, rhs.shape[0], lhs.shape[0], group_offset)
    check_scale_values(NAME, "lhs", lhs, "R I", bounds)
    check_scale_values(NAME, "rhs", rhs, "G O I" if transpose_rhs else "G I O", bounds)
    return product(static, *pvary_alike(lhs, rhs, bounds))


def group_bounds(
    group_sizes: Integer[Array, " E"], num_groups: int, num_rows: int, group_offset: Any = None
) -> Int[Array, " {num_groups}+1"]:
    """Compute the bounds of the groups held here: group g owns the rows ``bounds[g] <= r < bounds[g + 1]``.

    A negative size is none, and groups are cut at the last row. Every implementation reads sizes from here alone.
    """
    sizes = jnp.clip(int32(group_sizes), 0, num_rows)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    if sizes.shape[0] * num_rows > MOST:  # the first sum that int32 cannot hold is negative; from there on all are cut
        ends = jnp.where(lax.cummax((ends < 0).astype(jnp.int32)) > 0, num_rows, ends)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.minimum(ends, num_rows)])
    if group_offset is None:
        return bounds
    # Groups before the first and after the last of the model's have no rows: clipped, both their bounds agree.
    first = jnp.clip(scalar(group_offset, 0), -num_groups, sizes.shape[0])
    return jnp.take(bounds, first + jnp.arange(num_groups + 1, dtype=jnp.int32), mode="clip")


def group_of_row(bounds: Int[Array, " N"], num_rows: int) -> tuple[Int[Array, " R"], Bool[Array, " R"]]:
    """Find the group of each row, and whether it has one."""
    row = jnp.arange(num_rows, dtype=jnp.int32)
    group = jnp.searchsorted(bounds, row, side="right").astype(jnp.int32) - 1
    return jnp.clip(group, 0, bounds.shape[0] - 2), (row >= bounds[0]) & (row < bounds[-1])


def check_matmul(lhs: Any, rhs: Any, group_sizes: Any, transpose_rhs: bool, group_offset: Any) -> None:
    """Require operands that fit each other, and sizes that fit the rows."""
    check_array(NAME, "group_sizes", group_sizes, "E", integer=True)
    inner = rhs.shape[2] if transpose_rhs else rhs.shape[1]
    layout = "[G O I]" if transpose_rhs else "[G I O]"
    if lhs.shape[1] != inner:
        other = rhs.shape[1] if transpose_rhs else rhs.shape[2]
        remedy = f"pass transpose_rhs={not transpose_rhs}" if other == lhs.shape[1] else "check which weights these are"
        raise ValueError(
            f"{NAME}: expected rhs {layout} with I = {lhs.shape[1]} as in lhs, got {list(rhs.shape)} "
            f"with transpose_rhs={transpose_rhs}; {remedy}"
        )
    if not isinstance(rhs, QArray) and lhs.dtype != rhs.dtype:
        raise TypeError(f"{NAME}: expected lhs and rhs of one type, got {lhs.dtype} and {rhs.dtype}; cast one of them")
    if group_offset is None:
        remedy = "give one size for each matrix, or group_offset if rhs holds only some of the groups"
        check_size(NAME, "len(group_sizes)", rhs.shape[0], group_sizes.shape[0], remedy)
    elif rhs.shape[0] > group_sizes.shape[0]:
        raise ValueError(f"{NAME}: expected G <= E, got {rhs.shape[0]} matrices and {group_sizes.shape[0]} group sizes")
    check_sizes_fit(NAME, group_sizes, lhs.shape[0])
