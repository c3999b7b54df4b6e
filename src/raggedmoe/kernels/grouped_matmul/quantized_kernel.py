"""What the TensorCore kernel of `grouped_matmul` does with quantised operands: it widens values and scales sums.

A matrix is widened a piece of columns at a time, into VMEM, for all rows of a step. The scales of rows lie along the
lanes in memory, where a block of packed rows is one line; for the sums they are turned into the sublanes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from raggedmoe.kernels.dequantize import decode_scale
from raggedmoe.kernels.grouped_matmul.row_steps_kernel import SLOTS
from raggedmoe.kernels.grouped_matmul.tiles import LANES, Tiles
from raggedmoe.kernels.grouped_matmul.tpu_operands import PARTIAL_SUMS, VALUES, Multiplication, Scales
from raggedmoe.kernels.grouped_matmul.widening_kernel import UNPACKED, spread_blocks, unpack_4_bits, widen

PIECES = 2  # widened pieces of a matrix in VMEM


class QuantizedBuffers(NamedTuple):
    """VMEM of scales and widened values; None: there are none."""

    rows: Any = None  # [SLOTS, rows / packed, 1, packed]
    factors: Any = None  # [rows, LANES]: the step's, over all lanes
    columns: Any = None  # [matrix slots, 1, O]
    blocks: Any = None  # [matrix slots, I / 128, 1, O], or [matrix slots, parts of I, rows, columns]
    widened: Any = None  # [PIECES, I, columns] or [PIECES, columns, I]


def quantized_buffers(scales: Scales, how: Multiplication, tiles: Tiles, transpose_rhs: bool) -> QuantizedBuffers:
    """Describe the buffers that a call needs."""
    made: dict[str, Any] = {}
    rows = tiles.cut.rows * (2 if tiles.cut.paired else 1)
    if scales.rows is not None:
        made["rows"] = pltpu.VMEM((SLOTS, rows // tiles.cut.packed, 1, tiles.cut.packed), jnp.float32)
        made["factors"] = pltpu.VMEM((rows, LANES), jnp.float32)
    if scales.columns is not None:
        made["columns"] = pltpu.VMEM((tiles.matrix_slots, 1, tiles.out), jnp.float32)
    if how.scaled == PARTIAL_SUMS:
        made["blocks"] = pltpu.VMEM((tiles.matrix_slots, scales.blocks.shape[1], 1, tiles.out), jnp.float32)
    if how.scaled == VALUES:
        made["blocks"] = pltpu.VMEM((tiles.matrix_slots, *scales.blocks.shape[2:]), scales.blocks.dtype)
    if how.widens_matrices:
        columns = min(tiles.piece_columns, tiles.out)
        piece = (columns, tiles.inner) if transpose_rhs else (tiles.inner, columns)
        made["widened"] = pltpu.VMEM((PIECES, *piece), jnp.dtype(how.multiplied))
    return QuantizedBuffers(**made)


@dataclass(frozen=True, kw_only=True)
class QuantizedCode:
    """What is quantised of a call of the kernel, while it is traced; of plain arrays it does nothing."""

    scales: Scales
    buffers: QuantizedBuffers
    how: Multiplication
    tiles: Tiles
    transpose_rhs: bool
    tile: Any  # of the columns of O, in which the kernel is

    def row_copies(self, slot, row, count, semaphore) -> list:
        """Make the copy of the scales of a step's rows."""
        if self.scales.rows is None:
            return []
        lines = self.tiles.cut.packed.bit_length() - 1  # a power of two: a division would be ten scalar operations
        there, here = pl.ds(row >> lines, count >> lines), pl.ds(0, count >> lines)
        return [pltpu.make_async_copy(self.scales.rows.at[there], self.buffers.rows.at[slot, here], semaphore)]

    def matrix_copies(self, slot, group, columns, semaphore) -> list:
        """Make the copies of the scales of a matrix: of the columns of O that ``columns`` selects."""
        copies = []
        if self.scales.columns is not None:
            source = self.scales.columns.at[group, :, columns]
            copies.append(pltpu.make_async_copy(source, self.buffers.columns.at[slot], semaphore))
        if self.scales.blocks is not None:
            if self.how.scaled == VALUES:
                source = self.scales.blocks.at[group, 0 if isinstance(columns, slice) else self.tile]
            else:
                source = self.scales.blocks.at[group, :, :, columns]
            copies.append(pltpu.make_async_copy(source, self.buffers.blocks.at[slot], semaphore))
        return copies

    def stored(self, columns):
        """Select the elements of a matrix in memory that hold those columns of it: a slice, or `pl.ds`."""
        neighbours = self.how.neighbours
        if neighbours == 1 or columns == slice(None):
            return columns
        if isinstance(columns, slice):
            return slice(columns.start // neighbours, columns.stop // neighbours)
        size = columns.size // neighbours
        return pl.ds(pl.multiple_of(columns.start // neighbours, size), size)

    def inner(self, part):
        """Select that part of what is summed; None: all."""
        if part is None:
            return slice(None)
        return pl.ds(pl.multiple_of(part * self.tiles.inner, self.tiles.inner), self.tiles.inner)

    def spread_rows(self, slot, first: int, size: int) -> None:
        """Turn the scales of a step's rows from the lanes into the sublanes, and write them over all lanes."""
        if self.scales.rows is None:
            return
        packed = self.tiles.cut.packed
        lines = self.buffers.rows[slot, first // packed : (first + size) // packed]  # [n, 1, packed]
        shape = (lines.shape[0], packed, packed)
        diagonal = lax.broadcasted_iota(jnp.int32, shape, 1) == lax.broadcasted_iota(jnp.int32, shape, 2)
        # A sum of one number and zeros: the number itself, and no other row's NaN.
        turned = jnp.sum(jnp.where(diagonal, jnp.broadcast_to(lines, shape), 0.0), axis=2, keepdims=True)
        self.buffers.factors[first : first + size] = jnp.broadcast_to(turned.reshape(size, 1), (size, LANES))

    def left(self, values):
        """Widen a piece of the rows, if the MXU does not take it as it is."""
        return widen(values, self.how.multiplied)

    def right(self, matrix, slot, part, columns: slice, *, is_first: bool):
        """Read a piece of a matrix, or where it is widened, do that for the first rows, and read what was made."""
        at = self.inner(part)
        piece = (columns, self.stored(at)) if self.transpose_rhs else (at, self.stored(columns))
        if self.buffers.widened is None:
            return matrix[piece]
        width = slice(columns.stop - columns.start)
        number = columns.start // self.tiles.piece_columns % PIECES
        place = (number, width, slice(None)) if self.transpose_rhs else (number, slice(None), width)
        if is_first:
            values = matrix[piece]
            if self.how.matrices == "mxfp4":
                values = unpack_4_bits(values)
            self.buffers.widened[place] = self._multiply_scales(widen(values, self.how.multiplied), slot, part, columns)
        return self.buffers.widened[place]

    def _multiply_scales(self, values, slot, part, columns: slice):
        """Multiply widened values by the scales of their blocks."""
        if self.how.scaled != VALUES:
            return values
        high, _ = self.how.block
        scales = self.buffers.blocks.at[slot, 0 if part is None else part]
        if self.transpose_rhs:
            factors = decode_scale(scales[columns.start // high : columns.stop // high], jnp.float32)
            first = 0
        else:
            factors, first = decode_scale(scales[...], jnp.float32), columns.start
        return values * spread_blocks(factors, self.how.block, first, values.shape, values.dtype)

    def sum_parts(self, dot, left, right, slot, at, columns: slice):
        """Multiply two pieces by ``dot``: as a whole, or in the parts whose sums are scaled, each by itself.

        ``at`` selects what is summed of all that there is.
        """
        if self.how.scaled != PARTIAL_SUMS:
            return dot(left, right)
        first = 0 if isinstance(at, slice) else at.start >> (LANES.bit_length() - 1)
        total = None
        for number in range(left.shape[1] // LANES):
            part = slice(number * LANES, (number + 1) * LANES)
            sums = dot(left[:, part], right[:, part] if self.transpose_rhs else right[part])
            sums = sums * self.buffers.blocks[slot, first + number, :, columns]
            total = sums if total is None else total + sums
        return total

    def scaled_sums(self, sums, slot, rows: slice, columns: slice):
        """Multiply sums by the scales of their rows and columns; ``rows`` are those of the buffer."""
        if self.scales.rows is not None:
            factors, width = self.buffers.factors[rows], columns.stop - columns.start
            whole = jnp.concatenate([factors] * -(-width // LANES), axis=1) if width > LANES else factors
            sums = sums * whole[:, :width]
        if self.scales.columns is not None:
            sums = sums * self.buffers.columns[slot, :, columns]
        return sums * UNPACKED if self.how.matrices == "mxfp4" else sums
