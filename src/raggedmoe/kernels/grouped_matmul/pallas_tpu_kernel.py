"""The TensorCore kernel of `grouped_matmul`.

A *step* multiplies consecutive rows. It starts where its group does, rounded down to a whole block of packed rows, and
has at most ``tiles.rows`` rows of one group; or it is a pair: twice ``tiles.rows``, each half of one group. The kernel

1. lists the steps in SMEM, by scalar code (some 60 cycles each: no operation of XLA's is needed beside the kernel);
2. walks the list. The next step's rows and the next groups' matrices are on their way while a step is multiplied; a
   matrix stays as long as its group lasts, so it is read once, and one without rows never;
3. multiplies by straight code for the step's size: rows of other groups cost less than ``tiles.step`` a group. Filling
   and draining the MXU takes 270 cycles on a v6e, which a pair pays once;
4. copies out whole blocks of packed rows. A block that two groups share waits in ``carry`` until the second has
   computed its part, so that every row is written once, by one copy, in no particular order;
5. writes zeros to the rows before the first and after the last group.

The lengths of copies are exact in whole blocks of rows; nothing past the end of an array is read or written.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from raggedmoe.kernels.arrays import matmul_precision
from raggedmoe.kernels.grouped_matmul.tiles import Tiles

SLOTS = 2  # steps whose rows are in VMEM
NO_ROW = -(2**30)


class _Steps(NamedTuple):
    """The list of steps, in SMEM."""

    row: jax.Array  # its first, a multiple of the packed block
    read: jax.Array  # rows to read: up to the end of the group's last block. More than tiles.rows: it is a pair
    write: jax.Array  # rows that are complete: up to the block that the group shares with the next
    front: jax.Array  # rows of earlier groups in its first block
    turn: jax.Array  # its group's place among those that have rows
    last_turn: jax.Array  # that of a pair's second half
    group: jax.Array  # by turn


class _Buffers(NamedTuple):
    """VMEM, and the semaphores of the copies."""

    lhs: jax.Array  # [SLOTS, rows, I]
    rhs: jax.Array  # [matrix slots, I, O] or [matrix slots, O, I]
    out: jax.Array  # [SLOTS, rows, O]
    carry: jax.Array  # [packed rows, O]
    sums: jax.Array  # [tiles.rows, O], where I is split
    lhs_done: jax.Array
    rhs_done: jax.Array
    out_done: jax.Array


def grouped_matmul(lhs, rhs, bounds, *, tiles: Tiles, transpose_rhs: bool, out_dtype):
    """``[R I], [G I O] or [G O I], [G+1] -> [R O]``; R is a multiple of ``tiles.packed``, O of ``tiles.out``."""
    num_rows, inner = lhs.shape
    num_groups, out_dim = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    most_steps = num_rows // (tiles.rows // 2) + num_groups + SLOTS + 2
    matrix = (tiles.out, inner) if transpose_rhs else (inner, tiles.out)
    rows = tiles.rows * (2 if tiles.paired else 1)
    scratch = [
        *[pltpu.SMEM((most_steps,), jnp.int32)] * 6,
        pltpu.SMEM((num_groups,), jnp.int32),
        pltpu.VMEM((SLOTS, rows, inner), lhs.dtype),
        pltpu.VMEM((tiles.matrix_slots, *matrix), rhs.dtype),
        pltpu.VMEM((SLOTS, rows, tiles.out), out_dtype),
        pltpu.VMEM((tiles.packed, tiles.out), out_dtype),
        pltpu.VMEM((tiles.rows, tiles.out) if tiles.inner < inner else (8, 128), jnp.float32),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        pltpu.SemaphoreType.DMA((tiles.matrix_slots,)),
        pltpu.SemaphoreType.DMA((SLOTS,)),
    ]
    moved = lhs.size * lhs.dtype.itemsize * (out_dim // tiles.out) + rhs.size * rhs.dtype.itemsize
    call = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, transpose_rhs=transpose_rhs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(out_dim // tiles.out,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, out_dim), out_dtype),
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
    return call(bounds, lhs, rhs)


def _kernel(bounds, lhs, rhs, out, *scratch, tiles: Tiles, transpose_rhs):
    steps, buffers = _Steps(*scratch[:7]), _Buffers(*scratch[7:])
    end_step, num_turns = _list_steps(bounds, steps, tiles)
    columns = slice(None)
    if out.shape[1] > tiles.out:
        columns = pl.ds(pl.multiple_of(pl.program_id(0) * tiles.out, tiles.out), tiles.out)

    def rows(step, count):
        return pl.ds(pl.multiple_of(steps.row[step], tiles.packed), count), pl.ds(0, count)

    def lhs_copy(step):
        there, here = rows(step, pl.multiple_of(steps.read[step], tiles.packed))
        slot = step & (SLOTS - 1)
        return pltpu.make_async_copy(lhs.at[there], buffers.lhs.at[slot, here], buffers.lhs_done.at[slot])

    def out_copy(step, count):
        there, here = rows(step, pl.multiple_of(count, tiles.packed))
        slot = step & (SLOTS - 1)
        return pltpu.make_async_copy(buffers.out.at[slot, here], out.at[there, columns], buffers.out_done.at[slot])

    def rhs_copy(turn):
        slot, group = turn & (tiles.matrix_slots - 1), steps.group[turn]
        source = rhs.at[group, columns] if transpose_rhs else rhs.at[group, :, columns]
        return pltpu.make_async_copy(source, buffers.rhs.at[slot], buffers.rhs_done.at[slot])

    def wait_written(step):
        count = steps.write[step]
        pl.when(count > 0)(lambda: out_copy(step, count).wait())

    def walk(step, last_turn_before):
        # All loads first: each takes six cycles or more, together hardly longer.
        turn, last_turn, next_turn = steps.turn[step], steps.last_turn[step], steps.turn[step + 1]
        read, write, front = steps.read[step], steps.write[step], steps.front[step]
        pl.when(turn > last_turn_before)(lambda: rhs_copy(turn).wait())
        pl.when(last_turn > turn)(lambda: rhs_copy(last_turn).wait())
        lhs_copy(step).wait()
        wait_written(step - SLOTS)
        start_next = lhs_copy(step + 1).start
        slot = step & (SLOTS - 1)
        _multiply(slot, read, turn, last_turn, start_next, buffers, tiles, transpose_rhs)
        _share_blocks(slot, read, write, front, buffers, tiles)
        pl.when(write > 0)(lambda: out_copy(step, write).start())
        # The slots of the groups that are done take the next ones: at most two, a pair's.
        limit = jnp.minimum(next_turn + tiles.matrix_slots, num_turns)
        for free in (turn + tiles.matrix_slots, turn + tiles.matrix_slots + 1):
            pl.when(free < limit)(lambda free=free: rhs_copy(free).start())
        return last_turn

    buffers.carry[...] = jnp.zeros_like(buffers.carry)
    lhs_copy(SLOTS).start()
    first_turns = jnp.minimum(tiles.matrix_slots, num_turns)
    lax.fori_loop(0, first_turns, lambda turn, _: rhs_copy(turn).start(), None)
    lax.fori_loop(SLOTS, end_step, walk, jnp.int32(-1))
    lhs_copy(end_step).wait()
    for ago in range(SLOTS, 0, -1):
        wait_written(end_step - ago)
    _write_zeros(bounds, out, columns, buffers, tiles)


def _share_blocks(slot, read, write, front, buffers: _Buffers, tiles: Tiles):
    """Take over the block at the step's front from the group before, and keep the one at its back for the next."""

    @pl.when((front > 0) | (write < read))
    def _():
        first = buffers.out.at[slot, pl.ds(0, tiles.packed)]
        at = lax.broadcasted_iota(jnp.int32, first.shape, 0)
        first[...] = jnp.where(at < front, buffers.carry[...], first[...])
        last = pl.multiple_of(jnp.minimum(write, read - tiles.packed), tiles.packed)
        buffers.carry[...] = buffers.out[slot, pl.ds(last, tiles.packed)]


def _list_steps(bounds, steps: _Steps, tiles: Tiles):
    """Fill the list; where it ends, and the number of groups that have rows.

    The list begins with ``SLOTS`` steps that write nothing, and ends with one that reads a block of rows and is never
    computed: so every step can wait for an earlier one and start a later one without asking whether there is one.
    """
    num_groups, rows, packed = steps.group.shape[0], tiles.rows, tiles.packed

    def add_step(start, end, turn, state):
        row, step, full_row, full_front, full_turn = state  # the last three: of the step before, if it is full
        size = step_size(end - row, tiles)
        read = jnp.minimum(size, _round_up(end, packed) - row)
        write = jnp.minimum(size, _round_down(end, packed) - row)
        front = jnp.maximum(start - row, 0)
        second = (full_row + rows == row) & (size == rows)  # of a pair
        ahead, at = jnp.where(second, rows, 0), step - jnp.where(second, 1, 0)
        first_front, first_turn = jnp.where(second, full_front, front), jnp.where(second, full_turn, turn)
        steps.row[at], steps.read[at], steps.write[at] = row - ahead, read + ahead, write + ahead
        steps.front[at], steps.turn[at], steps.last_turn[at] = first_front, first_turn, turn
        can_pair = tiles.paired & (write == rows) & ~second
        return row + size, at + 1, jnp.where(can_pair, row, NO_ROW), front, turn

    def add_group(group, state):
        start, turn, *before = state
        end = bounds[group + 1]
        add = functools.partial(add_step, start, end, turn)
        # The first without a branch: an empty group's is listed and forgotten.
        row, *after = add((_round_down(start, packed), *before))
        some = end > start
        before = [jnp.where(some, new, old) for new, old in zip(after, before)]
        first = jnp.where(some, row, end)
        _, *before = lax.while_loop(lambda state: state[0] < end, add, (first, *before))
        steps.group[jnp.minimum(turn, num_groups - 1)] = group
        return end, turn + jnp.where(some, 1, 0), *before

    for step in range(SLOTS):
        steps.write[step] = 0
    zero = jnp.int32(0)
    state = (bounds[0], zero, jnp.int32(SLOTS), jnp.int32(NO_ROW), zero, zero)
    _, num_turns, end_step, *_ = lax.fori_loop(0, num_groups, add_group, state, unroll=2)
    steps.row[end_step], steps.read[end_step], steps.turn[end_step] = 0, packed, num_turns
    return end_step, num_turns


def step_size(rest, tiles: Tiles):
    """The size of the next step of a group with that many rows left.

    Between one and one and a half full steps are halved: pushing a matrix into the MXU takes as long as 128 rows of
    work, so that two halves are cheaper than a full step and a small one.
    """
    rows, step = tiles.rows, tiles.step
    half = _round_up(rest, 2 * step) // 2
    return jnp.where(rest <= rows, _round_up(rest, step), jnp.where(rest < rows + rows // 2, half, rows))


def _multiply(slot, read, turn, last_turn, start_next, buffers: _Buffers, tiles: Tiles, transpose_rhs):
    """The next step's copy is started inside the straight code, which has room for it."""

    def half(first, size, turn):
        matrix = buffers.rhs.at[turn & (tiles.matrix_slots - 1)]
        _straight_code(slot, first, size, matrix, buffers, tiles, transpose_rhs)

    def single(size):
        start_next()
        half(0, size, turn)

    def pair():
        start_next()
        half(0, tiles.rows, turn)
        half(tiles.rows, tiles.rows, last_turn)

    def singles():
        beyond = jnp.maximum(read - tiles.sizes[0], 0)
        _one_of((beyond + tiles.step - 1) // tiles.step, [functools.partial(single, size) for size in tiles.sizes])

    if tiles.paired:
        lax.cond(read > tiles.rows, pair, singles)
    else:
        singles()


def _one_of(number, cases):
    """``lax.switch`` by halving: 4 branches for 13 cases, where Mosaic asks one by one."""
    if len(cases) == 1:
        cases[0]()
        return
    middle = len(cases) // 2
    lax.cond(
        number < middle,
        lambda: _one_of(number, cases[:middle]),
        lambda: _one_of(number - middle, cases[middle:]),
    )


def _straight_code(slot, first: int, size: int, matrix, buffers: _Buffers, tiles: Tiles, transpose_rhs):
    """Multiply ``size`` rows from ``first`` on, in pieces small enough that their sums stay in registers."""
    inner = buffers.lhs.shape[2]
    pieces = [
        (rows, columns)
        for columns in _column_pieces(tiles.out, tiles.piece_columns)
        for rows in _row_pieces(size, tiles.piece_rows)
    ]

    def product(rows, columns, at):
        left = buffers.lhs[slot, rows.start + first : rows.stop + first, at]
        right = matrix[columns, at] if transpose_rhs else matrix[at, columns]
        numbers = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
        return lax.dot_general(
            left, right, numbers, precision=matmul_precision(left.dtype), preferred_element_type=jnp.float32
        )

    def store(rows, columns, sums):
        buffers.out[slot, rows.start + first : rows.stop + first, columns] = sums.astype(buffers.out.dtype)

    if tiles.inner >= inner:
        for rows, columns in pieces:
            store(rows, columns, product(rows, columns, slice(None)))
        return

    def add(part, _):
        at = pl.ds(pl.multiple_of(part * tiles.inner, tiles.inner), tiles.inner)
        for rows, columns in pieces:
            before = jnp.where(part == 0, 0.0, buffers.sums[rows, columns])
            buffers.sums[rows, columns] = before + product(rows, columns, at)

    lax.fori_loop(0, inner // tiles.inner, add, None)
    for rows, columns in pieces:
        store(rows, columns, buffers.sums[rows, columns])


def _column_pieces(length: int, longest: int) -> list[slice]:
    """Whole pieces and what remains: every one starts at a multiple of the lanes."""
    return [slice(first, min(first + longest, length)) for first in range(0, length, longest)]


def _row_pieces(length: int, longest: int) -> list[slice]:
    """Nearly equal pieces of whole packed blocks: a short one would cost as much as one of 128 rows."""
    number = max(1, length // longest)
    bounds = [_round_up(length * place // number, 16) for place in range(number)] + [length]
    return [slice(a, b) for a, b in zip(bounds, bounds[1:])]


def _write_zeros(bounds, out, columns, buffers: _Buffers, tiles: Tiles):
    """Zero rows before the first group and after the last, and the end of the block that the last group began."""
    start, end, num_rows = bounds[0], bounds[bounds.shape[0] - 1], out.shape[0]
    block = pl.multiple_of(_round_down(end, tiles.packed), tiles.packed)

    @pl.when(end > block)
    def _():
        at = lax.broadcasted_iota(jnp.int32, buffers.carry.shape, 0) + block
        buffers.carry[...] = jnp.where(at < end, buffers.carry[...], jnp.zeros_like(buffers.carry))
        target = out.at[pl.ds(block, tiles.packed), columns]
        copy = pltpu.make_async_copy(buffers.carry, target, buffers.out_done.at[0])
        copy.start()
        copy.wait()

    ranges = ((0, _round_down(start, tiles.packed)), (_round_up(end, tiles.packed), num_rows))

    @pl.when((ranges[0][1] > 0) | (ranges[1][0] < num_rows))
    def _():
        rows = buffers.out.shape[1]
        buffers.out[0] = jnp.zeros(buffers.out.shape[1:], buffers.out.dtype)
        for first, last in ranges:

            def zero(place, _, first=first, last=last):
                row = pl.multiple_of(first + place * rows, tiles.packed)
                count = pl.multiple_of(jnp.minimum(rows, last - row), tiles.packed)
                target = out.at[pl.ds(row, count), columns]
                copy = pltpu.make_async_copy(buffers.out.at[0, pl.ds(0, count)], target, buffers.out_done.at[0])
                copy.start()
                copy.wait()

            lax.fori_loop(0, (last - first + rows - 1) // rows, zero, None)


def _round_down(value, multiple: int):
    """For powers of two."""
    return value & -multiple


def _round_up(value, multiple: int):
    return (value + multiple - 1) & -multiple
