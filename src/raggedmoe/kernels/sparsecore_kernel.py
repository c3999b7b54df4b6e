"""The few things that a SparseCore program does, on a real vector subcore, and how a program is launched.

Programs are written over `VectorSubcore` alone, so that the tests' NumPy executor, which has the same methods, runs the
very same code: no interpreter runs SparseCore programs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from raggedmoe import compat
from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import pvary_like
from raggedmoe.kernels.sparsecore import SUBCORES, TILE_ROWS, RowLayout, num_subcores

LOW_HALF, HIGH_HALF = np.uint32(0x0000FFFF), np.uint32(0xFFFF0000)
WORD_ALIGNMENT = 8  # words at whose multiples a stream may begin


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """A subcore's own buffer: of vectors, of scalars, or of semaphores."""

    kind: str  # "vector", "scalar" or "semaphores"
    shape: tuple[int, ...]
    dtype: Any = None


@dataclass(frozen=True, kw_only=True)
class VectorSubcore:
    """The subcore that a program is given: who it is, memory, streams, loops, and arithmetic that has no operator."""

    number: Any  # among all
    count: int
    lanes: int

    def load(self, buffer, *at):
        """Load a vector from a buffer; the last index says where it begins in the last dimension."""
        return buffer[(*at[:-1], pl.ds(at[-1], self.lanes))]

    def store(self, buffer, vector, *at):
        buffer[(*at[:-1], pl.ds(at[-1], self.lanes))] = vector

    def get(self, scalars, at):
        return scalars[at]

    def put(self, scalars, value, at):
        scalars[at] = value

    def lane_of(self, vector, lane):
        """Return one lane of a vector as a scalar."""
        return vector[lane]

    def lane_numbers(self):
        return lax.iota(jnp.int32, self.lanes)

    def full(self, value, dtype):
        return jnp.full((self.lanes,), value, dtype)

    def where(self, condition, true, false):
        return jnp.where(condition, true, false)

    def minimum(self, first, second):
        return jnp.minimum(first, second)

    def maximum(self, first, second):
        return jnp.maximum(first, second)

    def as_float(self, words):
        """Read the bits of words as float32."""
        return compat.vector_bitcast(words, jnp.float32)

    def as_words(self, floats):
        return compat.vector_bitcast(floats, jnp.uint32)

    def round_pairs(self, low, high):
        """Round two float32 vectors to bfloat16, to nearest even, each in its half of one vector of words."""
        return compat.vector_bitcast(plsc.pack(low, high, format=plsc.PackFormat.INTERLEAVED), jnp.uint32)

    def when(self, condition, action: Callable[[], None]) -> None:
        pl.when(condition)(action)

    def loop(self, first, last, body: Callable[[Any], None]) -> None:
        """Run a body for each number in ``[first, last)``, one after the other."""
        lax.fori_loop(first, last, lambda i, _: body(i), None)

    def fold(self, first, last, body: Callable[[Any, Any], Any], initial):
        """Run a body for each number in ``[first, last)`` in turn, each with the scalar that the last one returned."""
        return lax.fori_loop(first, last, body, initial)

    def for_each_vector(self, first: int, last: int, body: Callable[[Any], None], *, unrolled: bool = False) -> None:
        """Run a body for the beginning of each vector in ``[first, last)``, in any order: the compiler overlaps them.

        ``unrolled``: as straight code, which has no first and last turns to fill and to drain.
        """
        if first < last:
            turns = (last - first) // self.lanes
            plsc.parallel_loop(first, last, step=self.lanes, unroll=turns if unrolled else 1)(body)

    def fold_vectors(self, first: int, last: int, body: Callable[[Any, Any], Any], initial):
        """Run a body as `for_each_vector` does, but in order, each with the vectors that the last one returned."""
        return plsc.parallel_loop(first, last, step=self.lanes, carry=initial)(body)

    def read(self, source, at, num_words: int, buffer) -> None:
        """Stream words in, and wait for them."""
        pltpu.sync_copy(source.at[pl.ds(pl.multiple_of(at, WORD_ALIGNMENT), num_words)], buffer.at[pl.ds(0, num_words)])

    def start_fetch(self, table, at, num_words: int, buffer, to, semaphore, slot) -> None:
        """Start to stream words of a table in."""
        source = table.at[pl.ds(pl.multiple_of(at, WORD_ALIGNMENT), num_words)]
        target = buffer.at[pl.ds(pl.multiple_of(to, WORD_ALIGNMENT), num_words)]
        pltpu.make_async_copy(source, target, semaphore.at[slot]).start()

    def wait_fetched(self, table, num_words: int, buffer, semaphore, slot) -> None:
        """Wait until so many words, all that were asked for with a slot's semaphore, are there."""
        whole = pl.ds(0, num_words)
        pltpu.make_async_copy(table.at[whole], buffer.at[whole], semaphore.at[slot]).wait()

    def start_push(self, tile, out, number, chunk, layout: RowLayout, semaphore, slot) -> None:
        """Start to stream a finished tile out to its place."""
        compat.push_stream(tile, _place(out, number, chunk, layout), semaphore.at[slot]).start()

    def wait_pushed(self, tile, out, layout: RowLayout, semaphore, slot) -> None:
        """Wait until the tile that was pushed with a slot's semaphore may be overwritten."""
        compat.push_stream(tile, _place(out, 0, 0, layout), semaphore.at[slot]).wait_read()

    def finish_pushes(self, tile, out, layout: RowLayout, semaphore) -> None:
        """Wait until every tile that was pushed, and waited for, has arrived: the last thing that a program does."""
        compat.push_stream(tile, _place(out, 0, 0, layout), semaphore.at[0]).wait_all_arrived()


def _place(out, number, chunk, layout: RowLayout):
    """Return the words of one tile in the result: of bfloat16, those of a pair of rows are one row of words."""
    rows = pl.ds(pl.multiple_of(number * layout.tile_rows, layout.tile_rows), layout.tile_rows)
    words = out if out.dtype == jnp.uint32 else out.bitcast(jnp.uint32)
    if layout.chunks == 1:
        return words.at[rows]
    return words.at[rows, pl.ds(pl.multiple_of(chunk * layout.columns, layout.columns), layout.columns)]


def run_on_subcores(
    program: Callable[..., None],
    *,
    name: str,
    hardware: Hardware,
    operands: tuple[jax.Array, ...],
    num_tiles: int,
    layout: RowLayout,
    dtype: Any,
    scratch: tuple[Scratch, ...],
    flops: int,
    bytes_read: int,
) -> jax.Array:
    """Run ``program(subcore, *operands, out, *scratch)`` on every subcore; the result has whole tiles of rows.

    ``flops`` and ``bytes_read``: of a call whose rows are all valid, for XLA's own count of what a program costs.
    """
    operands = tuple(pvary_like(operand, *operands) for operand in operands)
    mesh = plsc.VectorSubcoreMesh(
        core_axis_name="core",
        subcore_axis_name="subcore",
        num_cores=num_subcores(hardware) // SUBCORES,
        num_subcores=SUBCORES,
    )

    def body(*refs):
        number = lax.axis_index("core") * SUBCORES + lax.axis_index("subcore")
        program(VectorSubcore(number=number, count=mesh.size, lanes=hardware.sparse_core_lanes), *refs)

    out = jax.ShapeDtypeStruct(
        (num_tiles * TILE_ROWS, layout.padded_width),
        dtype,
        manual_axis_type=jax.typeof(operands[0]).manual_axis_type,
    )
    return pl.kernel(
        body,
        out_type=out,
        mesh=mesh,
        scratch_types=[_scratch_type(buffer) for buffer in scratch],
        compiler_params=pltpu.CompilerParams(
            use_tc_tiling_on_sc=True,  # the result lies in HBM as every TensorCore program wants it
            needs_layout_passes=False,  # vectors are exactly as long as the lanes
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, bytes_accessed=bytes_read + out.size * out.dtype.itemsize, transcendentals=0
        ),
        name=name,
    )(*operands)


def _scratch_type(buffer: Scratch):
    if buffer.kind == "semaphores":
        return pltpu.SemaphoreType.DMA(buffer.shape)
    return (pltpu.VMEM if buffer.kind == "vector" else pltpu.SMEM)(buffer.shape, buffer.dtype)


def word_table(rows: jax.Array, layout: RowLayout) -> jax.Array:
    """Write rows as words, one after the other in one dimension, which HBM keeps without tiles; then rows of zeros.

    An index that points nowhere is made to point to the first of those. XLA makes the table in two passes, of which
    each reads and writes the rows once: one packs, one undoes the tiles.
    """
    spare_rows, spare_columns = _table_rows(rows.shape[0]) - rows.shape[0], layout.padded_width - layout.width
    rows = jnp.pad(rows, ((0, spare_rows), (0, spare_columns)))
    if layout.packing == 1:
        return lax.bitcast_convert_type(rows, jnp.uint32).reshape(-1)
    lines, rest = layout.pieces
    in_lines = jnp.arange(layout.words) < lines.last

    # The columns are cut before they are widened, and chosen, not joined: XLA then packs in one fusion, and writes no
    # 32-bit copy of the rows.
    def half(first, of_lines, of_rest):
        if of_rest is None:
            whole = rows[:, first + of_lines : first + of_lines + lines.last]
            return jnp.pad(whole, ((0, 0), (0, rest.last - rest.first)))
        at_lines, at_rest = (rows[:, first + at : first + at + layout.words] for at in (of_lines, of_rest))
        return at_lines if of_lines == of_rest else jnp.where(in_lines, at_lines, at_rest)

    def pack(first):
        return _widen(half(first, lines.low, rest.low)) | (_widen(half(first, lines.high, rest.high)) << 16)

    chunks = [pack(first) for first in range(0, layout.padded_width, layout.columns)]
    return jnp.concatenate(chunks, axis=1).reshape(-1)


def _widen(halves: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(halves, jnp.uint16).astype(jnp.uint32)


def _table_rows(num_rows: int) -> int:
    """Count a table's rows: a row of zeros at least, in whole tiles, and no fewer than one wait counts."""
    return (num_rows // TILE_ROWS + 1) * TILE_ROWS


def clamp_bounds(start: jax.Array, end: jax.Array, num_rows: int) -> jax.Array:
    """Clamp ``start <= end`` to the rows, in the first two of as many words as a vector may have."""
    start = jnp.clip(start, 0, num_rows)
    return jnp.zeros(16, jnp.int32).at[:2].set(jnp.stack([start, jnp.clip(end, start, num_rows)]))


def read_bounds(subcore: Any, bounds: Any, buffer: Any) -> tuple[Any, Any]:
    """Read the ``start`` and ``end`` that `clamp_bounds` wrote, by way of a buffer of one vector."""
    subcore.read(bounds, 0, 16, buffer)
    vector = subcore.load(buffer, 0)
    return subcore.lane_of(vector, 0), subcore.lane_of(vector, 1)
