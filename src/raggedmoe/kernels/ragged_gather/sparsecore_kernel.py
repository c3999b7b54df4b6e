"""The SparseCore program of `ragged_gather`: each row comes in by one stream, each tile of eight leaves by one.

Rows of words are read whole and once, from a table that XLA makes of ``x`` (T rows, of which R are read). What leaves
is the result as HBM keeps it for everybody else, so nothing has to be done to R rows afterwards: pairs of bfloat16 rows
are woven into words here, six operations for two vectors.
"""

import functools

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.sparsecore import TILE_ROWS, RowLayout, row_layout
from raggedmoe.kernels.sparsecore_kernel import (
    HIGH_HALF,
    LOW_HALF,
    Scratch,
    clamp_bounds,
    read_bounds,
    run_on_subcores,
    word_table,
)

BLOCK_TILES = 64  # tiles whose indices a subcore reads at once


def gather(x, indices, start, end, weights, *, hardware: Hardware):
    """Compute ``out[i] = weights[i] · x[indices[i]]`` for ``start <= i < end``, zero elsewhere."""
    num_rows = indices.shape[0]
    layout = row_layout(x.shape[1], x.dtype, hardware, _memory, halve_rest=True)
    num_tiles = -(-num_rows // TILE_ROWS)
    block_rows = BLOCK_TILES * TILE_ROWS
    spare = num_tiles * TILE_ROWS + block_rows - num_rows  # any block that begins at a tile can be read whole
    operands = [word_table(x, layout), clamp_bounds(start, end, num_rows), jnp.pad(indices, (0, spare))]
    scratch = [
        Scratch(kind="vector", shape=(2 * TILE_ROWS * layout.pitch,), dtype=jnp.uint32),
        Scratch(kind="vector", shape=(2, layout.tile_rows, layout.columns), dtype=jnp.uint32),
        Scratch(kind="semaphores", shape=(2,)),
        Scratch(kind="semaphores", shape=(2,)),
        Scratch(kind="vector", shape=(16,), dtype=jnp.int32),
        Scratch(kind="vector", shape=(block_rows + 16,), dtype=jnp.int32),
    ]
    if weights is not None:
        operands.append(jnp.pad(weights.astype(jnp.float32), (0, spare)))
        scratch.append(Scratch(kind="vector", shape=(block_rows + 16,), dtype=jnp.float32))
    program = functools.partial(
        gather_program, layout=layout, num_tokens=x.shape[0], num_tiles=num_tiles, weighted=weights is not None
    )
    out = run_on_subcores(
        program,
        name="ragged_gather",
        hardware=hardware,
        operands=tuple(operands),
        num_tiles=num_tiles,
        layout=layout,
        dtype=x.dtype,
        scratch=tuple(scratch),
        flops=0 if weights is None else num_rows * x.shape[1],
        bytes_read=num_rows * (layout.row_bytes + (4 if weights is None else 8)),
    )
    return out[:num_rows, : x.shape[1]]


def _memory(layout: RowLayout) -> int:
    """Count the words of the large buffers: rows that come, and tiles that leave, two of each."""
    return 2 * TILE_ROWS * layout.pitch + 2 * layout.tile_rows * layout.columns


def gather_program(subcore, *buffers, layout: RowLayout, num_tokens: int, num_tiles: int, weighted: bool) -> None:
    """Gather one subcore's even share of the valid tiles, and fill its share of the others with zeros."""
    operands, (out, rows, tiles, fetched, pushed, bounds_buffer, row_at, *row_weight) = (
        buffers[: 3 + weighted],
        buffers[3 + weighted :],
    )
    table, bounds, indices = operands[:3]
    start, end = read_bounds(subcore, bounds, bounds_buffer)
    first_tile = start // TILE_ROWS
    last_tile = subcore.where(start < end, (end + TILE_ROWS - 1) // TILE_ROWS, first_tile)

    share = (last_tile - first_tile + subcore.count - 1) // subcore.count
    my_first = first_tile + subcore.number * share
    my_last = subcore.minimum(my_first + share, last_tile)

    def one_block(block):
        tile = my_first + block * BLOCK_TILES
        num_here = subcore.minimum(my_last - tile, BLOCK_TILES)
        block_rows = BLOCK_TILES * TILE_ROWS
        subcore.read(indices, tile * TILE_ROWS, block_rows, row_at)
        if weighted:
            subcore.read(operands[3], tile * TILE_ROWS, block_rows, row_weight[0])
        subcore.for_each_vector(0, block_rows, functools.partial(point_to_words, tile * TILE_ROWS))
        move_tiles(tile, num_here)

    def point_to_words(first_row, at):
        """Find where in the table each row begins; unwanted ones begin at its zeros, and their weight is zero too."""
        row = first_row + at + subcore.lane_numbers()
        index = subcore.load(row_at, at)
        wanted = (row >= start) & (row < end) & (index >= 0) & (index < num_tokens)
        index = subcore.where(wanted, index, subcore.full(num_tokens, jnp.int32))
        subcore.store(row_at, index * layout.row_words, at)
        if weighted:
            weight = subcore.load(row_weight[0], at)
            subcore.store(row_weight[0], subcore.where(wanted, weight, subcore.full(0, jnp.float32)), at)

    def move_tiles(first, num_here):
        """Move a chunk of a tile in each step; the next one's rows come while this one is woven and the last leaves."""
        num_steps = num_here * layout.chunks
        tile_words = TILE_ROWS * layout.pitch

        def fetch(step):
            begins = subcore.load(row_at, step // layout.chunks * TILE_ROWS)
            for row in range(TILE_ROWS):
                at = subcore.lane_of(begins, row) + step % layout.chunks * layout.words
                to = (step % 2) * tile_words + row * layout.pitch
                subcore.start_fetch(table, at, layout.words, rows, to, fetched, step % 2)

        def one_step(step):
            slot = step % 2
            subcore.when(step + 1 < num_steps, lambda: fetch(step + 1))
            subcore.wait_fetched(table, TILE_ROWS * layout.words, rows, fetched, slot)
            subcore.when(step >= 2, lambda: subcore.wait_pushed(tiles.at[slot], out, layout, pushed, slot))
            factors = None
            if weighted:
                vector = subcore.load(row_weight[0], step // layout.chunks * TILE_ROWS)
                factors = [subcore.lane_of(vector, row) for row in range(TILE_ROWS)]
            weave(subcore, rows, slot * tile_words, tiles, slot, factors, layout)
            tile, chunk = first + step // layout.chunks, step % layout.chunks
            subcore.start_push(tiles.at[slot], out, tile, chunk, layout, pushed, slot)

        subcore.when(num_steps > 0, lambda: fetch(0))
        subcore.loop(0, num_steps, one_step)
        for back in (2, 1):
            slot = (num_steps + back) % 2
            subcore.when(
                num_steps >= back, functools.partial(subcore.wait_pushed, tiles.at[slot], out, layout, pushed, slot)
            )

    subcore.loop(0, (my_last - my_first + BLOCK_TILES - 1) // BLOCK_TILES, one_block)
    _fill_with_zeros(subcore, out, tiles, pushed, layout, (first_tile, last_tile, num_tiles))
    subcore.finish_pushes(tiles.at[0], out, layout, pushed)


def weave(subcore, rows, first, tiles, slot, factors, layout: RowLayout) -> None:
    """Weave eight rows of words that begin at ``first``, times their factors, into one chunk of a tile."""

    def row_vector(row, at):
        return subcore.load(rows, first + row * layout.pitch + at)

    def scale_halves(row, at):
        words = row_vector(row, at)
        return subcore.as_float(words << 16) * factors[row], subcore.as_float(words & HIGH_HALF) * factors[row]

    def whole_words(at):
        for row in range(TILE_ROWS):
            words = row_vector(row, at)
            if factors is not None:
                words = subcore.as_words(subcore.as_float(words) * factors[row])
            subcore.store(tiles, words, slot, row, at)

    def pairs(at, piece):
        for pair in range(TILE_ROWS // 2):
            if factors is None:
                even, odd = row_vector(2 * pair, at), row_vector(2 * pair + 1, at)
                low, high = (even & LOW_HALF) | (odd << 16), (even >> 16) | (odd & HIGH_HALF)
            else:
                even, odd = scale_halves(2 * pair, at), scale_halves(2 * pair + 1, at)
                low, high = subcore.round_pairs(even[0], odd[0]), subcore.round_pairs(even[1], odd[1])
            subcore.store(tiles, low, slot, pair, piece.low + at)
            subcore.store(tiles, high, slot, pair, piece.high + at)

    if layout.packing == 1:
        subcore.for_each_vector(0, layout.words, whole_words)
        return
    lines, rest = layout.pieces
    subcore.for_each_vector(lines.first, lines.last, functools.partial(pairs, piece=lines))
    subcore.for_each_vector(rest.first, rest.last, functools.partial(pairs, piece=rest), unrolled=True)


def _fill_with_zeros(subcore, out, tiles, pushed, layout: RowLayout, bounds) -> None:
    """Write zeros to the tiles outside ``[first, last)``, of which each subcore takes every so manyth."""
    first, last, num_tiles = bounds
    num_outside = num_tiles - (last - first)
    num_mine = subcore.maximum(num_outside - subcore.number + subcore.count - 1, 0) // subcore.count

    def clear(at):
        for row in range(layout.tile_rows):
            subcore.store(tiles, subcore.full(0, jnp.uint32), 0, row, at)

    def push(mine):
        outside = subcore.number + mine * subcore.count
        tile = subcore.where(outside < first, outside, outside + last - first)
        for chunk in range(layout.chunks):
            subcore.start_push(tiles.at[0], out, tile, chunk, layout, pushed, 0)

    def wait(mine):
        for _ in range(layout.chunks):
            subcore.wait_pushed(tiles.at[0], out, layout, pushed, 0)

    subcore.when(num_mine > 0, lambda: subcore.for_each_vector(0, layout.columns, clear))
    subcore.loop(0, num_mine, push)
    subcore.loop(0, num_mine, wait)
