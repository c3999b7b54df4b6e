"""A NumPy machine that runs SparseCore programs: the methods of `VectorSubcore`, one subcore after the other.

It is as unkind as the hardware may be. Memory begins as garbage. What a stream brings is garbage until it is waited
for, and what it takes away is read only when it is waited for; meanwhile nobody may touch it. Vectors whose order is
free are visited backwards. Every access is checked against its buffer, every tile is to be written once, and a program
that leaves a stream unfinished is wrong.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.sparsecore import MEMORY_WORDS, TILE_ROWS, RowLayout, num_subcores
from raggedmoe.kernels.sparsecore_kernel import WORD_ALIGNMENT, Scratch

SCALAR_WORDS = 2_048


class ProgramError(AssertionError):
    """A program did what the hardware does not forgive."""


def _require(condition: bool, *said: Any) -> None:
    if not condition:
        raise ProgramError(*said)


@dataclass(frozen=True)
class Memory:
    """A buffer, or, as `.at[i]`, one of the buffers in it."""

    array: np.ndarray

    @property
    def at(self) -> "Memory":
        return self

    def __getitem__(self, index: int) -> "Memory":
        _require(0 <= index < self.array.shape[0], "no such buffer", index, self.array.shape)
        return Memory(self.array[index])


@dataclass
class Semaphores:
    """For each slot, the streams that were started and not waited for: what to do, its words, what it touches."""

    waiting: list[list[tuple[Any, int, np.ndarray]]]


@dataclass
class Result:
    """The result in HBM, as words, and how often each chunk of each tile was written."""

    words: np.ndarray
    written: np.ndarray


@dataclass
class NumpySubcore:
    """The methods of `VectorSubcore`."""

    number: int
    count: int
    lanes: int
    arriving: list[np.ndarray] = field(default_factory=list)
    leaving: list[np.ndarray] = field(default_factory=list)
    finished: bool = False

    def _vector(self, memory: Memory, at: tuple[int, ...]) -> np.ndarray:
        array = memory.array
        _require(len(at) == array.ndim, "indices for", array.shape, "got", at)
        for index, size in zip(at[:-1], array.shape):
            _require(0 <= index < size, "out of bounds", at, array.shape)
        _require(0 <= at[-1] <= array.shape[-1] - self.lanes, "out of bounds", at, array.shape)
        return array[at[:-1]][at[-1] : at[-1] + self.lanes]

    def load(self, memory, *at):
        vector = self._vector(memory, at)
        _require(not _overlaps(vector, self.arriving), "read before it arrived", at)
        return vector.copy()

    def store(self, memory, value, *at):
        vector = self._vector(memory, at)
        _require(not _overlaps(vector, self.arriving + self.leaving), "written while a stream uses it", at)
        _require(value.dtype == vector.dtype and value.shape == vector.shape, "stored", value.dtype, value.shape)
        vector[:] = value

    def get(self, memory, at):
        _require(0 <= at < memory.array.size, "out of bounds", at, memory.array.shape)
        return _scalar(memory.array[at])

    def put(self, memory, value, at):
        _require(0 <= at < memory.array.size, "out of bounds", at, memory.array.shape)
        # As 32-bit integers do, one that is too large wraps.
        memory.array[at] = np.int64(value).astype(np.int32) if memory.array.dtype == np.int32 else value

    def lane_of(self, vector, lane):
        return _scalar(vector[lane])

    def lane_numbers(self):
        return np.arange(self.lanes, dtype=np.int32)

    def full(self, value, dtype):
        return np.full(self.lanes, value, dtype)

    def where(self, condition, true, false):
        if isinstance(condition, np.ndarray):
            _require(true.dtype == false.dtype, "types of where", true.dtype, false.dtype)
            return np.where(condition, true, false)
        return true if condition else false

    def minimum(self, first, second):
        return min(first, second)

    def maximum(self, first, second):
        return max(first, second)

    def as_float(self, words):
        return words.view(np.float32)

    def as_words(self, floats):
        return floats.view(np.uint32)

    def round_pairs(self, low, high):
        halves = [np.asarray(half).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for half in (low, high)]
        return halves[0] | (halves[1] << 16)

    def when(self, condition, action):
        if condition:
            action()

    def loop(self, first, last, body):
        for i in range(first, last):
            body(i)

    def fold(self, first, last, body, initial):
        for i in range(first, last):
            initial = body(i, initial)
        return initial

    def for_each_vector(self, first, last, body, *, unrolled=False):
        _require((last - first) % self.lanes == 0, "not whole vectors", first, last)
        for at in reversed(range(first, last, self.lanes)):
            body(at)

    def fold_vectors(self, first, last, body, initial):
        _require((last - first) % self.lanes == 0, "not whole vectors", first, last)
        for at in range(first, last, self.lanes):
            initial = body(at, initial)
        return initial

    def read(self, source, at, num_words, buffer):
        buffer.array[:num_words] = _stream(source, at, num_words)

    def start_fetch(self, table, at, num_words, buffer, to, semaphores, slot):
        words = _stream(table, at, num_words)
        target = _stream(buffer, to, num_words)
        _require(not _overlaps(target, self.arriving), "two streams to one place", to)
        target[:] = _garbage(target.shape, target.dtype)
        self.arriving.append(target)
        semaphores.waiting[slot].append((lambda: np.copyto(target, words), num_words, target))

    def wait_fetched(self, table, num_words, buffer, semaphores, slot):
        asked_for = sum(words for _, words, _ in semaphores.waiting[slot])
        _require(asked_for == num_words, "waits for", num_words, "of", asked_for, "words")
        for arrive, _, target in semaphores.waiting[slot]:
            arrive()
            _forget(target, self.arriving)
        semaphores.waiting[slot].clear()

    def start_push(self, tile, out, number, chunk, layout, semaphores, slot):
        place = _place(out, number, chunk, layout)
        _require(tile.array.shape == place.shape, "a tile of", tile.array.shape, "for", place.shape)
        out.written[number, chunk] += 1
        self.leaving.append(tile.array)
        semaphores.waiting[slot].append((lambda: np.copyto(place, tile.array), place.size, tile.array))

    def wait_pushed(self, tile, out, layout, semaphores, slot):
        _require(bool(semaphores.waiting[slot]), "waits for ever: nothing was pushed in slot", slot)
        leave, num_words, source = semaphores.waiting[slot].pop()
        _require(num_words == tile.array.size, "waits for", tile.array.size, "of", num_words, "words")
        leave()
        _forget(source, self.leaving)

    def finish_pushes(self, tile, out, layout, semaphores):
        self.finished = True


def _scalar(value):
    return int(value) if np.issubdtype(value.dtype, np.integer) else value


def _overlaps(array, others) -> bool:
    return any(np.may_share_memory(array, other) for other in others)


def _forget(array, others) -> None:
    others[:] = [other for other in others if other is not array]


def _stream(memory: Memory, at: int, num_words: int) -> np.ndarray:
    array = memory.array
    _require(array.ndim == 1 and at % WORD_ALIGNMENT == 0, "a stream of", array.shape, "at", at)
    _require(0 <= at <= array.size - num_words, "out of bounds", at, num_words, array.size)
    return array[at : at + num_words]


def _place(out: Result, number: int, chunk: int, layout: RowLayout) -> np.ndarray:
    num_tiles, chunks = out.written.shape
    _require(0 <= number < num_tiles and 0 <= chunk < chunks, "no such tile", number, chunk, out.written.shape)
    columns = slice(chunk * layout.columns, (chunk + 1) * layout.columns)
    return out.words[number * layout.tile_rows : (number + 1) * layout.tile_rows, columns]


def _garbage(shape, dtype) -> np.ndarray:
    """Words that are NaN as float32 and as two bfloat16; as an index they are out of every bound."""
    return np.full(shape, 0x7FC17FC1, np.uint32).view(dtype)


def execute(
    program, operands, *, hardware: Hardware, num_tiles: int, layout: RowLayout, scratch, count: int
) -> np.ndarray:
    """The words of the result after each of so many subcores has run the program."""
    check_memory(scratch, hardware)
    out = Result(
        _garbage((num_tiles * layout.tile_rows, layout.padded_width), np.uint32),
        np.zeros((num_tiles, layout.chunks), int),
    )
    for number in reversed(range(count)):
        subcore = NumpySubcore(number=number, count=count, lanes=hardware.sparse_core_lanes)
        buffers = [_allocated(buffer) for buffer in scratch]
        program(subcore, *[Memory(operand) for operand in operands], out, *buffers)
        unfinished = [s for buffer in buffers if isinstance(buffer, Semaphores) for s in buffer.waiting if s]
        _require(subcore.finished and not unfinished, "ends before its streams")
    _require((out.written == 1).all(), "tiles not written once", np.argwhere(out.written != 1))
    return out.words


def _allocated(buffer: Scratch) -> Memory | Semaphores:
    if buffer.kind == "semaphores":
        return Semaphores([[] for _ in range(*buffer.shape)])
    return Memory(_garbage(buffer.shape, np.dtype(buffer.dtype)))


def check_memory(scratch: tuple[Scratch, ...], hardware: Hardware) -> None:
    """Require buffers that a subcore can hold."""
    used = {kind: sum(int(np.prod(s.shape)) for s in scratch if s.kind == kind) for kind in ("vector", "scalar")}
    _require(used["vector"] < MEMORY_WORDS[hardware.name], "a subcore's memory", used)
    _require(used["scalar"] < SCALAR_WORDS, "a subcore's scalars", used)


def run_on_subcores(program, *, name, hardware, operands, num_tiles, layout, dtype, scratch, count=None, **cost):
    """Execute the call here, in the place of `sparsecore_kernel`'s function, by the chip's number of subcores."""
    dtype = jnp.dtype(dtype)

    def run(*arrays):
        words = execute(
            program,
            [np.asarray(array) for array in arrays],
            hardware=hardware,
            num_tiles=num_tiles,
            layout=layout,
            scratch=scratch,
            count=count or num_subcores(hardware),
        )
        if layout.packing == 1:
            return words.view(dtype)
        halves = np.stack([words & 0xFFFF, words >> 16], axis=1).astype(np.uint16)
        return halves.reshape(num_tiles * TILE_ROWS, layout.padded_width).view(dtype)

    out = jax.ShapeDtypeStruct((num_tiles * TILE_ROWS, layout.padded_width), dtype)
    return jax.pure_callback(run, out, *operands)
