"""How our TensorCore kernel multiplies quantised operands: decided before tracing, and the arrays that it is given.

Values are read from memory as they are stored, those of four bits two in a byte. The MXU multiplies them so where the
chip does that natively and all that is summed shares a scale; otherwise they are widened in VMEM, to bfloat16, which
holds every value of every format exactly, or to float32 where something else in the sum needs that. Scales are applied

- to the float32 sums, where they are of rows or of output columns;
- to the sums over each 128 of what is summed, where they are of blocks of as many, or of more: as DeepSeek stores them;
- to the values in VMEM, where they are of other blocks of a matrix;
- to the rows, before the kernel, where they vary along what is summed alone: the gradient of the rows, by channel.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from raggedmoe.hardware import FP8, Hardware
from raggedmoe.kernels.arrays import pad_rows
from raggedmoe.kernels.dequantize import decode_scale, dequantize
from raggedmoe.kernels.grouped_matmul.api import group_of_row
from raggedmoe.kernels.grouped_matmul.tiles import LANES, Tiles
from raggedmoe.kernels.qarray import LHS_FORMATS, QArray
from raggedmoe.kernels.registry import Call

# To what the scales of the matrices are applied: see above.
SUMS, PARTIAL_SUMS, VALUES, ROWS = "sums", "partial sums", "values", "rows"
MOST_TERMS = 2**17 - 1  # of -128 · -128, that a sum of int32 holds
SUBLANES = 8  # of a vector register
WORD = 4  # rows of 8-bit values in a 32-bit word of a vector register


class MatmulOperand(NamedTuple):
    """What is known of an operand before tracing."""

    shape: tuple[int, ...]
    dtype: Any  # of what it stands for
    qtype: str | None = None
    scale: Any = None  # its shape and type

    @property
    def values_type(self) -> str:
        """The type of the values in memory."""
        return self.qtype or str(jnp.dtype(self.dtype))


def operand_of(array: Any) -> MatmulOperand:
    """Describe an array or a quantised one."""
    if isinstance(array, QArray):
        return MatmulOperand(
            array.shape, array.dtype, array.qtype, jax.ShapeDtypeStruct(array.scale.shape, array.scale.dtype)
        )
    return MatmulOperand(array.shape, array.dtype)


def operand_in_call(call: Call, name: str) -> MatmulOperand:
    """Describe one of a call's operands."""
    array = call.arrays[name]
    return MatmulOperand(array.shape, array.dtype, call.formats.get(name), call.arrays.get(f"{name}_scale"))


@dataclass(frozen=True, kw_only=True)
class Multiplication:
    """How the kernel multiplies two operands."""

    rows: str  # the type of lhs in memory
    matrices: str  # of rhs
    multiplied: str  # of both in the MXU
    scaled: str = SUMS  # to what the scales of the matrices are applied
    # Rows and columns of a matrix in memory that share a scale, where scales are applied to its values.
    block: tuple[int, int] = (0, 0)

    @property
    def native(self) -> bool:
        """Whether the MXU multiplies the values as they are stored."""
        return self.multiplied in LHS_FORMATS

    @property
    def neighbours(self) -> int:
        """The values of a matrix's row that are in one element of it in memory."""
        return 2 if self.matrices == "mxfp4" else 1

    @property
    def widens_matrices(self) -> bool:
        return not self.native and self.matrices != self.multiplied


def operands_why_not(lhs: MatmulOperand, rhs: MatmulOperand, transpose_rhs: bool) -> str | None:
    """Say which quantised operands the kernel does not take."""
    if rhs.qtype == "mxfp4" and rhs.shape[1] % WORD:
        return (
            f"it takes matrices of mxfp4 with a multiple of {WORD} rows in memory, and those of rhs have {rhs.shape[1]}"
        )
    if lhs.scale is not None and lhs.scale.shape[1] > 1:
        return f"it takes rows with one scale each, and lhs has {lhs.scale.shape[1]}"
    if _where_scaled(lhs, rhs, transpose_rhs) == VALUES and max(_block(rhs)) < SUBLANES:
        rows, columns = (size // num for size, num in zip(rhs.shape[1:], rhs.scale.shape[1:]))
        return (
            f"it takes scales of blocks of which one side is a multiple of {SUBLANES}, and those of rhs are of "
            f"{rows} × {columns}"
        )
    return None


def _where_scaled(lhs: MatmulOperand, rhs: MatmulOperand, transpose_rhs: bool) -> str:
    sum_dim = 2 if transpose_rhs else 1
    if rhs.scale is None or rhs.scale.shape[sum_dim] == 1:
        return SUMS
    in_whole_blocks = rhs.shape[sum_dim] // rhs.scale.shape[sum_dim] % LANES == 0
    if in_whole_blocks and _is_short(lhs):
        return PARTIAL_SUMS
    return ROWS if rhs.scale.shape[3 - sum_dim] == 1 else VALUES


def _block(rhs: MatmulOperand) -> tuple[int, int]:
    """Find the rows and columns of a matrix in memory that the kernel scales together.

    Both divide the lanes, as tiles do, and rows that do not fill a vector register are scaled one by one.
    """
    rows, columns = (math.gcd(size // num, LANES) for size, num in zip(rhs.shape[1:], rhs.scale.shape[1:]))
    return rows if rows >= SUBLANES else 1, columns


def multiplication(lhs: MatmulOperand, rhs: MatmulOperand, transpose_rhs: bool, hardware: Hardware) -> Multiplication:
    """Decide how operands that the kernel takes are multiplied on a chip."""
    scaled = _where_scaled(lhs, rhs, transpose_rhs)
    if scaled == ROWS:  # rows times scales are float32
        return Multiplication(rows="float32", matrices=rhs.values_type, multiplied="float32", scaled=ROWS)
    types: dict[str, Any] = {"rows": lhs.values_type, "matrices": rhs.values_type, "scaled": scaled}
    if scaled == VALUES:
        # Powers of two leave values exact in bfloat16.
        wide = "bfloat16" if rhs.scale.dtype == jnp.uint8 and _is_short(lhs) else "float32"
        return Multiplication(**types, multiplied=wide, block=_block(rhs))
    if native_type(lhs, rhs, hardware) and sums_why_not(lhs) is None:
        return Multiplication(**types, multiplied=lhs.values_type)
    return Multiplication(**types, multiplied="bfloat16" if _is_short(lhs) and _is_short(rhs) else "float32")


def sums_why_not(lhs: MatmulOperand) -> str | None:
    """Say that a sum of int32 may not hold as many products of int8."""
    if lhs.qtype != "int8" or lhs.shape[1] <= MOST_TERMS:
        return None
    return f"it sums int8 in int32, which holds {MOST_TERMS} products, not {lhs.shape[1]}"


def native_type(lhs: MatmulOperand, rhs: MatmulOperand, hardware: Hardware) -> bool:
    """Tell whether a chip multiplies the stored values of both as they are."""
    both = {lhs.qtype, rhs.qtype}
    return both <= set(hardware.native_formats) and (both == {"int8"} or both <= set(FP8))


def _is_short(operand: MatmulOperand) -> bool:
    """Tell whether bfloat16 holds the values exactly."""
    return operand.qtype is not None or operand.dtype == jnp.bfloat16


class Scales(NamedTuple):
    """What the kernel multiplies by, float32, or shared exponents of values as they are stored; None: nothing."""

    rows: Any = None  # [R / packed, 1, packed]: of the sums
    columns: Any = None  # [G, 1, O]: of the sums
    # [G, I / 128, 1, O]: of partial sums; or of values of [A B] in memory [G, tiles, parts, rows, columns], those of a
    # tile of O and a part of I together: `split_blocks`.
    blocks: Any = None


def scaled_rows(lhs: Any, rhs: QArray, bounds: Any) -> jax.Array:
    """Multiply rows, in float32, by the scales of what each of their columns is multiplied by."""
    group, here = group_of_row(bounds, lhs.shape[0])
    scale = decode_scale(rhs.scale, jnp.float32).reshape(rhs.scale.shape[0], -1)
    scale = jnp.broadcast_to(scale, (rhs.shape[0], scale.shape[1]))
    scale = jnp.repeat(scale, lhs.shape[1] // scale.shape[1], axis=1)
    rows = dequantize(lhs, jnp.float32).astype(jnp.float32) * jnp.take(scale, group, axis=0)
    return jnp.where(here[:, None], rows, 0)


def row_scales(lhs: Any, packed: int) -> Any:
    """Lay out the scales of rows by blocks of packed ones: a block is read as one line of memory."""
    if not isinstance(lhs, QArray):
        return None
    scale = decode_scale(lhs.scale, jnp.float32)
    scale = jnp.broadcast_to(scale, (lhs.shape[0], 1))
    return pad_rows(scale, packed).reshape(-1, 1, packed)


def matrix_scales(rhs: Any, transpose_rhs: bool, how: Multiplication) -> Scales:
    """Lay out the scales of the matrices, for each of their columns."""
    if not isinstance(rhs, QArray) or how.scaled == ROWS:
        return Scales()
    scale, groups = decode_scale(rhs.scale, jnp.float32), rhs.shape[0]
    if how.scaled == PARTIAL_SUMS:
        scale = jnp.swapaxes(scale, 1, 2) if transpose_rhs else scale
        inner, out = (rhs.shape[2], rhs.shape[1]) if transpose_rhs else rhs.shape[1:]
        scale = jnp.repeat(scale, inner // LANES // scale.shape[1], axis=1)
        scale = jnp.repeat(scale, out // scale.shape[2], axis=2)
        return Scales(blocks=jnp.broadcast_to(scale[:, :, None], (groups, scale.shape[1], 1, out)))
    if how.scaled == VALUES:
        scale = rhs.scale if rhs.scale.dtype == jnp.uint8 else scale
        for dim, block in zip((1, 2), how.block):
            scale = jnp.repeat(scale, rhs.shape[dim] // block // scale.shape[dim], axis=dim)
        return Scales(blocks=jnp.broadcast_to(scale, (groups, *scale.shape[1:])))
    out = rhs.shape[1 if transpose_rhs else 2]
    scale = scale.reshape(scale.shape[0], 1, -1)
    scale = jnp.repeat(scale, out // scale.shape[2], axis=2)
    return Scales(columns=jnp.broadcast_to(scale, (groups, 1, out)))


def split_blocks(scales: Scales, how: Multiplication, tiles: Tiles, transpose_rhs: bool) -> Scales:
    """Lay out the scales of values so that those of a tile are copied as a whole, whatever memory's own tiles are."""
    if how.scaled != VALUES:
        return scales
    groups, *nums = scales.blocks.shape
    sizes = (tiles.out, tiles.inner) if transpose_rhs else (tiles.inner, tiles.out)
    rows, columns = (size // block for size, block in zip(sizes, how.block))
    split = scales.blocks.reshape(groups, nums[0] // rows, 1, rows, nums[1])
    if nums[1] > columns:  # otherwise nothing moves: XLA would copy all of it for a transposition of ones
        split = scales.blocks.reshape(groups, nums[0] // rows, rows, nums[1] // columns, columns).swapaxes(2, 3)
    return scales._replace(blocks=split if transpose_rhs else split.swapaxes(1, 2))


def values_of(operand: Any) -> jax.Array:
    """Return the values as the kernel reads them, in their own type; of four bits, the bytes."""
    if not isinstance(operand, QArray):
        return operand
    if operand.qtype in ("int8", "mxfp4"):
        return operand.qvalue
    return lax.bitcast_convert_type(operand.qvalue, operand.qtype)
