"""The body of `expert_ffn/pallas_tpu`: one TensorCore kernel over the row tiles of the groups and, in each, parts of F.

A row tile belongs to one group. Its rows and the float32 sums of its output stay in VMEM while the parts of the group's
three matrices pass by, ``[tiles.hidden, D]`` of each. Every part makes its hidden activations, rounds them, and
multiplies them into the sums, D in tiles of `tiles.width`. So an activation is computed once and never leaves VMEM.

Bytes through HBM: the rows once, the result once, and a group's weights once for each of its row tiles, which is once
where it has at most ``tiles.rows`` rows. A group without rows has no tile: its weights are not read.

Groups start at any row, but copies move whole packs (8 sublanes of 32 bits: 8 rows of float32, 16 of bfloat16). A tile
starts at the pack of its group's first row. The pack that groups share is handed on in `carry` until the last of them
has filled it, so every pack of the result is written once, by one copy, and no two copies need an order.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from raggedmoe.kernels.arrays import matmul_precision
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.expert_ffn.api import ExpertBiases, ExpertWeights
from raggedmoe.kernels.placement import pvary_alike, result


def _gelu(gate, up):
    """Compute gelu as `ACTIVATIONS` does, but by erf: jax.nn writes it by erfc, which Mosaic does not have."""
    hidden = 0.5 * gate * (1 + lax.erf(gate * 0.5**0.5))
    return hidden if up is None else hidden * up


IN_KERNEL = {**ACTIVATIONS, "gelu": _gelu}
WITHOUT_TRANSCENDENTALS = ("relu2",)  # the others take one of each hidden number: a sigmoid, an erf, a tanh


def forward(rows, weights, bounds, *, activation, tiles, vmem_limit):
    """Compute up, activation and down of each group's rows; the other rows are zero. ``bounds[0]`` is 0."""
    num_rows = rows.shape[0]
    spare = -num_rows % tiles.pack
    if not spare:
        return _call(rows, weights, bounds, activation, tiles, vmem_limit)
    padded = jnp.pad(rows, ((0, spare), (0, 0)))
    return _call(padded, weights, bounds, activation, tiles, vmem_limit)[:num_rows]


def row_tiles(bounds, num_rows, tiles):
    """Return the group and the first row of each tile, and where each core's tiles start: ``ranges[core]`` to the next.

    Tile t writes the rows from ``first[t]`` to ``first[t + 1]``; its group may also own some of the pack that follows.
    There is a tile even if no group has rows, so that the kernel runs and zeroes the result.
    """
    num_groups = bounds.shape[0] - 1
    most = (num_rows + num_groups * tiles.pack) // tiles.rows + num_groups
    start = bounds[:-1] // tiles.pack * tiles.pack
    number = jnp.where(bounds[1:] > bounds[:-1], pl.cdiv(bounds[1:] - start, tiles.rows), 0)
    ends = jnp.cumsum(number, dtype=jnp.int32)
    tile = jnp.arange(most + 1, dtype=jnp.int32)[:, None]
    here = (tile >= (ends - number)[None]) & (tile < ends[None])  # a tile's group: sums over it, as gathers cost more
    row = start[None] + (tile - (ends - number)[None]) * tiles.rows
    group = jnp.sum(jnp.where(here, jnp.arange(num_groups, dtype=jnp.int32)[None], 0), axis=1, dtype=jnp.int32)
    first = jnp.sum(jnp.where(here, row, 0), axis=1, dtype=jnp.int32)
    past_all = pl.cdiv(bounds[-1], tiles.pack) * tiles.pack
    ranges = [jnp.zeros(1, jnp.int32), jnp.maximum(ends[-1:], 1)]
    if tiles.cores == 2:
        # The second core starts at a tile near the middle that shares no pack with the one before; the first is such.
        fresh = jnp.any(here & (row >= bounds[:-1][None]), axis=1)
        from_middle = jnp.where(fresh, jnp.abs(2 * tile[:, 0] - ends[-1]), 2 * most)
        ranges.insert(1, jnp.argmin(from_middle, keepdims=True).astype(jnp.int32))
    return group, jnp.where(tile[:, 0] < ends[-1], first, past_all), jnp.concatenate(ranges)


def _call(rows, weights, bounds, activation, tiles, vmem_limit):
    width, num_hidden = rows.shape[1], weights.wi_0.shape[1]
    operands, tree = jax.tree.flatten((rows, weights, bounds))
    rows, weights, bounds = jax.tree.unflatten(tree, pvary_alike(*operands))
    # A block's last two dimensions are whole or multiples of (8, 128): a group's biases get a row of their own.
    weights = weights._replace(biases=jax.tree.map(lambda bias: bias[:, None, :], weights.biases))
    parts = pl.cdiv(num_hidden, tiles.hidden)
    sums = [pltpu.VMEM((tiles.rows, width), jnp.float32)] if parts > 1 else []
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    group, first, ranges = row_tiles(bounds, rows.shape[0], tiles)
    return pl.pallas_call(
        functools.partial(_body, activation=activation, tiles=tiles, num_hidden=num_hidden),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tiles.cores, jnp.max(ranges[1:] - ranges[:-1]), parts),
            in_specs=[in_hbm, _weight_specs(weights, tiles, parts)],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((tiles.slots, tiles.rows, width), rows.dtype),
                pltpu.VMEM((tiles.pack, width), rows.dtype),
                pltpu.SemaphoreType.DMA((tiles.slots,)),
                pltpu.SemaphoreType.DMA((tiles.slots,)),
                *sums,
            ],
        ),
        out_shape=result(rows.shape, rows.dtype, like=rows),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        cost_estimate=_cost(rows, weights, activation, tiles),
        name="expert_ffn",
    )(group, first, bounds, ranges, rows, weights)


def _cost(rows, weights, activation, tiles):
    """Estimate the cost of a call whose rows all belong to groups, as many to each."""
    num_rows, width = rows.shape
    num_groups, num_hidden, _ = weights.wi_0.shape
    matrices = 2 if weights.wi_1 is None else 3
    filled = min(num_groups, num_rows)
    passes = filled * pl.cdiv(pl.cdiv(num_rows, filled), tiles.rows) if filled else 0
    weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    return pl.CostEstimate(
        flops=2 * matrices * num_rows * width * num_hidden,
        bytes_accessed=2 * rows.size * rows.dtype.itemsize + passes * weight_bytes // num_groups,
        transcendentals=0 if activation in WITHOUT_TRANSCENDENTALS else num_rows * num_hidden,
    )


def _weight_specs(weights, tiles, parts):
    """Specify one part of the tile's group at a time; Pallas copies the next while this one is used."""
    width = weights.wi_0.shape[2]

    def place(core, turn, part, group, first, bounds, ranges):
        tile = ranges[core] + turn
        past_end = tile >= ranges[core + 1]  # this core is done: the same block again, which is not copied
        tile = jnp.where(past_end, jnp.maximum(ranges[core + 1] - 1, 0), tile)
        return group[tile], jnp.where(past_end, parts - 1, part)

    def matrix_at(*step):
        group, part = place(*step)
        return group, part, 0

    def bias_at(*step):
        group, part = place(*step)
        return group, 0, part

    matrix: Any = pl.BlockSpec((None, tiles.hidden, width), matrix_at)
    wi_1 = None if weights.wi_1 is None else matrix
    if weights.biases is None:
        return ExpertWeights(matrix, wi_1, matrix, None)
    up: Any = pl.BlockSpec((None, 1, tiles.hidden), bias_at)
    down: Any = pl.BlockSpec((None, 1, width), lambda *step: (place(*step)[0], 0, 0))
    return ExpertWeights(matrix, wi_1, matrix, ExpertBiases(up, None if wi_1 is None else up, down))


class _Tile(NamedTuple):
    """What all steps of a tile share."""

    slot: Any  # where its rows are, and its result will be
    begin: Any  # its group's rows in it: begin <= row < end
    end: Any


def _body(group_ref, first_ref, bounds_ref, ranges_ref, rows_hbm, weights, out_hbm, *scratch, **static):
    core, turn = pl.program_id(0), pl.program_id(1)
    live = ranges_ref[core] + turn < ranges_ref[core + 1]
    tables = group_ref, first_ref, bounds_ref, ranges_ref
    pl.when(live)(lambda: _step_of_tile(tables, rows_hbm, weights, out_hbm, *scratch, **static))


def _step_of_tile(
    tables, rows_hbm, weights, out_hbm, slots, carry, in_sems, out_sems, sums=None, *, activation, tiles, num_hidden
):
    group_ref, first_ref, bounds_ref, ranges_ref = tables
    core, turn, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    number, last = ranges_ref[core] + turn, ranges_ref[core + 1] - 1  # this tile, and this core's last
    parts, pack = pl.cdiv(num_hidden, tiles.hidden), tiles.pack

    def extent(number):
        group, first = group_ref[number], first_ref[number]
        begin = jnp.maximum(bounds_ref[group] - first, 0)
        return _Tile(lax.rem(number, tiles.slots), begin, jnp.minimum(bounds_ref[group + 1] - first, tiles.rows))

    def rows_in(number, act):
        tile = extent(number)
        copies = _Copies(tiles, rows_hbm, slots.at[tile.slot], in_sems.at[tile.slot], act)
        copies.run(first_ref[number], 0, pl.cdiv(tile.end, pack) * pack)

    def rows_out(number, act):
        slot, first = lax.rem(number, tiles.slots), first_ref[number]
        _Copies(tiles, slots.at[slot], out_hbm, out_sems.at[slot], act).run(0, first, first_ref[number + 1] - first)

    tile = extent(number)

    @pl.when((turn == 0) & (part == 0))
    def _():
        carry[...] = jnp.zeros_like(carry)
        rows_in(number, _start)

    @pl.when(part == 0)
    def _():
        rows_in(number, _wait)

    @pl.when(part == min(1, parts - 1))  # the slot that the next tile's rows get has been copied out by now, mostly
    def _():
        pl.when(turn + 1 >= tiles.slots)(lambda: rows_out(number + 1 - tiles.slots, _wait))
        pl.when(number < last)(lambda: rows_in(number + 1, _start))

    _Compute(tiles, activation, num_hidden, part, tile, slots, weights, sums).run()

    @pl.when(part == parts - 1)
    def _():
        @pl.when(tile.begin > 0)  # the pack's first rows are of groups before: they come from the tiles before
        def _():
            in_pack = lax.broadcasted_iota(jnp.int32, (pack, 1), 0)
            shared = slots[tile.slot, pl.ds(0, pack)]
            slots[tile.slot, pl.ds(0, pack)] = jnp.where(in_pack < tile.begin, carry[...], shared)

        @pl.when(lax.rem(tile.end, pack) != 0)
        def _():
            carry[...] = slots[tile.slot, pl.ds(pl.multiple_of(tile.end // pack * pack, pack), pack)]

        rows_out(number, _start)

    @pl.when((part == parts - 1) & (number == ranges_ref[tiles.cores] - 1))
    def _():
        free = lax.rem(number + 1, tiles.slots)
        _zero_from(first_ref[number + 1], tiles, slots.at[free], out_hbm, out_sems.at[free])

    @pl.when((part == parts - 1) & (number == last))
    def _():
        for before in range(tiles.slots - 1):
            pl.when(turn >= before)(functools.partial(rows_out, number - before, _wait))


def _start(copy):
    copy.start()


def _wait(copy):
    copy.wait()


class _Copies(NamedTuple):
    """Copies of a number of rows that is known when the kernel runs: whole steps, then packs."""

    tiles: Any
    source: Any
    target: Any
    semaphore: Any
    act: Any  # `_start` or `_wait`

    def run(self, source_row, target_row, number, *, repeat_source=False):
        """Copy ``number`` rows, a multiple of the packs; with ``repeat_source`` the same few again and again."""

        def copy_steps(size, first, number):
            def one(i, _):
                done = first + i * size
                from_row = source_row if repeat_source else source_row + done
                source, target = (
                    ref.at[pl.ds(pl.multiple_of(row, self.tiles.pack), size)]
                    for ref, row in ((self.source, from_row), (self.target, target_row + done))
                )
                self.act(pltpu.make_async_copy(source, target, self.semaphore))

            lax.fori_loop(0, number // size, one, None)

        step = _step(self.tiles)
        rest = lax.rem(number, step)
        copy_steps(step, 0, number)
        copy_steps(self.tiles.pack, number - rest, rest)


def _step(tiles):
    """Return how many rows are copied, cleared or finished in one turn of a loop."""
    return math.gcd(tiles.rows, 4 * tiles.pack)


def _zero_from(first, tiles, slot, out_hbm, semaphore):
    """Zero the rows of no group: all from ``first`` on."""
    number = out_hbm.shape[0] - first

    @pl.when(number > 0)
    def _():
        slot[pl.ds(0, _step(tiles))] = jnp.zeros((_step(tiles), slot.shape[1]), slot.dtype)
        for act in (_start, _wait):
            _Copies(tiles, slot, out_hbm, semaphore, act).run(0, first, number, repeat_source=True)


class _Compute(NamedTuple):
    """The matmuls of one tile and one part."""

    tiles: Any
    activation: str
    num_hidden: int
    part: Any
    tile: _Tile
    slots: Any
    weights: Any
    sums: Any  # None where F is one part

    def run(self):
        parts = pl.cdiv(self.num_hidden, self.tiles.hidden)
        if parts > 1:
            pl.when(self.part == 0)(functools.partial(self._for_each_step, self._begin))
        unused = -self.num_hidden % self.tiles.hidden
        if unused:  # the last block's rest was not copied: what is there must not reach the sums

            @pl.when(self.part == parts - 1)
            def _():
                tail = pl.ds(self.tiles.hidden - unused, unused)
                self.weights.wo[tail] = jnp.zeros((unused, self.weights.wo.shape[1]), self.weights.wo.dtype)

        self._for_each_chunk()
        if parts > 1:
            pl.when(self.part == parts - 1)(functools.partial(self._for_each_step, self._finish))

    def _for_each_chunk(self):
        """Compute the tile's rows in the largest chunks, and the rest in the smallest chunk that holds it."""
        largest, *smaller = self.tiles.chunks
        rest = lax.rem(self.tile.end, largest)
        one_more = rest > max(smaller, default=0)
        whole = self.tile.end // largest + one_more.astype(jnp.int32)

        def one(i, _):
            self._chunk(pl.multiple_of(i * largest, largest), largest)

        lax.fori_loop(0, whole, one, None)
        for size, fewer in zip(smaller, [*smaller[1:], 0]):
            position = pl.multiple_of(whole * largest, largest)
            pl.when((rest > fewer) & (rest <= size))(functools.partial(self._chunk, position, size))

    def _chunk(self, position, size):
        """Compute up, activation and down of some rows, for this part of F."""
        weights, biases = self.weights, self.weights.biases
        x = self.slots[self.tile.slot, pl.ds(position, size)]
        gate = self._dot(x, weights.wi_0[...], 1)
        up = None if weights.wi_1 is None else self._dot(x, weights.wi_1[...], 1)
        if biases is not None:
            gate = gate + biases.wi_0[...].astype(jnp.float32)
            up = None if up is None else up + biases.wi_1[...].astype(jnp.float32)
        hidden = IN_KERNEL[self.activation](gate, up).astype(x.dtype)
        if self.num_hidden % self.tiles.hidden:
            column = lax.broadcasted_iota(jnp.int32, (1, self.tiles.hidden), 1)
            hidden = jnp.where(column < self.num_hidden - self.part * self.tiles.hidden, hidden, 0)
        for columns in self._columns():
            down = self._dot(hidden, weights.wo[:, columns], 0)
            if self.sums is None:
                self._store(position, size, columns, down if biases is None else down + self._bias(columns))
            else:
                self.sums[pl.ds(position, size), columns] += down

    def _begin(self, position, size):
        # A select in the chunk instead costs the down projection a fifth of its speed, in spilled registers.
        for columns in self._columns():
            start = jnp.zeros((1, 1), jnp.float32) if self.weights.biases is None else self._bias(columns)
            here = pl.ds(position, size), columns
            self.sums[here] = jnp.broadcast_to(start, (size, columns.stop - columns.start))

    def _finish(self, position, size):
        for columns in self._columns():
            self._store(position, size, columns, self.sums[pl.ds(position, size), columns])

    def _store(self, position, size, columns, values):
        """Store the result in the place of the rows that it was made from."""
        row = position + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        keep = (row >= self.tile.begin) & (row < self.tile.end)
        self.slots[self.tile.slot, pl.ds(position, size), columns] = jnp.where(keep, values, 0).astype(self.slots.dtype)

    def _for_each_step(self, act):
        step = _step(self.tiles)
        lax.fori_loop(0, pl.cdiv(self.tile.end, step), lambda i, _: act(pl.multiple_of(i * step, step), step), None)

    def _columns(self):
        width = self.slots.shape[2]
        for first in range(0, width, self.tiles.width):
            yield slice(first, min(first + self.tiles.width, width))

    def _bias(self, columns):
        return self.weights.biases.wo[:, columns].astype(jnp.float32)

    def _dot(self, lhs, rhs, contracted):
        return lax.dot_general(
            lhs,
            rhs,
            (((1,), (contracted,)), ((), ())),
            precision=matmul_precision(lhs.dtype),
            preferred_element_type=jnp.float32,
        )
