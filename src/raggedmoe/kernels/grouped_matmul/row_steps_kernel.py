"""Ragged rows cut into steps: what the TensorCore kernels of `grouped_matmul` share.

A *step* is a run of consecutive rows of one group that starts at a whole block of packed rows; or, where the kernel
wants that, a pair: twice ``rows``, each half of one group. Scalar code lists the steps in SMEM, some 65 cycles each.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from raggedmoe.kernels.grouped_matmul.tiles import RowSteps

SLOTS = 2  # steps whose rows are in VMEM
NO_ROW = -(2**30)


class Steps(NamedTuple):
    """The list of steps, in SMEM."""

    row: Any  # its first, a multiple of the packed block
    read: Any  # rows to read: up to the end of the group's last block. More than cut.rows: it is a pair
    write: Any  # rows that are complete: up to the block that the group shares with the next
    front: Any  # rows of earlier groups in its first block
    turn: Any  # its group's place among those that have rows
    last_turn: Any  # that of a pair's second half
    group: Any  # by turn


def list_in_smem(num_rows: int, num_groups: int, cut: RowSteps) -> list:
    """Describe the SMEM buffers that hold the list, in the order of the fields of `Steps`."""
    most = num_rows // (cut.rows // 2) + num_groups + SLOTS + 2
    return [*[pltpu.SMEM((most,), jnp.int32)] * 6, pltpu.SMEM((num_groups + 1,), jnp.int32)]


def list_steps(bounds, steps: Steps, cut: RowSteps):
    """Fill the list, and return where it ends and the number of groups that have rows.

    The list begins with ``SLOTS`` steps that write nothing, and ends with one that reads a block of rows and is never
    computed: so every step can wait for an earlier one and start a later one without asking whether there is one.
    """
    num_groups, rows, packed = steps.group.shape[0] - 1, cut.rows, cut.packed

    def add_step(start, end, turn, state):
        row, step, full_row, full_front, full_turn = state  # the last three: of the step before, if it is full
        size = step_size(end - row, cut)
        read = jnp.minimum(size, round_up(end, packed) - row)
        write = jnp.minimum(size, round_down(end, packed) - row)
        front = jnp.maximum(start - row, 0)
        second = (full_row + rows == row) & (size == rows)  # of a pair
        ahead, at = jnp.where(second, rows, 0), step - jnp.where(second, 1, 0)
        first_front, first_turn = jnp.where(second, full_front, front), jnp.where(second, full_turn, turn)
        steps.row[at], steps.read[at], steps.write[at] = row - ahead, read + ahead, write + ahead
        steps.front[at], steps.turn[at], steps.last_turn[at] = first_front, first_turn, turn
        can_pair = cut.paired & (write == rows) & ~second
        return row + size, at + 1, jnp.where(can_pair, row, NO_ROW), front, turn

    def add_group(group, state):
        start, turn, *before = state
        end = bounds[group + 1]
        add = functools.partial(add_step, start, end, turn)
        # The first without a branch: an empty group's is listed and forgotten.
        row, *after = add((round_down(start, packed), *before))
        some = end > start
        before = [jnp.where(some, new, old) for new, old in zip(after, before)]
        first = jnp.where(some, row, end)
        _, *before = lax.while_loop(lambda state: state[0] < end, add, (first, *before))
        steps.group[turn] = group
        return end, turn + jnp.where(some, 1, 0), *before

    for step in range(SLOTS):
        steps.write[step] = 0
    zero = jnp.int32(0)
    state = (bounds[0], zero, jnp.int32(SLOTS), jnp.int32(NO_ROW), zero, zero)
    _, num_turns, end_step, *_ = lax.fori_loop(0, num_groups, add_group, state, unroll=2)
    steps.row[end_step], steps.read[end_step], steps.turn[end_step] = 0, packed, num_turns
    return end_step, num_turns


def step_size(rest, cut: RowSteps):
    """Choose the size of the next step of a group with that many rows left.

    Between one and one and a half full steps are halved: pushing a matrix into the MXU takes as long as 128 rows of
    work, so that two halves are cheaper than a full step and a small one.
    """
    rows, step = cut.rows, cut.step
    half = round_up(rest, 2 * step) // 2
    return jnp.where(rest <= rows, round_up(rest, step), jnp.where(rest < rows + rows // 2, half, rows))


def size_number(read, cut: RowSteps):
    """Find which of the sizes holds that many rows: less than one for the smallest, the number of sizes for a pair."""
    shift = cut.step.bit_length() - 1  # a power of two: a division would be ten scalar operations
    number = (read - cut.sizes[0] + cut.step - 1) >> shift
    return number + sum(jnp.where(read > size, 1, 0) for size in cut.half_steps)


def one_of(number, cases):
    """Switch as ``lax.switch`` does, but by halving: 4 levels for 16 cases, where Mosaic asks one by one."""
    if len(cases) == 1:
        cases[0]()
        return
    middle = len(cases) // 2
    lax.cond(
        number < middle,
        lambda: one_of(number, cases[:middle]),
        lambda: one_of(number - middle, cases[middle:]),
    )


def column_pieces(length: int, longest: int) -> list[slice]:
    """Cut columns into whole pieces and what remains: every one starts at a multiple of the lanes."""
    return [slice(first, min(first + longest, length)) for first in range(0, length, longest)]


def row_pieces(length: int, longest: int, packed: int) -> list[slice]:
    """Cut rows into nearly equal pieces of whole packed blocks: a short one would cost as much as one of 128 rows."""
    number = max(1, length // longest)
    bounds = [round_up(length * place // number, packed) for place in range(number)] + [length]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def round_down(value, multiple: int):
    """Round down to a multiple that is a power of two."""
    return value & -multiple


def round_up(value, multiple: int):
    return (value + multiple - 1) & -multiple
