"""The TensorCore kernel of `grouped_matmul`.

Its work is cut into *steps* of consecutive rows of one group; full ones go in pairs, each half of one group (see
`row_steps_kernel`). The kernel

1. lists the steps in SMEM;
2. walks the list. The next step's rows and the next groups' matrices are on their way while a step is multiplied; a
   matrix stays as long as its group lasts, so it is read once, and one without rows never;
3. multiplies by straight code for the step's size: rows of other groups cost less than one step of sizes a group.
   Filling and draining the MXU takes 270 cycles on a v6e, which a pair pays once;
4. copies out whole blocks of packed rows. A block that two groups share is not: the next step takes the first
   group's rows over from the buffer of the step before, so that every row is written once, by one copy, in no
   particular order;
5. writes zeros to the rows before the first and after the last group.

The lengths of copies are exact in whole blocks of rows; nothing past the end of an array is read or written.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from raggedmoe.kernels.arrays import matmul_precision
from raggedmoe.kernels.grouped_matmul.quantized_kernel import QuantizedBuffers, QuantizedCode, quantized_buffers
from raggedmoe.kernels.grouped_matmul.row_steps_kernel import (
    SLOTS,
    Steps,
    column_pieces,
    list_in_smem,
    list_steps,
    one_of,
    round_down,
    round_up,
    row_pieces,
    size_number,
)
from raggedmoe.kernels.grouped_matmul.tiles import Tiles
from raggedmoe.kernels.grouped_matmul.tpu_operands import Multiplication, Scales
from raggedmoe.kernels.placement import pvary_alike, result


class _Buffers(NamedTuple):
    """VMEM, and the semaphores of the copies."""

    lhs: Any  # [SLOTS, rows, I]
    rhs: Any  # [matrix slots, I, O] or [matrix slots, O, I]
    out: Any  # [SLOTS, rows, O]
    sums: Any  # [tiles.cut.rows, O], where I is split
    lhs_done: Any
    rhs_done: Any
    out_done: Any


class Together(NamedTuple):
    """Copies that are started and waited for as one."""

    copies: list

    def start(self):
        for copy in self.copies:
            copy.start()

    def wait(self):
        for copy in self.copies:
            copy.wait()


class _TakenOver(NamedTuple):
    """The first rows of a step that an earlier one has computed."""

    count: Any
    slot: Any  # where they are
    row: Any


class _Copies(NamedTuple):
    """What straight code does about copies, where the scalar unit has time for it."""

    start: Any
    start_second_matrix: Any  # of a pair
    wait_second_matrix: Any


def grouped_matmul(
    lhs, rhs, bounds, scales: Scales, *, how: Multiplication, tiles: Tiles, transpose_rhs: bool, out_dtype
):
    """Multiply ``[R I]`` by ``[G I O]`` or ``[G O I]``; R is a multiple of ``tiles.cut.packed``, O of ``tiles.out``.

    Both may be the values of quantised operands; ``scales`` are theirs, and ``how`` says what is done with them.
    """
    bounds, lhs, rhs, scales = pvary_alike(bounds, lhs, rhs, scales)
    num_rows, inner = lhs.shape
    num_groups, out_dim = rhs.shape[0], rhs.shape[1] if transpose_rhs else rhs.shape[2] * how.neighbours
    rows_of_matrix, columns = (tiles.out, inner) if transpose_rhs else (inner, tiles.out)
    matrix = rows_of_matrix, columns // how.neighbours
    rows = tiles.cut.rows * (2 if tiles.cut.paired else 1)
    buffers = [
        pltpu.VMEM((SLOTS, rows, inner), lhs.dtype),
        pltpu.VMEM((tiles.matrix_slots, *matrix), rhs.dtype),
        pltpu.VMEM((SLOTS, rows, tiles.out), out_dtype),
        pltpu.VMEM((tiles.cut.rows, tiles.out) if tiles.inner < inner else (8, 128), jnp.float32),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        pltpu.SemaphoreType.DMA((tiles.matrix_slots,)),
        pltpu.SemaphoreType.DMA((SLOTS,)),
    ]
    quantized = quantized_buffers(scales, how, tiles, transpose_rhs)
    used = [(name, scale) for name, scale in scales._asdict().items() if scale is not None]
    used_buffers = [(name, buffer) for name, buffer in quantized._asdict().items() if buffer is not None]
    moved = lhs.size * lhs.dtype.itemsize * (out_dim // tiles.out) + rhs.size * rhs.dtype.itemsize
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            how=how,
            scales=tuple(name for name, _ in used),
            scale_buffers=tuple(name for name, _ in used_buffers),
            tiles=tiles,
            transpose_rhs=transpose_rhs,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(out_dim // tiles.out,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (2 + len(used)),
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                *list_in_smem(num_rows, num_groups, tiles.cut),
                *buffers,
                *(buffer for _, buffer in used_buffers),
            ],
        ),
        out_shape=result((num_rows, out_dim), out_dtype, lhs),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=tiles.vmem_limit, disable_bounds_checks=True
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * inner * out_dim,
            bytes_accessed=moved + num_rows * out_dim * jnp.dtype(out_dtype).itemsize,
            transcendentals=0,
        ),
        name="raggedmoe_grouped_matmul",
    )
    return call(bounds, lhs, rhs, *(scale for _, scale in used))


def _kernel(
    bounds, lhs, rhs, *refs, how: Multiplication, scales: tuple, scale_buffers: tuple, tiles: Tiles, transpose_rhs
):
    out, *scratch = refs[len(scales) :]
    steps, buffers = Steps(*scratch[:7]), _Buffers(*scratch[7:14])
    tile: Any = pl.program_id(0) if out.shape[1] > tiles.out else 0
    quantized = QuantizedCode(
        scales=Scales(**dict(zip(scales, refs))),
        buffers=QuantizedBuffers(**dict(zip(scale_buffers, scratch[14:], strict=True))),
        how=how,
        tiles=tiles,
        transpose_rhs=transpose_rhs,
        tile=tile,
    )
    end_step, num_turns = list_steps(bounds, steps, tiles.cut)
    columns: Any = slice(None)
    if out.shape[1] > tiles.out:
        columns = pl.ds(pl.multiple_of(tile * tiles.out, tiles.out), tiles.out)

    def rows(row, count):
        return pl.ds(pl.multiple_of(row, tiles.cut.packed), count), pl.ds(0, count)

    def lhs_copy(step, count):
        row, slot = steps.row[step], step & (SLOTS - 1)
        there, here = rows(row, pl.multiple_of(count, tiles.cut.packed))
        done = buffers.lhs_done.at[slot]
        copy = pltpu.make_async_copy(lhs.at[there], buffers.lhs.at[slot, here], done)
        return Together([copy, *quantized.row_copies(slot, row, count, done)])

    def out_copy(step, row, count):
        there, here = rows(row, pl.multiple_of(count, tiles.cut.packed))
        slot = step & (SLOTS - 1)
        return pltpu.make_async_copy(buffers.out.at[slot, here], out.at[there, columns], buffers.out_done.at[slot])

    def rhs_copy(turn):
        slot, group = turn & (tiles.matrix_slots - 1), steps.group[turn]
        source = rhs.at[group, columns] if transpose_rhs else rhs.at[group, :, quantized.stored(columns)]
        done = buffers.rhs_done.at[slot]
        copy = pltpu.make_async_copy(source, buffers.rhs.at[slot], done)
        return Together([copy, *quantized.matrix_copies(slot, group, columns, done)])

    def start_rhs(turn, _=None):
        rhs_copy(turn).start()

    def wait_written(step, count):
        pl.when(count > 0)(lambda: out_copy(step, 0, count).wait())  # for so many bytes, wherever they go

    def start_writing(step, count):
        row = steps.row[step]  # before the branch, where the load needs no predicate
        pl.when(count > 0)(lambda: out_copy(step, row, count).start())

    def walk(step, matrices):
        # All loads first: each takes six cycles or more, together hardly longer.
        turn, last_turn = steps.turn[step], steps.last_turn[step]
        read, front, next_read = steps.read[step], steps.front[step], steps.read[step + 1]
        written, written_before = steps.write[step - 1], steps.write[step - SLOTS]
        started, last_turn_before = matrices
        pl.when(turn > last_turn_before)(lambda: rhs_copy(turn).wait())
        lhs_copy(step, read).wait()
        wait_written(step - SLOTS, written_before)

        limit = jnp.minimum(turn + tiles.matrix_slots, num_turns)  # the slots of groups that are done are free

        def start_copies():
            lhs_copy(step + 1, next_read).start()
            start_writing(step - 1, written)
            pl.when(started < limit)(functools.partial(start_rhs, started))

        def start_second_matrix():
            pl.when(started + 1 < limit)(functools.partial(start_rhs, started + 1))

        def wait_second_matrix():
            pl.when(last_turn > turn)(lambda: rhs_copy(last_turn).wait())

        slot = step & (SLOTS - 1)
        # Where the step before is complete there is nothing to take over, and its end may be the buffer's.
        shared = jnp.minimum(written, buffers.out.shape[1] - tiles.cut.packed)
        taken_over = _TakenOver(front, 1 - slot, pl.multiple_of(shared, tiles.cut.packed))
        if tiles.copies_first:
            start_copies()
        copies = _Copies(
            start=(lambda: None) if tiles.copies_first else start_copies,
            start_second_matrix=start_second_matrix,
            wait_second_matrix=wait_second_matrix,
        )
        _multiply(slot, read, taken_over, turn, last_turn, copies, buffers, quantized, tiles, transpose_rhs)
        return jnp.minimum(started + jnp.where(read > tiles.cut.rows, 2, 1), limit), last_turn

    buffers.out[SLOTS - 1, : tiles.cut.packed] = jnp.zeros((tiles.cut.packed, tiles.out), buffers.out.dtype)
    lhs_copy(SLOTS, steps.read[SLOTS]).start()
    first_turns = jnp.minimum(tiles.matrix_slots, num_turns)
    lax.fori_loop(0, first_turns, start_rhs, None)
    lax.fori_loop(SLOTS, end_step, walk, (first_turns, jnp.int32(-1)))
    lhs_copy(end_step, tiles.cut.packed).wait()
    start_writing(end_step - 1, steps.write[end_step - 1])
    for ago in range(SLOTS, 0, -1):
        wait_written(end_step - ago, steps.write[end_step - ago])
    last = (end_step - 1) & (SLOTS - 1), pl.multiple_of(steps.write[end_step - 1], tiles.cut.packed)
    _write_zeros(bounds, out, columns, last, buffers, tiles)


def _multiply(
    slot,
    read,
    taken_over,
    turn,
    last_turn,
    copies: _Copies,
    buffers: _Buffers,
    quantized: QuantizedCode,
    tiles: Tiles,
    transpose_rhs,
):
    """Run the straight code for the step's size, with the start of copies in it."""
    cut = tiles.cut

    def half(first, size, taken_over, turn, meanwhile):
        matrix_slot = turn & (tiles.matrix_slots - 1)
        _straight_code(slot, first, size, taken_over, matrix_slot, meanwhile, buffers, quantized, tiles, transpose_rhs)

    def single(size):
        half(0, size, taken_over, turn, copies.start)

    def pair():
        def start_copies():
            copies.start()
            copies.start_second_matrix()

        copies.wait_second_matrix()
        half(0, cut.rows, taken_over, turn, start_copies)
        half(cut.rows, cut.rows, None, last_turn, lambda: None)

    cases = [functools.partial(single, size) for size in cut.sizes]
    one_of(size_number(read, cut), [*cases, pair] if cut.paired else cases)


def _straight_code(
    slot,
    first: int,
    size: int,
    taken_over,
    matrix_slot,
    meanwhile,
    buffers: _Buffers,
    quantized: QuantizedCode,
    tiles: Tiles,
    transpose_rhs,
):
    """Multiply ``size`` rows from ``first`` on, in pieces small enough that their sums stay in registers.

    The narrowest columns come first: half a matrix is pushed into the MXU 31 cycles sooner. ``taken_over``: rows
    of the group before, in a block that is shared with it; None: there cannot be any.
    """
    inner, matrix = buffers.lhs.shape[2], buffers.rhs.at[matrix_slot]
    pieces = [
        (rows, columns)
        for columns in reversed(column_pieces(tiles.out, tiles.piece_columns))
        for rows in row_pieces(size, tiles.piece_rows, max(tiles.cut.packed, 16))
    ]
    quantized.spread_rows(slot, first, size)

    def product(rows, columns, part):
        at = quantized.inner(part)
        left = quantized.left(buffers.lhs[slot, rows.start + first : rows.stop + first, at])
        right = quantized.right(matrix, matrix_slot, part, columns, is_first=rows.start == 0)
        return quantized.sum_parts(dot, left, right, matrix_slot, at, columns)

    def dot(left, right):
        numbers = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
        return lax.dot_general(
            left,
            right,
            numbers,
            precision=matmul_precision(left.dtype),
            preferred_element_type=jnp.int32 if left.dtype == jnp.int8 else jnp.float32,
        ).astype(jnp.float32)

    def store(rows, columns, sums):
        sums = quantized.scaled_sums(sums, matrix_slot, slice(rows.start + first, rows.stop + first), columns)
        values = sums.astype(buffers.out.dtype)
        if rows.start == 0 and taken_over is not None:
            shared = buffers.out[taken_over.slot, pl.ds(taken_over.row, tiles.cut.packed), columns]
            at = lax.broadcasted_iota(jnp.int32, shared.shape, 0)
            head = jnp.where(at < taken_over.count, shared, values[: shared.shape[0]])
            buffers.out[slot, first : first + shared.shape[0], columns] = head
            rows, values = slice(shared.shape[0], rows.stop), values[shared.shape[0] :]
        buffers.out[slot, rows.start + first : rows.stop + first, columns] = values

    if tiles.inner >= inner:
        for number, (rows, columns) in enumerate(pieces):
            if number == (0 if tiles.copies_first else 1):
                meanwhile()
            store(rows, columns, product(rows, columns, None))
        if len(pieces) == 1 and not tiles.copies_first:
            meanwhile()
        return

    meanwhile()

    def add(part, _):
        for rows, columns in pieces:
            before = jnp.where(part == 0, 0.0, buffers.sums[rows, columns])
            buffers.sums[rows, columns] = before + product(rows, columns, part)

    lax.fori_loop(0, inner // tiles.inner, add, None)
    for rows, columns in pieces:
        store(rows, columns, buffers.sums[rows, columns])


def _write_zeros(bounds, out, columns, last, buffers: _Buffers, tiles: Tiles):
    """Zero rows before the first group and after the last, and the end of the block that the last group began."""
    start, end, num_rows = bounds[0], bounds[bounds.shape[0] - 1], out.shape[0]
    block = pl.multiple_of(round_down(end, tiles.cut.packed), tiles.cut.packed)

    @pl.when(end > block)
    def _():
        slot, row = last
        begun = buffers.out.at[slot, pl.ds(row, tiles.cut.packed)]
        at = lax.broadcasted_iota(jnp.int32, begun.shape, 0) + block
        begun[...] = jnp.where(at < end, begun[...], jnp.zeros(begun.shape, begun.dtype))
        copy = pltpu.make_async_copy(begun, out.at[pl.ds(block, tiles.cut.packed), columns], buffers.out_done.at[0])
        copy.start()
        copy.wait()

    ranges = ((0, round_down(start, tiles.cut.packed)), (round_up(end, tiles.cut.packed), num_rows))

    @pl.when((ranges[0][1] > 0) | (ranges[1][0] < num_rows))
    def _():
        rows = buffers.out.shape[1]
        buffers.out[0] = jnp.zeros(buffers.out.shape[1:], buffers.out.dtype)
        for first, last in ranges:

            def zero(place, _, first=first, last=last):
                row = pl.multiple_of(first + place * rows, tiles.cut.packed)
                count = pl.multiple_of(jnp.minimum(rows, last - row), tiles.cut.packed)
                target = out.at[pl.ds(row, count), columns]
                copy = pltpu.make_async_copy(buffers.out.at[0, pl.ds(0, count)], target, buffers.out_done.at[0])
                copy.start()
                copy.wait()

            lax.fori_loop(0, (last - first + rows - 1) // rows, zero, None)
