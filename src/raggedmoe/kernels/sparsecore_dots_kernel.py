"""The SparseCore program of the weights' gradients: dot products of rows of one array with rows of another.

Each dot product leaves as one vector, a partial sum for each lane, and XLA adds the lanes: a tile of eight lines holds
as many of them as fit. Only the valid ones are listed, fetched and multiplied; the others' lanes are zero.
"""

import functools
import operator

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.sparsecore import LINE, TILE_ROWS, RowLayout, row_layout
from raggedmoe.kernels.sparsecore_kernel import HIGH_HALF, Scratch, run_on_subcores, word_table

IN_FLIGHT = 4  # products whose two rows are on their way, or here


def row_dots(left, left_row, right, right_row, valid, *, hardware: Hardware):
    """Compute ``out[i] = left[left_row[i]] · right[right_row[i]]`` in float32 where valid, zero elsewhere."""
    lanes = hardware.sparse_core_lanes
    layout = row_layout(left.shape[1], left.dtype, hardware, _memory)
    num_dots, tile_dots = valid.shape[0], TILE_ROWS * LINE // lanes
    num_tiles = -(-num_dots // tile_dots)
    spare = (0, num_tiles * tile_dots - num_dots)
    operands = (
        word_table(left, layout),
        word_table(right, layout),
        jnp.pad(jnp.where(valid, left_row, -1), spare, constant_values=-1),
        jnp.pad(right_row, spare),
    )
    scratch = (
        Scratch(kind="vector", shape=(2 * IN_FLIGHT * layout.pitch,), dtype=jnp.uint32),
        Scratch(kind="vector", shape=(1, TILE_ROWS, LINE), dtype=jnp.uint32),
        Scratch(kind="semaphores", shape=(IN_FLIGHT,)),
        Scratch(kind="semaphores", shape=(1,)),
        Scratch(kind="vector", shape=(2, tile_dots), dtype=jnp.int32),
        Scratch(kind="scalar", shape=(2 * tile_dots + 2,), dtype=jnp.int32),
        Scratch(kind="scalar", shape=(tile_dots + 1,), dtype=jnp.int32),
    )
    dots = run_on_subcores(
        functools.partial(dots_program, layout=layout, num_tiles=num_tiles),
        name="ragged_row_dots",
        hardware=hardware,
        operands=operands,
        num_tiles=num_tiles,
        layout=DOTS_LAYOUT,
        dtype=jnp.float32,
        scratch=scratch,
        flops=2 * num_dots * left.shape[1],
        bytes_read=num_dots * (2 * layout.row_bytes + 2 * 4),
    )
    return dots.reshape(-1, lanes).sum(1)[:num_dots]


DOTS_LAYOUT = RowLayout(width=LINE, packing=1, chunks=1, columns=LINE)  # of the tiles that leave


def _memory(layout: RowLayout) -> int:
    """Count the words of the large buffers: pairs of rows in flight, one tile."""
    return 2 * IN_FLIGHT * layout.pitch + TILE_ROWS * LINE


def dots_program(subcore, *buffers, layout: RowLayout, num_tiles: int) -> None:
    """Compute this subcore's tiles of dot products, which go round the subcores."""
    tables, rows_of, (out, rows, tile, fetched, pushed, row_buffer, begins, places) = (
        buffers[:2],
        buffers[2:4],
        buffers[4:],
    )
    tile_dots = TILE_ROWS * LINE // subcore.lanes

    def list_vector(vector, position):
        """Write where both rows of each product begin, and keep the valid ones by going past them."""
        left_row, right_row = (subcore.load(row_buffer, side, vector * subcore.lanes) for side in range(2))
        for lane in range(subcore.lanes):
            row = subcore.lane_of(left_row, lane)
            subcore.put(begins, row * layout.row_words, 2 * position)
            subcore.put(begins, subcore.lane_of(right_row, lane) * layout.row_words, 2 * position + 1)
            subcore.put(places, vector * subcore.lanes + lane, position)
            position = position + subcore.where(row >= 0, 1, 0)
        return position

    def one_tile(mine):
        number = subcore.number + mine * subcore.count
        for side in range(2):
            subcore.read(rows_of[side], number * tile_dots, tile_dots, row_buffer.at[side])
        num_listed = subcore.fold(0, tile_dots // subcore.lanes, list_vector, 0)
        subcore.when(mine > 0, functools.partial(subcore.wait_pushed, tile.at[0], out, DOTS_LAYOUT, pushed, 0))
        for row in range(TILE_ROWS):
            clear = functools.partial(_clear, subcore, tile, row)
            subcore.for_each_vector(0, LINE, clear)
        subcore.loop(0, layout.chunks, lambda chunk: multiply_listed(num_listed, chunk))
        subcore.start_push(tile.at[0], out, number, 0, DOTS_LAYOUT, pushed, 0)

    def multiply_listed(num_listed, chunk):
        def fetch(listed):
            slot = listed % IN_FLIGHT
            for side in range(2):
                at = subcore.get(begins, 2 * listed + side) + chunk * layout.words
                to = (2 * slot + side) * layout.pitch
                subcore.start_fetch(tables[side], at, layout.words, rows, to, fetched, slot)

        def multiply(listed):
            slot = listed % IN_FLIGHT
            subcore.when(listed + IN_FLIGHT - 1 < num_listed, lambda: fetch(listed + IN_FLIGHT - 1))
            subcore.wait_fetched(tables[0], 2 * layout.words, rows, fetched, slot)
            first = subcore.get(places, listed) * subcore.lanes
            row, at = first // LINE, first % LINE
            total = subcore.as_float(subcore.load(tile, 0, row, at))
            total = total + products(subcore, rows, 2 * slot * layout.pitch, layout)
            subcore.store(tile, subcore.as_words(total), 0, row, at)

        for listed in range(IN_FLIGHT - 1):
            subcore.when(listed < num_listed, functools.partial(fetch, listed))
        subcore.loop(0, num_listed, multiply)

    num_mine = subcore.maximum(num_tiles - subcore.number + subcore.count - 1, 0) // subcore.count
    subcore.loop(0, num_mine, one_tile)
    subcore.when(num_mine > 0, functools.partial(subcore.wait_pushed, tile.at[0], out, DOTS_LAYOUT, pushed, 0))
    subcore.finish_pushes(tile.at[0], out, DOTS_LAYOUT, pushed)


def products(subcore, rows, first, layout: RowLayout):
    """Sum over a chunk the products of two rows of words that begin at ``first``, lane by lane."""

    def add(at, totals):
        left, right = (subcore.load(rows, first + side * layout.pitch + at) for side in range(2))
        if layout.packing == 1:
            return (totals[0] + subcore.as_float(left) * subcore.as_float(right),)
        low = subcore.as_float(left << 16) * subcore.as_float(right << 16)
        high = subcore.as_float(left & HIGH_HALF) * subcore.as_float(right & HIGH_HALF)
        return totals[0] + low, totals[1] + high

    zeros = (subcore.full(0, jnp.float32),) * layout.packing
    return functools.reduce(operator.add, subcore.fold_vectors(0, layout.words, add, zeros))


def _clear(subcore, tile, row, at) -> None:
    subcore.store(tile, subcore.full(0, jnp.uint32), 0, row, at)
