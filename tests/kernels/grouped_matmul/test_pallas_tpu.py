"""The tiles of the TensorCore kernels of `grouped_matmul`: pure functions of shapes, types and the chip."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.grouped_matmul import pallas_tpu, tiles
from raggedmoe.kernels.grouped_matmul.row_steps_kernel import size_number
from raggedmoe.kernels.grouped_matmul.tiles import Problem, RowSteps, TileChoice, Tiles
from raggedmoe.kernels.proof import COMPILED_CHIPS
from tests.kernels.tpu_interpreter import tpu_interpreter

WIDTHS = [(2048, 1408), (7168, 2048), (2048, 7168), (4096, 14336), (14336, 4096), (2880, 2880), (768, 2048), (17, 5)]


def problem(inner, out, *, itemsize=2, transpose=False, rows=16384):
    return Problem(
        num_rows=rows,
        inner=inner,
        out=out,
        transpose_rhs=transpose,
        itemsize=itemsize,
        rhs_itemsize=itemsize,
        out_itemsize=itemsize,
        multiplied={2: "bfloat16", 4: "float32"}[itemsize],
    )


@pytest.mark.parametrize("chip", COMPILED_CHIPS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("widths", WIDTHS)
def test_tiles_divide_the_widths_and_fit_the_chips_vmem(widths, itemsize, chip):
    asked = problem(*widths, itemsize=itemsize)
    found = tiles.tiles_for(asked, HARDWARE[chip])
    if found is None:  # only where O cannot be divided: padded, it fits
        assert widths[1] % tiles.LANES
        padded = dataclasses.replace(asked, out=-(-widths[1] // tiles.LANES) * tiles.LANES)
        found, asked = tiles.tiles_for(padded, HARDWARE[chip]), padded
    assert asked.out % found.out == 0
    assert asked.inner % found.inner == 0
    assert tiles.vmem_bytes(asked, found) < found.vmem_limit < HARDWARE[chip].vmem_bytes
    assert found.cut.sizes[-1] == found.cut.rows
    assert found.cut.step & (found.cut.step - 1) == 0


def test_a_wide_matrix_is_cut_narrower_on_a_chip_with_less_vmem():
    asked = problem(7168, 2048)
    assert tiles.tiles_for(asked, HARDWARE["tpu7x"]).out < tiles.tiles_for(asked, HARDWARE["v6e"]).out


def test_a_tuned_choice_is_for_its_chip_type_and_shape_alone(monkeypatch):
    asked, choice = problem(2048, 1408), TileChoice(rows=256, step=64, out=1408, inner=1024, paired=False)
    monkeypatch.setitem(tiles.TUNED, tiles.shape_bucket(asked, HARDWARE["v6e"]), choice)
    assert tiles.choice_of(tiles.tiles_for(asked, HARDWARE["v6e"])) == choice
    assert tiles.choice_of(tiles.tiles_for(problem(2048, 1408, rows=9000), HARDWARE["v6e"])) == choice
    others = [
        (asked, "tpu7x"),
        (problem(2048, 1408, itemsize=4), "v6e"),
        (problem(2048, 1408, transpose=True), "v6e"),
        (problem(2048, 1408, rows=4096), "v6e"),
        (problem(1408, 2048), "v6e"),
    ]
    for other, chip in others:
        assert tiles.choice_of(tiles.tiles_for(other, HARDWARE[chip])) != choice


def test_every_tuned_choice_fits_its_chip():
    for bucket, choice in tiles.TUNED.items():
        asked = problem(bucket.inner, bucket.out, itemsize=bucket.itemsize, transpose=bucket.transpose_rhs)
        assert tiles.tiles_of_choice(asked, HARDWARE[bucket.chip], choice) is not None


@pytest.mark.parametrize("step", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("smallest", [128, 256])
def test_there_is_straight_code_for_a_full_step_whatever_the_sizes(step, smallest):
    cut = RowSteps(rows=512, step=step, smallest=smallest, packed=16)
    assert cut.sizes[-1] == 512
    assert all(size % step == 0 for size in cut.sizes if size not in cut.half_steps)
    assert cut.sizes[0] < smallest + step


@pytest.mark.parametrize("packed", [8, 16])
@pytest.mark.parametrize("step", [16, 32, 64, 128, 256, 512])
def test_a_step_is_computed_by_the_smallest_code_that_holds_it(step, packed):
    cut = RowSteps(rows=512, step=step, smallest=128, packed=packed)
    rows = np.arange(packed, 513, packed)
    found = np.maximum(size_number(rows, cut), 0)
    assert (found == np.searchsorted(cut.sizes, rows)).all()
    assert size_number(np.int32(2 * cut.rows), cut) >= len(cut.sizes)


def test_16_cases_are_all_that_the_reference_shape_has():
    """Four levels of branches, each of them some 14 cycles of every step."""
    cut = tiles.tiles_for(problem(2048, 1408), HARDWARE["tpu7x"]).cut
    assert cut.paired
    assert len(cut.sizes) + 1 == 16


@pytest.mark.parametrize(
    ("chip", "itemsize", "widths", "every"), [("tpu7x", 2, (2048, 1408), 1), ("v5e", 4, (2880, 384), 9)]
)
def test_a_few_rows_are_cut_by_powers_of_two_as_many_are(chip, itemsize, widths, every):
    for rows in range(1, 2049, every):
        cut = tiles.tiles_for(problem(*widths, itemsize=itemsize, rows=rows), HARDWARE[chip]).cut
        assert cut.rows % cut.step == 0, f"{rows} rows are cut as {cut}"
        assert (cut.rows // cut.step).bit_count() == cut.step.bit_count() == 1, f"{rows} rows are cut as {cut}"


SMALL = Tiles(
    cut=RowSteps(rows=64, step=16, smallest=32, packed=16, paired=True),
    out=128,
    inner=16,
    piece_rows=32,
    piece_columns=128,
    matrix_slots=4,
    vmem_limit=16 << 20,
)
HALF_STEPS = dataclasses.replace(SMALL, cut=RowSteps(rows=64, step=16, smallest=16, packed=8, paired=True))
IN_PARTS = dataclasses.replace(SMALL, cut=dataclasses.replace(SMALL.cut, paired=False), inner=128, matrix_slots=2)


@pytest.mark.product
@pytest.mark.parametrize(
    ("small", "inner"),
    [
        pytest.param(SMALL, 16, marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(SMALL, copies_first=True), 16, marks=pytest.mark.slow),
        pytest.param(HALF_STEPS, 16, marks=pytest.mark.ci),
        pytest.param(IN_PARTS, 256, marks=pytest.mark.ci),
    ],
)
def test_several_steps_pairs_and_shared_blocks_agree_with_numpy(small, inner):
    """Sizes of one block, of none, of several steps: with tiles of the chip's own they would all be one step."""
    sizes = (64, 64, 0, 5, 3, 200, 1, 0, 131, 70)
    check_against_numpy(sizes, inner=inner, out=256, hardware="v6e", tiles=small)  # two tiles of columns


@pytest.mark.ci
def test_300_rows_of_a_width_that_cannot_be_divided_agree_with_numpy():
    """So wide that there is straight code for one size only, on a chip with a small MXU."""
    check_against_numpy((130, 0, 100, 6), inner=2880, out=384, hardware="v5e", tiles=None)


def check_against_numpy(sizes, *, inner, out, hardware, tiles):
    rng = np.random.default_rng(0)
    bounds = 7 + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    num_rows = int(bounds[-1]) + 57
    lhs = rng.standard_normal((num_rows, inner)).astype(np.float32)
    rhs = rng.standard_normal((len(sizes), inner, out)).astype(np.float32)
    expected = np.zeros((num_rows, out))
    for group, (first, last) in enumerate(itertools.pairwise(bounds)):
        expected[first:last] = lhs[first:last].astype(np.float64) @ rhs[group]
    lhs[: bounds[0]] = lhs[bounds[-1] :] = np.nan
    with tpu_interpreter():
        arrays = [jnp.asarray(array) for array in (lhs, rhs, bounds)]
        found = pallas_tpu.forward(
            *arrays, transpose_rhs=False, out_dtype=np.float32, hardware=HARDWARE[hardware], tiles=tiles
        )
    terms = np.abs(np.nan_to_num(lhs)).sum(1, keepdims=True) * np.abs(rhs).max()
    assert (np.abs(np.asarray(found, np.float64) - expected) <= 4 * np.finfo(np.float32).eps * terms).all()
    assert (np.asarray(found)[bounds[-1] :] == 0).all()


def test_a_matrix_gets_the_products_of_its_own_rows_alone():
    """Groups that begin and end inside a block of rows, with NaN in the rows of no group."""
    rng, sizes = np.random.default_rng(0), (5, 0, 3, 12)
    bounds = 7 + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    lhs, rhs = (rng.standard_normal((40, width)).astype(np.float32) for width in (16, 128))
    expected = [lhs[a:b].astype(np.float64).T @ rhs[a:b] for a, b in itertools.pairwise(bounds)]
    terms = [np.abs(lhs[a:b]).T @ np.abs(rhs[a:b]) for a, b in itertools.pairwise(bounds)]
    for array in (lhs, rhs):
        array[: bounds[0]] = array[bounds[-1] :] = np.nan
    with tpu_interpreter():
        found = pallas_tpu.transposed_matmul(*map(jnp.asarray, (lhs, rhs, bounds)), hardware=HARDWARE["v6e"])
    difference = np.abs(np.asarray(found, np.float64) - np.stack(expected))
    assert (difference <= 4 * np.finfo(np.float32).eps * np.stack(terms)).all()
