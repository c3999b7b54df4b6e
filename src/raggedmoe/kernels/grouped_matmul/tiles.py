"""Tile sizes of the TensorCore kernels of `grouped_matmul`: the rule, and the table that the tuner made.

The rule keeps three things in bounds, all known before tracing: VMEM on the target chip; the straight code, whose
length is its MXU cycles (a compile of 60k bundles takes some 20 s); and the rows that are computed for nothing.
`TUNED` overrides it, shape by shape. Its key has the chip, the type and the shape's bucket, so that no chip is ever
given another's tiles; ``raggedmoe tune`` prints its lines.
"""

from dataclasses import dataclass

from raggedmoe.hardware import MIB, Hardware

LANES = 128
VMEM_SHARE = 0.85  # of the core's VMEM; the rest is the compiler's
LEAST_INNER = 512  # of a contraction that is done in parts: two depths of the MXU
LONGEST_CODE = 9_000  # MXU cycles of one piece of straight code
ALL_CODE = 75_000  # and of all sizes together
# The bytes of a value in memory, and how long the MXU takes for what it multiplies, in passes of bfloat16.
WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "mxfp4": 0.5}
PASSES = {"float32": 6, "bfloat16": 1, "int8": 0.5, "float8_e4m3fn": 0.5, "float8_e5m2": 0.5}


@dataclass(frozen=True, kw_only=True)
class RowSteps:
    """The steps into which ragged rows are cut."""

    rows: int  # of a full step
    step: int  # smaller ones come in whole multiples of this
    smallest: int  # fewer rows cost the MXU as much
    packed: int  # rows that share a block of memory
    paired: bool = False  # two full steps as one

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes for which there is straight code: full ones, whole steps less down to about the smallest, and
        half steps in between."""
        fewest = self.rows - max(self.rows - self.smallest, 0) // self.step * self.step
        return tuple(sorted((*range(fewest, self.rows + 1, self.step), *self.half_steps)))

    @property
    def half_steps(self) -> tuple[int, ...]:
        """Two sizes just above half of a full step, where most are: what is left of a large group is cut in halves of
        that (`row_steps_kernel.step_size`). With them 512 rows in steps of 32, and the pair, are 16 cases."""
        half, fine = self.rows // 2, self.step // 2
        return (half + fine, half + 3 * fine) if self.packed <= fine and self.smallest + self.step <= half else ()


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles into which `grouped_matmul` cuts its work."""

    cut: RowSteps
    out: int  # columns of a matrix at a time; divides O
    inner: int  # of the contraction in one piece of straight code; divides I
    piece_rows: int  # of one matmul
    piece_columns: int = 256
    matrix_slots: int  # matrices in VMEM: 2 or 4
    copies_first: bool = False  # start copies before straight code, not behind its first matmul
    vmem_limit: int


@dataclass(frozen=True, kw_only=True)
class TransposedTiles:
    """The tiles into which the transposed matmul, the matrices' gradient, cuts its work."""

    cut: RowSteps
    inner: int  # rows of a result at a time; divides I
    out: int  # its columns; divides O
    piece_inner: int = 256  # of one matmul
    piece_out: int
    vmem_limit: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes and types of a call, on which its tiles depend."""

    num_rows: int
    inner: int
    out: int
    transpose_rhs: bool
    itemsize: int  # of lhs
    rhs_itemsize: float  # 0.5: two values in a byte
    out_itemsize: int
    multiplied: str  # the type of both in the MXU
    block: tuple[int, int] = (0, 0)  # of a matrix in memory, whose values are scaled alike in VMEM; (0, 0): none are
    partial_sums: bool = False  # sums over 128 of the inner width are scaled, each by itself

    @property
    def widened_itemsize(self) -> float:
        """The bytes of a value of a matrix that is widened in VMEM; 0: it is not."""
        return 0 if self.rhs_itemsize == (size := WIDTHS[self.multiplied]) else size

    @property
    def lanes(self) -> int:
        """The columns of a matrix in a tile of memory: where it is divided, by a multiple of as many."""
        return 2 * LANES if self.rhs_itemsize < 1 else LANES


def tiles_for(problem: Problem, hardware: Hardware) -> Tiles | None:
    """Choose the tiles of `grouped_matmul`; None where not even the smallest fit the chip's VMEM."""
    tuned = TUNED.get(shape_bucket(problem, hardware))
    if tuned is not None:
        return tiles_of_choice(problem, hardware, tuned)
    for rows in (512, 256, 128):
        for out in output_widths(problem.out, problem.lanes):
            fitting = _fit_tiles(problem, hardware, rows, out)
            if fitting is not None:
                return fitting
    # A width that cannot be divided makes long code whatever the tiles: the least of it.
    narrowest_first = reversed(output_widths(problem.out, problem.lanes))
    least = (TileChoice(rows=128, step=128, out=out, inner=problem.inner, paired=False) for out in narrowest_first)
    last_resort = (tiles_of_choice(problem, hardware, choice) for choice in least)
    return next((tiles for tiles in last_resort if tiles is not None), None)


def _fit_tiles(problem: Problem, hardware: Hardware, rows: int, out: int) -> Tiles | None:
    """Make tiles with these rows and columns, paired if that fits as well; None if they do not fit at all."""
    rows = rows_of_full_step(problem.num_rows, most=rows)
    inner = _inner_part(problem, hardware, rows, out)
    if inner is None:
        return None
    can_pair = (True, False) if inner == problem.inner else (False,)
    wanted = [(paired, step) for paired in can_pair for step in (32, 64, 128)]
    for paired, step in [*wanted, *((paired, rows) for paired in can_pair)]:
        choice = TileChoice(rows=rows, step=step, out=out, inner=inner, paired=paired)
        tiles = tiles_of_choice(problem, hardware, choice)
        if tiles is not None and _all_code(problem, hardware, tiles) <= ALL_CODE:
            return tiles
    return None


def rows_of_full_step(num_rows: int, *, most: int) -> int:
    """Halve the rows of a full step while they hold all rows: `row_steps_kernel` divides by powers of two."""
    while most > LANES and most // 2 >= num_rows:
        most //= 2
    return most


def tiles_of_choice(problem: Problem, hardware: Hardware, choice: "TileChoice") -> Tiles | None:
    """Make the tiles of a choice, if they fit the chip's VMEM and divide the sizes."""
    rows, paired = choice.rows, choice.paired
    if problem.out % choice.out or problem.inner % choice.inner:
        return None
    # Pushing a matrix into the MXU takes as long as multiplying 128 rows, the other way round twice that.
    smallest = min(rows, 256 if problem.transpose_rhs else 128)
    tiles = Tiles(
        cut=RowSteps(
            rows=rows, step=min(choice.step, rows), smallest=smallest, packed=packed_rows(problem), paired=paired
        ),
        out=choice.out,
        inner=choice.inner,
        piece_rows=piece_rows(problem),
        matrix_slots=4 if paired else 2,
        # Behind the first matmul the copies' scalar code costs nothing on a v6e, and 230 cycles on a tpu7x.
        copies_first=hardware.name == "tpu7x",
        vmem_limit=vmem_limit(hardware),
    )
    return tiles if vmem_bytes(problem, tiles) <= tiles.vmem_limit * 0.96 else None


def choice_of(tiles: Tiles) -> "TileChoice":
    """Read off the tiles what of them was chosen; the rest follows."""
    cut = tiles.cut
    return TileChoice(rows=cut.rows, step=cut.step, out=tiles.out, inner=tiles.inner, paired=cut.paired)


def piece_rows(problem: Problem) -> int:
    """Choose the rows of one matmul: few, so that its sums stay in registers; many, to hide pushing the matrix again.

    On a v6e 128 rows of 256 columns spill nothing and 512 rows 1384 times; on a tpu7x 512 spill 220 times and cost 88
    cycles of 12,551. A matrix that is pushed transposed takes twice as long: 128 rows would halve the speed.
    """
    return 256 if problem.transpose_rhs else 128


def packed_rows(problem: Problem) -> int:
    """Count the rows that share a block of memory, in lhs or in the result."""
    return 32 // min(problem.itemsize, problem.out_itemsize)


def vmem_limit(hardware: Hardware) -> int:
    return int((hardware.vmem_bytes or 16 * MIB) * VMEM_SHARE)


def vmem_bytes(problem: Problem, tiles: Tiles) -> float:
    """Count the bytes of the kernel's buffers in VMEM, in whole tiles of memory."""
    rows = tiles.cut.rows * (2 if tiles.cut.paired else 1)
    inner, out = _round_up(problem.inner, problem.lanes), _round_up(tiles.out, problem.lanes)
    matrices = tiles.matrix_slots * inner * out * problem.rhs_itemsize
    sums = rows * out * 4 if tiles.inner < problem.inner else 0
    widened = 2 * tiles.inner * tiles.piece_columns * problem.widened_itemsize
    scales = rows * LANES * 4 if problem.itemsize == 1 else 0
    if problem.partial_sums:
        scales += tiles.matrix_slots * inner // LANES * out * 4
    if all(problem.block):
        sizes = (out, tiles.inner) if problem.transpose_rhs else (tiles.inner, out)
        high, wide = (-(-size // block) for size, block in zip(sizes, problem.block))
        parts = problem.inner // tiles.inner
        scales += tiles.matrix_slots * parts * _round_up(high, 32) * _round_up(wide, LANES) * 4
    return matrices + 2 * rows * (inner * problem.itemsize + out * problem.out_itemsize) + sums + widened + scales


def code_cycles(rows: int, inner: int, out: int, problem: Problem, hardware: Hardware) -> float:
    """Count the MXU cycles of straight code, its length. float32 takes six passes of bfloat16."""
    depth = 128 if hardware.name in ("v4", "v5e", "v5p") else 256
    half_empty = problem.partial_sums and depth > LANES
    passes = PASSES[problem.multiplied] * (2 if half_empty else 1)
    return rows * inner * _round_up(out, 256) / (4 * depth * depth) * passes


def _all_code(problem: Problem, hardware: Hardware, tiles: Tiles) -> float:
    sizes = [*tiles.cut.sizes, *([2 * tiles.cut.rows] if tiles.cut.paired else [])]
    return sum(300 + code_cycles(size, tiles.inner, tiles.out, problem, hardware) for size in sizes)


def _inner_part(problem: Problem, hardware: Hardware, rows: int, out: int) -> int | None:
    """Choose the largest part of I whose straight code is short enough; all of I where it cannot be divided."""
    parts = [problem.inner // n for n in range(1, max(problem.inner // LEAST_INNER, 1) + 1) if problem.inner % n == 0]
    parts = [part for part in parts if part == problem.inner or part % problem.lanes == 0]
    if len(parts) == 1:
        return problem.inner
    short = (p for p in parts if code_cycles(rows, p, out, problem, hardware) <= LONGEST_CODE)
    return next(short, None)


def output_widths(out: int, lanes: int = LANES) -> list[int]:
    """List numbers of columns to try, widest first: all, or whole lanes that divide them."""
    parts = [out // n for n in range(2, out // lanes + 1) if out % n == 0 and out // n % lanes == 0]
    return [out, *parts]


def transposed_tiles_for(problem: Problem, hardware: Hardware) -> TransposedTiles | None:
    """Choose the tiles of the transposed matmul; ``problem.inner`` and ``.out`` are the result's sizes."""
    limit = vmem_limit(hardware)
    for rows in (512, 256, 128):
        cut = RowSteps(
            rows=rows, step=min(256, rows), smallest=min(256, rows), packed=packed_rows(problem), paired=False
        )
        for inner, out in sorted(
            ((i, o) for i in output_widths(problem.inner) for o in output_widths(problem.out)),
            key=lambda pair: -pair[0] * pair[1],
        ):
            wide, high = _round_up(out, LANES), _round_up(inner, LANES)
            read = 2 * rows * (wide + high) * problem.itemsize
            held = high * wide * (4 + 2 * problem.out_itemsize)
            code = code_cycles(rows, inner, out, problem, hardware)
            if read + held <= limit * 0.96 and code <= 2 * LONGEST_CODE:
                # lhs is turned for every piece of columns: 91.6 % of the MXU with 1408 on a v6e, 75 % with 256. A
                # tpu7x has time for it: 94.5 % with 512 (libtpu 0.0.50.1; R 8192, I 2048, O 1408, G 16).
                piece_out = 512 if hardware.name == "tpu7x" else 2048
                return TransposedTiles(cut=cut, inner=inner, out=out, piece_out=piece_out, vmem_limit=limit)
    return None


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class TileChoice:
    """The part of `Tiles` that the rule or the tuner decides."""

    rows: int
    step: int
    out: int
    inner: int
    paired: bool


@dataclass(frozen=True, kw_only=True)
class ShapeBucket:
    """Calls that share tiles: the rows by the power of two."""

    chip: str
    itemsize: int
    rhs_itemsize: float
    rows: int
    inner: int
    out: int
    transpose_rhs: bool


def shape_bucket(problem: Problem, hardware: Hardware) -> ShapeBucket:
    return ShapeBucket(
        chip=hardware.name,
        itemsize=problem.itemsize,
        rhs_itemsize=problem.rhs_itemsize,
        rows=1 << max(problem.num_rows - 1, 0).bit_length(),
        inner=problem.inner,
        out=problem.out,
        transpose_rhs=problem.transpose_rhs,
    )


# Where the tuner found better ones than the rule's.
TUNED: dict[ShapeBucket, TileChoice] = {}
