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

from raggedmoe.kernels.grouped_matmul.row_steps_kernel import SLOTS
from raggedmoe.kernels.grouped_matmul.tiles import LANES, Tiles
from raggedmoe.kernels.grouped_matmul.tpu_operands import PARTIAL_SUMS, VALUES, Multiplication, Scales

PIECES = 2  # widened pieces of a matrix in VMEM


class QuantizedBuffers(NamedTuple):
    """VMEM of scales and widened values; None: there are none."""

    rows: Any = None  # [SLOTS, rows / packed, 1, packed]
    factors: Any = None  # [rows, LANES]: the step's, over all lanes
    columns: Any = None  # [matrix slots, 1, O]
    blocks: Any = None  # [matrix slots, I / 128, 1, O], or [matrix slots, A / block, 1, B]
    widened: Any = None  # [PIECES, I, columns] or [PIECES, columns, I]


def quantized_buffers(
    scales: Scales, how: Multiplication, rhs: Any, tiles: Tiles, transpose_rhs: bool
) -> QuantizedBuffers:
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
        high, wide = (tiles.out, rhs.shape[2]) if transpose_rhs else (rhs.shape[1], tiles.out)
        made["blocks"] = pltpu.VMEM((tiles.matrix_slots, high // how.block, 1, wide), jnp.float32)
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
            at = self.scales.blocks.at[group]
            if self.transpose_rhs and self.how.scaled == VALUES:
                source = at if isinstance(columns, slice) else at.at[self._lines(columns)]
            else:
                source = at.at[:, :, columns]
            copies.append(pltpu.make_async_copy(source, self.buffers.blocks.at[slot], semaphore))
        return copies

    def _lines(self, rows):
        """Select the lines of block scales for those rows of a matrix as it is in memory: a slice, or `pl.ds`."""
        block = self.how.block
        if not isinstance(rows, slice):
            return pl.ds(rows.start >> (block.bit_length() - 1), rows.size // block)
        return rows if rows.start is None else slice(rows.start // block, rows.stop // block)

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
        return _widen(values, self.how.multiplied)

    def right(self, matrix, slot, at, columns: slice, *, is_first: bool):
        """Read a piece of a matrix, or where it is widened, do that for the first rows, and read what was made."""
        piece = (columns, at) if self.transpose_rhs else (at, columns)
        if self.buffers.widened is None:
            return matrix[piece]
        width = slice(columns.stop - columns.start)
        number = columns.start // self.tiles.piece_columns % PIECES
        place = (number, width, slice(None)) if self.transpose_rhs else (number, slice(None), width)
        if is_first:
            self.buffers.widened[place] = self._multiply_scales(
                _widen(matrix[piece], self.how.multiplied), slot, at, columns
            )
        return self.buffers.widened[place]

    def _multiply_scales(self, values, slot, at, columns: slice):
        """Multiply widened values by the scales of their blocks."""
        if self.how.scaled != VALUES:
            return values
        rows, lanes = (columns, at) if self.transpose_rhs else (at, columns)
        factors = self.buffers.blocks[slot, self._lines(rows), :, lanes]  # [n, 1, lanes]
        shape = (factors.shape[0], self.how.block, factors.shape[2])
        products = values.astype(jnp.float32).reshape(shape) * factors
        return products.reshape(values.shape).astype(values.dtype)

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
        return sums


def _widen(values, dtype: str):
    if str(values.dtype) == dtype:
        return values
    if dtype == "float32" and values.dtype != jnp.bfloat16:
        return values.astype(jnp.float32)
    return values.astype(jnp.float32).astype(dtype)
