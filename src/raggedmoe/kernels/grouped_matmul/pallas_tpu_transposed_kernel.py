"""The TensorCore kernel of the transposed `grouped_matmul`: each group's ``lhsᵀ @ rhs``, the matrices' gradient.

For one tile of the results the kernel walks the groups' rows in steps (see `row_steps_kernel`). What a step read of
other groups' rows, and of rows that are no one's, is set to zero in VMEM, in both operands, so that nothing there, NaN
included, reaches a sum. The sums of a group stay in VMEM; they go out, rounded, behind its last step, while the next
group is multiplied. Groups without rows get zeros.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from raggedmoe.kernels.arrays import matmul_precision
from raggedmoe.kernels.grouped_matmul.row_steps_kernel import (
    SLOTS,
    Steps,
    column_pieces,
    list_in_smem,
    list_steps,
    one_of,
    round_down,
    round_up,
    size_number,
)
from raggedmoe.kernels.grouped_matmul.tiles import TransposedTiles
from raggedmoe.kernels.placement import pvary_alike, result


class _Buffers(NamedTuple):
    """VMEM, and the semaphores of the copies."""

    lhs: Any  # [SLOTS, rows, I]
    rhs: Any  # [SLOTS, rows, O]
    sums: Any  # [I, O]
    out: Any  # [SLOTS, I, O], by turn
    lhs_done: Any
    rhs_done: Any
    out_done: Any


def transposed_matmul(lhs, rhs, bounds, *, tiles: TransposedTiles, out_dtype):
    """Multiply ``[R I]`` and ``[R O]`` to ``[G I O]``; R is a multiple of the packed rows, I and O of the tile's."""
    bounds, lhs, rhs = pvary_alike(bounds, lhs, rhs)
    (num_rows, inner), out_dim = lhs.shape, rhs.shape[1]
    num_groups = bounds.shape[0] - 1
    buffers = [
        pltpu.VMEM((SLOTS, tiles.cut.rows, tiles.inner), lhs.dtype),
        pltpu.VMEM((SLOTS, tiles.cut.rows, tiles.out), rhs.dtype),
        pltpu.VMEM((tiles.inner, tiles.out), jnp.float32),
        pltpu.VMEM((SLOTS, tiles.inner, tiles.out), out_dtype),
        *[pltpu.SemaphoreType.DMA((SLOTS,))] * 3,
    ]
    read = lhs.size * (out_dim // tiles.out) + rhs.size * (inner // tiles.inner)
    call = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(inner // tiles.inner, out_dim // tiles.out),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[*list_in_smem(num_rows, num_groups, tiles.cut), *buffers],
        ),
        out_shape=result((num_groups, inner, out_dim), out_dtype, lhs),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=tiles.vmem_limit,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * inner * out_dim,
            bytes_accessed=read * lhs.dtype.itemsize + num_groups * inner * out_dim * jnp.dtype(out_dtype).itemsize,
            transcendentals=0,
        ),
        name="raggedmoe_grouped_matmul_transposed",
    )
    return call(bounds, lhs, rhs)


def _kernel(bounds, lhs, rhs, out, *scratch, tiles: TransposedTiles):
    cut, steps, buffers = tiles.cut, Steps(*scratch[:7]), _Buffers(*scratch[7:])
    end_step, num_turns = list_steps(bounds, steps, cut)
    at_inner = _columns(0, tiles.inner, lhs.shape[1])
    at_out = _columns(1, tiles.out, rhs.shape[1])

    def copies(step):
        count, slot = pl.multiple_of(steps.read[step], cut.packed), step & (SLOTS - 1)
        there, here = pl.ds(pl.multiple_of(steps.row[step], cut.packed), count), pl.ds(0, count)
        return (
            pltpu.make_async_copy(lhs.at[there, at_inner], buffers.lhs.at[slot, here], buffers.lhs_done.at[slot]),
            pltpu.make_async_copy(rhs.at[there, at_out], buffers.rhs.at[slot, here], buffers.rhs_done.at[slot]),
        )

    def out_copy(turn):
        slot, target = turn & (SLOTS - 1), out.at[steps.group[turn], at_inner, at_out]
        return pltpu.make_async_copy(buffers.out.at[slot], target, buffers.out_done.at[slot])

    def wait_written(turn):
        out_copy(turn).wait()

    def start_next(step):
        for copy in copies(step + 1):
            copy.start()

    def walk(step, turn_before):
        turn, next_turn, read, front = steps.turn[step], steps.turn[step + 1], steps.read[step], steps.front[step]
        slot, first = step & (SLOTS - 1), turn != turn_before
        valid = jnp.minimum(bounds[steps.group[turn] + 1] - steps.row[step], read)
        for copy in copies(step):
            copy.wait()
        pl.when(first & (turn >= SLOTS))(functools.partial(wait_written, turn - SLOTS))
        _zero_others(slot, front, read, valid, buffers, tiles)
        multiply = functools.partial(_straight_code, slot, turn & (SLOTS - 1), first, buffers, tiles)
        cases = [functools.partial(multiply, size, lambda: start_next(step)) for size in cut.sizes]
        one_of(size_number(read, cut), cases)
        pl.when(turn != next_turn)(lambda: out_copy(turn).start())
        return turn

    for copy in copies(SLOTS):
        copy.start()
    lax.fori_loop(SLOTS, end_step, walk, jnp.int32(-1))
    for copy in copies(end_step):
        copy.wait()
    for ago in range(SLOTS, 0, -1):
        pl.when(num_turns >= ago)(functools.partial(wait_written, num_turns - ago))
    _write_zeros(bounds, out.at[:, at_inner, at_out], buffers)


def _columns(grid_axis: int, tile: int, whole: int):
    if tile == whole:
        return slice(None)
    return pl.ds(pl.multiple_of(pl.program_id(grid_axis) * tile, tile), tile)


def _zero_others(slot, front, read, valid, buffers: _Buffers, tiles: TransposedTiles):
    """Set the rows of other groups to zero, and those that were not read."""
    packed = tiles.cut.packed
    size = jnp.maximum(round_up(read, tiles.cut.step), tiles.cut.sizes[0])

    def keep(block, first, end):
        """Keep the rows of one block that are in ``[first, end)``; set the others to zero."""
        start = pl.multiple_of(block * packed, packed)
        for buffer in (buffers.lhs, buffers.rhs):
            rows = buffer.at[slot, pl.ds(start, packed)]
            at = lax.broadcasted_iota(jnp.int32, rows.shape, 0) + start
            rows[...] = jnp.where((at >= first) & (at < end), rows[...], jnp.zeros(rows.shape, rows.dtype))

    pl.when(front > 0)(lambda: keep(0, front, valid))

    @pl.when(valid < size)
    def _():
        first = jnp.where(round_down(valid, packed) == 0, front, 0)
        lax.fori_loop(valid // packed, size // packed, lambda block, _: keep(block, first, valid), None)


def _straight_code(slot, out_slot, first, buffers: _Buffers, tiles: TransposedTiles, size: int, start_next):
    """Add the step's product to the group's sums; rounded, they are the result behind its last step."""
    start_next()
    left, right = buffers.lhs.at[slot], buffers.rhs.at[slot]
    for rows in column_pieces(tiles.inner, tiles.piece_inner):
        for columns in column_pieces(tiles.out, tiles.piece_out):
            product = lax.dot_general(
                left[:size, rows],
                right[:size, columns],
                (((0,), (0,)), ((), ())),
                precision=matmul_precision(left.dtype),
                preferred_element_type=jnp.int32 if left.dtype == jnp.int8 else jnp.float32,
            ).astype(jnp.float32)
            sums = jnp.where(first, 0.0, buffers.sums[rows, columns]) + product
            buffers.sums[rows, columns] = sums
            buffers.out[out_slot, rows, columns] = sums.astype(buffers.out.dtype)


def _write_zeros(bounds, out, buffers: _Buffers):
    """Write the results of groups without rows, zeros."""
    num_groups = bounds.shape[0] - 1

    def count(group, empty):
        return empty + jnp.where(bounds[group + 1] > bounds[group], 0, 1)

    @pl.when(lax.fori_loop(0, num_groups, count, jnp.int32(0)) > 0)
    def _():
        buffers.out[0] = jnp.zeros(buffers.out.shape[1:], buffers.out.dtype)

        def write(group, _):
            @pl.when(bounds[group + 1] <= bounds[group])
            def write_one():
                copy = pltpu.make_async_copy(buffers.out.at[0], out.at[group], buffers.out_done.at[0])
                copy.start()
                copy.wait()

        lax.fori_loop(0, num_groups, write, None)
