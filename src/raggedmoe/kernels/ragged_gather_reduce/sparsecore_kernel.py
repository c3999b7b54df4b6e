"""The SparseCore program of `ragged_gather_reduce`: a tile of eight tokens at a time, in float32 accumulators.

A subcore first makes a list of the valid slots of a block of tokens, in their order, so that what is not valid costs
neither a stream nor arithmetic. The rows of the list then come two at a time, four pairs in flight: with two rows for
each pass over the accumulator, its loads and stores hide behind the products. A token with an odd number of slots gets
a row of zeros as well.
"""

import functools

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.sparsecore import TILE_ROWS, RowLayout, num_subcores, row_layout
from raggedmoe.kernels.sparsecore_kernel import (
    HIGH_HALF,
    Scratch,
    clamp_bounds,
    read_bounds,
    run_on_subcores,
    word_table,
)

PAIRS_IN_FLIGHT = 4
MOST_BLOCK_TILES = 8  # tiles whose slots are listed at once
MOST_LISTED = 512  # slots of a list: a subcore has 2,048 words for scalars
MOST_SLOTS_OF_TOKEN = MOST_LISTED // TILE_ROWS  # of more, a token's are listed part by part


def gather_reduce(rows, indices, start, end, weights, *, hardware: Hardware):
    """Compute ``out[t] = Σ_k weights[t, k] · rows[indices[t, k]]`` over the slots with an index in ``[start, end)``."""
    num_tokens, num_slots = indices.shape
    layout = row_layout(rows.shape[1], rows.dtype, hardware, _memory)
    num_tiles = -(-num_tokens // TILE_ROWS)
    lanes = hardware.sparse_core_lanes
    padded_slots = -(-num_slots // lanes) * lanes
    if padded_slots > MOST_SLOTS_OF_TOKEN:
        padded_slots = -(-padded_slots // MOST_SLOTS_OF_TOKEN) * MOST_SLOTS_OF_TOKEN
    listed = min(padded_slots, MOST_SLOTS_OF_TOKEN)  # of a token at a time
    fair_share = -(-num_tiles // num_subcores(hardware))
    block_tiles = 1 if padded_slots > listed else min(MOST_BLOCK_TILES, MOST_LISTED // (TILE_ROWS * listed), fair_share)
    num_blocks = -(-num_tiles // block_tiles)
    block_slots = block_tiles * TILE_ROWS * padded_slots
    to_whole_blocks = ((0, num_blocks * block_tiles * TILE_ROWS - num_tokens), (0, padded_slots - num_slots))
    slots = jnp.pad(indices, to_whole_blocks, constant_values=-1).reshape(-1)
    operands = [word_table(rows, layout), clamp_bounds(start, end, rows.shape[0]), slots]
    scratch = [
        Scratch(kind="vector", shape=(2 * PAIRS_IN_FLIGHT * layout.pitch,), dtype=jnp.uint32),
        Scratch(kind="vector", shape=(TILE_ROWS * layout.packing * layout.pitch,), dtype=jnp.float32),
        Scratch(kind="vector", shape=(1, layout.tile_rows, layout.columns), dtype=jnp.uint32),
        Scratch(kind="semaphores", shape=(PAIRS_IN_FLIGHT,)),
        Scratch(kind="semaphores", shape=(1,)),
        Scratch(kind="vector", shape=(16,), dtype=jnp.int32),
        Scratch(kind="vector", shape=(block_slots,), dtype=jnp.int32),
        Scratch(kind="scalar", shape=(MOST_LISTED + 2,), dtype=jnp.int32),
        Scratch(kind="scalar", shape=(block_tiles * TILE_ROWS + 1,), dtype=jnp.int32),
        Scratch(kind="scalar", shape=(1,), dtype=jnp.int32),
    ]
    if weights is not None:
        operands.append(jnp.pad(weights.astype(jnp.float32), to_whole_blocks).reshape(-1))
        scratch.append(Scratch(kind="vector", shape=(block_slots,), dtype=jnp.float32))
        scratch.append(Scratch(kind="scalar", shape=(MOST_LISTED + 2,), dtype=jnp.float32))
    program = functools.partial(
        reduce_program,
        layout=layout,
        zero_row=rows.shape[0],
        sizes=(num_tiles, num_blocks, block_tiles),
        slots=(num_slots, padded_slots, listed),
        weighted=weights is not None,
    )
    out = run_on_subcores(
        program,
        name="ragged_gather_reduce",
        hardware=hardware,
        operands=tuple(operands),
        num_tiles=num_tiles,
        layout=layout,
        dtype=rows.dtype,
        scratch=tuple(scratch),
        flops=indices.size * rows.shape[1] * (1 if weights is None else 2),
        bytes_read=indices.size * (layout.row_bytes + (4 if weights is None else 8)),
    )
    return out[:num_tokens, : rows.shape[1]]


def _memory(layout: RowLayout) -> int:
    """Count the words of the large buffers: pairs of rows in flight, accumulators, one tile."""
    accumulators = TILE_ROWS * layout.packing * layout.pitch
    return 2 * PAIRS_IN_FLIGHT * layout.pitch + accumulators + layout.tile_rows * layout.columns


def reduce_program(subcore, *buffers, layout: RowLayout, zero_row: int, sizes, slots, weighted: bool) -> None:
    """Sum this subcore's blocks of tiles, which go round the subcores; a tile leaves while the next one is summed."""
    num_tiles, num_blocks, block_tiles = sizes
    num_slots, padded_slots, listed = slots
    operands, (out, rows, sums, tile, fetched, pushed, bounds_buffer, slot_index, *lists) = (
        buffers[: 3 + weighted],
        buffers[3 + weighted :],
    )
    table, bounds, indices = operands[:3]
    begins, pair_end, any_pushed, *weight_buffers = lists
    start, end = read_bounds(subcore, bounds, bounds_buffer)

    def list_token(part, token, position):
        """Write the token's valid slots from ``position`` on: each is written, and kept by going past it."""
        first = token * padded_slots + part * listed
        for vector in range(0, listed, subcore.lanes):
            index = subcore.load(slot_index, first + vector)
            weight = subcore.load(weight_buffers[0], first + vector) if weighted else None
            for lane in range(subcore.lanes):
                if padded_slots == listed and vector + lane >= num_slots:
                    break
                row = subcore.lane_of(index, lane)
                subcore.put(begins, row * layout.row_words, position)
                if weighted:
                    subcore.put(weight_buffers[1], subcore.lane_of(weight, lane), position)
                position = position + subcore.where((row >= start) & (row < end), 1, 0)
        subcore.put(begins, zero_row * layout.row_words, position)
        if weighted:
            subcore.put(weight_buffers[1], 0.0, position)
        position = position + position % 2
        subcore.put(pair_end, position // 2, token + 1)
        return position

    def sum_tiles(first_tile, num_here, chunk, is_last_part):
        num_pairs = subcore.get(pair_end, num_here * TILE_ROWS)

        def fetch(pair):
            for row in range(2):
                at = subcore.get(begins, 2 * pair + row) + chunk * layout.words
                to = (pair % PAIRS_IN_FLIGHT * 2 + row) * layout.pitch
                subcore.start_fetch(table, at, layout.words, rows, to, fetched, pair % PAIRS_IN_FLIGHT)

        def add_pair(token, pair):
            slot = pair % PAIRS_IN_FLIGHT
            subcore.when(pair + PAIRS_IN_FLIGHT - 1 < num_pairs, lambda: fetch(pair + PAIRS_IN_FLIGHT - 1))
            subcore.wait_fetched(table, 2 * layout.words, rows, fetched, slot)
            factors = [subcore.get(weight_buffers[1], 2 * pair + row) for row in range(2)] if weighted else None
            add_rows(subcore, rows, slot * 2 * layout.pitch, sums, token, factors, layout)

        def one_tile(tile_here):
            def one_token(token):
                place = tile_here * TILE_ROWS + token
                subcore.loop(
                    subcore.get(pair_end, place),
                    subcore.get(pair_end, place + 1),
                    lambda pair: add_pair(token, pair),
                )

            subcore.loop(0, TILE_ROWS, one_token)
            subcore.when(is_last_part, lambda: finish_tile(first_tile + tile_here, chunk))

        for pair in range(PAIRS_IN_FLIGHT - 1):
            subcore.when(pair < num_pairs, functools.partial(fetch, pair))
        subcore.loop(0, num_here, one_tile)

    def finish_tile(number, chunk):
        wait_for_tile()
        round_sums(subcore, sums, tile, layout)
        subcore.start_push(tile.at[0], out, number, chunk, layout, pushed, 0)
        subcore.put(any_pushed, 1, 0)

    def wait_for_tile():
        waiting = functools.partial(subcore.wait_pushed, tile.at[0], out, layout, pushed, 0)
        subcore.when(subcore.get(any_pushed, 0) > 0, waiting)

    def one_block(mine):
        block = subcore.number + mine * subcore.count
        block_slots = block_tiles * TILE_ROWS * padded_slots
        subcore.read(indices, block * block_slots, block_slots, slot_index)
        if weighted:
            subcore.read(operands[3], block * block_slots, block_slots, weight_buffers[0])
        num_here = subcore.minimum(num_tiles - block * block_tiles, block_tiles)

        def one_chunk(step):
            """Sum a part of the slots of a chunk: all parts of the first chunk, then all of the second."""
            num_parts = padded_slots // listed
            part = step % num_parts
            subcore.fold(0, block_tiles * TILE_ROWS, functools.partial(list_token, part), 0)
            sum_tiles(block * block_tiles, num_here, step // num_parts, part == num_parts - 1)

        subcore.loop(0, layout.chunks * (padded_slots // listed), one_chunk)

    subcore.put(any_pushed, 0, 0)
    subcore.put(pair_end, 0, 0)
    num_mine = subcore.maximum(num_blocks - subcore.number + subcore.count - 1, 0) // subcore.count
    clear = functools.partial(_clear, subcore, sums)
    num_sums = TILE_ROWS * layout.packing * layout.pitch
    subcore.when(num_mine > 0, lambda: subcore.for_each_vector(0, num_sums, clear))
    subcore.loop(0, num_mine, one_block)
    wait_for_tile()
    subcore.finish_pushes(tile.at[0], out, layout, pushed)


def add_rows(subcore, rows, first, sums, token, factors, layout: RowLayout) -> None:
    """Add two rows of words that begin at ``first``, times their factors, to a token's sums."""

    def floats(row, at):
        words = subcore.load(rows, first + row * layout.pitch + at)
        halves = (words,) if layout.packing == 1 else (words << 16, words & HIGH_HALF)
        parts = [subcore.as_float(half) for half in halves]
        return parts if factors is None else [part * factors[row] for part in parts]

    def add(at):
        for half, (even, odd) in enumerate(zip(floats(0, at), floats(1, at))):
            place = (token * layout.packing + half) * layout.pitch + at
            subcore.store(sums, (subcore.load(sums, place) + even) + odd, place)

    subcore.for_each_vector(0, layout.words, add)


def round_sums(subcore, sums, tile, layout: RowLayout) -> None:
    """Round the sums of eight tokens to one chunk of a tile, and leave zeros in their place."""

    def take_sum(token, half, at):
        place = (token * layout.packing + half) * layout.pitch + at
        total = subcore.load(sums, place)
        _clear(subcore, sums, place)
        return total

    def whole_words(at):
        for token in range(TILE_ROWS):
            subcore.store(tile, subcore.as_words(take_sum(token, 0, at)), 0, token, at)

    def pairs(at, piece):
        for pair in range(TILE_ROWS // 2):
            even, odd = 2 * pair, 2 * pair + 1
            for half, columns in enumerate((piece.low, piece.high)):
                if columns is not None:
                    rounded = subcore.round_pairs(take_sum(even, half, at), take_sum(odd, half, at))
                    subcore.store(tile, rounded, 0, pair, columns + at)

    if layout.packing == 1:
        subcore.for_each_vector(0, layout.words, whole_words)
        return
    lines, rest = layout.pieces
    subcore.for_each_vector(lines.first, lines.last, functools.partial(pairs, piece=lines))
    subcore.for_each_vector(rest.first, rest.last, functools.partial(pairs, piece=rest), unrolled=True)


def _clear(subcore, sums, at) -> None:
    subcore.store(sums, subcore.full(0, jnp.float32), at)
