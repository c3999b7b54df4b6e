"""What the SparseCore kernels share before anything is traced: the chips' SparseCores, and rows as 32-bit words.

A SparseCore moves 32-bit words. A row of bfloat16 becomes words that hold two of its columns, one far from the other:
of a piece of a row, the first half of the columns in the low halves, the second in the high ones. Vectors of words then
are vectors of neighbouring columns, twice, and the TensorCore packs and nobody has to interleave lanes.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.placement import placement_why_not
from raggedmoe.kernels.proof import COMPILED_KERNEL, Proof
from raggedmoe.kernels.registry import BACKWARD, Call, Implementation

MOST_LANES = 16  # of a vector, on any chip
SUBCORES = 16  # vector subcores of a SparseCore, on every chip so far
TILE_ROWS = 8  # rows of an HBM tile, float32 or bfloat16: what a subcore writes at a time
LINE = 128  # columns of an HBM tile

# Words of a subcore's own memory. JAX's tpu_info says 512, 256 and 512 KiB; on the v6e the compiler refuses a program
# from 65,536 words on ("legitimate user allocatable offset upper bound (1048575 words)", for 16 subcores).
MEMORY_WORDS = {"v5p": 131_072, "v6e": 65_536, "tpu7x": 131_072}
RESERVED_WORDS = 3_072  # indices, weights and bounds

PROOFS: tuple[Proof, ...] = tuple(
    replace(
        proof,
        chips=tuple(MEMORY_WORDS),
        shown_by="make test runs its programs on a NumPy executor, and make test-tpu compiles it for the chip",
    )
    for proof in COMPILED_KERNEL
)

MOST_PADDING = 0.05  # of a row's words, where its rest is not halved


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Words ``[first, last)`` of a chunk: w has column ``low + w`` in its low half, ``high + w`` in its high one."""

    first: int
    last: int
    low: int | None  # None: zeros
    high: int


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The cut of a row into chunks, and of each chunk into words."""

    width: int  # D
    packing: int  # columns in a word
    chunks: int  # pieces of a row that are moved one after the other, as few as fit a subcore's memory
    columns: int  # of a chunk
    halved_rest: bool = (
        True  # what is left of the whole lines that can be halved is halved as well, or all in high halves
    )

    @property
    def words(self) -> int:
        """Words of a chunk."""
        return self.columns if self.packing == 1 else self.pieces[1].last

    @property
    def pieces(self) -> tuple[Piece, Piece]:
        """The two pieces of a row that has two columns in a word: as many whole lines as can be halved, and the rest.

        Where the high half does not begin at a whole line, the address of every store is computed anew: 14 cycles
        instead of 8 for eight stores, at a width of 2880 on the v6e.
        """
        half = self.columns // 2
        lines = half // LINE * LINE
        whole = Piece(first=0, last=lines, low=0, high=lines)
        if self.halved_rest:
            return whole, Piece(first=lines, last=half, low=lines, high=half)
        return whole, Piece(first=lines, last=self.columns - lines, low=None, high=lines)

    @property
    def row_words(self) -> int:
        return self.chunks * self.words

    @property
    def row_bytes(self) -> int:
        return 4 * self.row_words

    @property
    def pitch(self) -> int:
        """Words from one row to the next in a subcore's memory: a power of two, so that one address serves all rows.

        With whole lines instead, a width of 2880 takes 14 cycles for eight stores on the v6e; with this, eight.
        """
        return max(LINE, 1 << (self.words - 1).bit_length())

    @property
    def padded_width(self) -> int:
        return self.chunks * self.columns

    @property
    def tile_rows(self) -> int:
        """Rows of words in an HBM tile: bfloat16 rows lie there in pairs."""
        return TILE_ROWS // self.packing


def row_layout(
    width: int, dtype: Any, hardware: Hardware, memory: Callable[[RowLayout], int], *, halve_rest: bool = False
) -> RowLayout:
    """Choose the layout with the fewest chunks for a kernel whose buffers are of so many words, ``memory``.

    A rest that is not halved is made words of faster (a width of 2880 on a v6e: 387 MB moved for the table of 32,768
    rows, not 473), one that is halved is read faster (197 cycles a row, not 209).
    """
    packing = 4 // jnp.dtype(dtype).itemsize
    for chunks in itertools.count(1):
        unit = MOST_LANES * packing if chunks == 1 else LINE
        columns = -(-width // (chunks * unit)) * unit
        layout = RowLayout(width=width, packing=packing, chunks=chunks, columns=columns, halved_rest=False)
        if halve_rest or packing * layout.words > (1 + MOST_PADDING) * columns:
            layout = replace(layout, halved_rest=True)
        if memory(layout) + RESERVED_WORDS <= MEMORY_WORDS[hardware.name] or columns == LINE:
            return layout
    raise AssertionError("itertools.count ends")


def num_subcores(hardware: Hardware) -> int:
    """Count the vector subcores that one JAX device has."""
    return hardware.sparse_cores // hardware.devices_per_chip * SUBCORES


def why_not(call: Call, hardware: Hardware, rows: str) -> str | None:
    """Say why a SparseCore kernel cannot run; ``rows`` is the name of the array whose rows are moved."""
    if hardware.platform != "tpu":
        return f"a kernel for the SparseCores of TPUs, not for {hardware.platform}"
    if hardware.name not in MEMORY_WORDS:
        return f"no SparseCore of {hardware.name} is known; xla gathers on the TensorCore"
    array, indices = call.arrays[rows], call.arrays["indices"]
    if array.dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32 {rows}, got {array.dtype}"
    if any(struct.dtype == jnp.float64 for struct in call.arrays.values()):
        return "its arithmetic is 32-bit, got float64 weights"
    most_rows = max(array.shape[0], math.prod(indices.shape)) + TILE_ROWS
    most_words = most_rows * (array.shape[1] * array.dtype.itemsize // 4 + LINE)
    if most_words >= 2**31:
        return f"a table of {most_words} words is beyond 32-bit addresses; divide the rows over more devices"
    return placement_why_not(call)


def gather_implementation(
    operation: str,
    rows: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    note: Callable[[Call], str],
) -> Implementation:
    """Declare the SparseCore implementation of an operation that gathers; ``rows`` is as in `why_not`.

    ``note`` is the cost caveat that `explain` shows for a call whose gradient is not XLA's.
    """
    return Implementation(
        operation=operation,
        name="sparsecore",
        forward=forward,
        backward=backward,
        rank={"tpu": 10},
        proofs=PROOFS,
        why_not=functools.partial(why_not, rows=rows),
        note=functools.partial(_note, of_kernel=note),
        takes_hardware=True,
    )


def _note(call: Call, hardware: Hardware, of_kernel: Callable[[Call], str]) -> str:
    if call.direction == BACKWARD and "inverse" not in call.arrays:
        return "no inverse given: the gradient is XLA's scatter-add"
    return of_kernel(call)
