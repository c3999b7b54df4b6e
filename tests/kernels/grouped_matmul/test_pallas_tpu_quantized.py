"""Quantised operands of the TensorCore kernel of `grouped_matmul`, in JAX's TPU interpreter: values and all gradients.

The oracle is that of `kernels/test_quantized`: NumPy loops over what the codes mean. Spare rows and idle experts hold
NaN, in values and in scales.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import QArray, grouped_matmul
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.grouped_matmul import pallas_tpu, tiles
from raggedmoe.kernels.grouped_matmul.tiles import RowSteps, Tiles
from raggedmoe.kernels.grouped_matmul.tpu_operands import MatmulOperand, multiplication
from raggedmoe.kernels.grouped_matmul.widening_kernel import UNPACKED, spread_lanes, unpack_4_bits
from raggedmoe.kernels.qarray import check_operand, operand_structs
from raggedmoe.kernels.registry import BACKWARD, Call, candidates, record_selections
from tests.kernels.quantized_cases import draw_matmul, draw_stored, on_device, run, shares_of_bound
from tests.kernels.quantized_oracle import values_of
from tests.kernels.tpu_interpreter import tpu_interpreter

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"

# By what the kernel does: multiplied natively, widened to bfloat16 or to float32, and scaled where.
QUICK = {
    "native int8": {"chip": "v6e", "lhs": "int8", "rhs": "int8", "dtype": "bfloat16", "transpose": True},
}
IN_CI = {
    "native fp8 of two formats": {"chip": "tpu7x", "lhs": E5M2, "rhs": E4M3, "dtype": "float32"},
    "weights widened": {"chip": "v5e", "rhs": "int8", "dtype": "bfloat16"},
    "blocks": {"chip": "tpu7x", "rhs": E4M3, "rhs_scale": "block", "dtype": "bfloat16", "transpose": True},
    "mxfp4": {"chip": "v6e", "rhs": "mxfp4", "rhs_scale": "exponents", "dtype": "bfloat16", "transpose": True},
}
FURTHER = {
    "int8 where it is not native": {"chip": "tpu7x", "lhs": "int8", "rhs": "int8", "dtype": "bfloat16"},
    "fp8 where it is not native": {"chip": "v5e", "lhs": E4M3, "rhs": E5M2, "dtype": "float32", "transpose": True},
    "rows in float32": {"chip": "v6e", "rhs": E5M2, "dtype": "float32", "transpose": True},
    "an expert's scale": {"chip": "v6e", "lhs": E4M3, "rhs": E4M3, "rhs_scale": "expert", "dtype": "bfloat16"},
    "along what is summed": {"chip": "v6e", "rhs": "int8", "rhs_scale": "other-channel", "dtype": "bfloat16"},
    "shared exponents": {"chip": "tpu7x", "rhs": "int8", "rhs_scale": "exponents", "dtype": "bfloat16"},
    "rows and blocks": {"chip": "v6e", "lhs": "int8", "rhs": E4M3, "rhs_scale": "block", "dtype": "bfloat16"},
    "rows alone": {"chip": "v6e", "lhs": "int8", "rhs": None, "dtype": "bfloat16"},
    "blocks along the lanes": {
        "chip": "v5e",
        "rhs": E5M2,
        "rhs_scale": "narrow",
        "dtype": "bfloat16",
        "transpose": True,
    },
    "mxfp4 along the sublanes": {"chip": "tpu7x", "rhs": "mxfp4", "rhs_scale": "exponents", "dtype": "bfloat16"},
    "mxfp4 and rows in float32": {"chip": "v5e", "rhs": "mxfp4", "rhs_scale": "exponents", "dtype": "float32"},
    "mxfp4 with floating scales": {"chip": "v6e", "rhs": "mxfp4", "rhs_scale": "block", "dtype": "bfloat16"},
    "mxfp4 by channel": {"chip": "v6e", "rhs": "mxfp4", "dtype": "bfloat16", "transpose": True},
    "mxfp4 and rows of 8 bits": {
        "chip": "tpu7x",
        "lhs": "int8",
        "rhs": "mxfp4",
        "rhs_scale": "exponents",
        "dtype": "bfloat16",
    },
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in QUICK.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.ci) for name, case in IN_CI.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in FURTHER.items()),
    ],
)
def test_values_and_gradients_are_those_of_what_the_operands_stand_for(case):
    options = dict(case)
    chip = options.pop("chip")
    call = draw_matmul(3, **options)
    with tpu_interpreter():
        found = run(call, "pallas_tpu", HARDWARE[chip])
    shares = shares_of_bound(call, found)
    assert {quantity: share for quantity, share in shares.items() if not share <= 1} == {}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("chip", "formats", "transpose"), [("v6e", ("int8", "int8"), True), ("tpu7x", (E5M2, E4M3), False)]
)
def test_tokamax_multiplies_natively_what_stands_for_the_operands(chip, formats, transpose):
    """Of widths that are multiples of 128: others it is given widened, and the gradients' operands too."""
    rng, sizes = np.random.default_rng(0), np.asarray([3, 0, 70, 9])
    bounds = np.append(0, np.cumsum(sizes))
    num_rows = int(bounds[-1]) + 4
    lhs = draw_stored(rng, (num_rows, 128), formats[0], (num_rows, 1), poisoned=np.arange(num_rows) >= bounds[-1])
    rhs = draw_stored(rng, (4, 128, 128), formats[1], (4, 128, 1) if transpose else (4, 1, 128), poisoned=sizes == 0)
    expected, terms = np.zeros((num_rows, 128)), np.zeros((num_rows, 128))
    for group, (first, last) in enumerate(itertools.pairwise(bounds)):
        if last > first:
            matrix = rhs.exact[group].T if transpose else rhs.exact[group]
            expected[first:last] = lhs.exact[first:last] @ matrix
            terms[first:last] = np.abs(lhs.exact[first:last]) @ np.abs(matrix)
    options = {"transpose_rhs": transpose, "implementation": "tokamax", "hardware": chip}
    operands = on_device(lhs), on_device(rhs)
    with tpu_interpreter(), record_selections() as selections:
        found = jax.jit(functools.partial(grouped_matmul, **options))(*operands, jnp.asarray(sizes))
    assert selections[0].chosen_candidate.note.startswith("native")
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert (error <= 7 * np.finfo(np.float32).eps * terms).all()


SMALL = Tiles(
    cut=RowSteps(rows=128, step=32, smallest=32, packed=32, paired=True),
    out=128,
    inner=64,
    piece_rows=32,
    piece_columns=128,
    matrix_slots=4,
    vmem_limit=16 << 20,
)
IN_PARTS = dataclasses.replace(SMALL, cut=dataclasses.replace(SMALL.cut, paired=False), matrix_slots=2, inner=128)


@pytest.mark.parametrize(
    ("chip", "small", "inner", "scale"),
    [
        pytest.param("v6e", SMALL, 64, (1, 256), marks=pytest.mark.ci, id="native, in pairs"),
        pytest.param("tpu7x", IN_PARTS, 256, (8, 2), marks=pytest.mark.slow, id="blocks, in parts"),
        pytest.param("v6e", IN_PARTS, 256, (2, 2), marks=pytest.mark.slow, id="sums over 128, in parts"),
        pytest.param(
            "tpu7x", dataclasses.replace(SMALL, inner=256), 256, (2, 2), marks=pytest.mark.slow, id="sums over 128"
        ),
        pytest.param("v6e", IN_PARTS, 256, (256, 8), marks=pytest.mark.slow, id="blocks along the lanes, in parts"),
    ],
)
def test_several_steps_and_shared_blocks_of_rows_agree_with_numpy(chip, small, inner, scale):
    """Groups that begin and end inside a block of 32 rows, and of several steps; two tiles of columns."""
    rng, sizes = np.random.default_rng(0), (128, 128, 0, 5, 3, 400, 1, 0, 131, 70)
    bounds = 7 + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    num_rows = int(bounds[-1]) + 57
    past = (np.arange(num_rows) < bounds[0]) | (np.arange(num_rows) >= bounds[-1])
    lhs = draw_stored(rng, (num_rows, inner), "int8", (num_rows, 1), poisoned=past)
    rhs = draw_stored(rng, (len(sizes), inner, 256), "int8", (len(sizes), *scale), poisoned=np.asarray(sizes) == 0)
    expected, terms = np.zeros((num_rows, 256)), np.zeros((num_rows, 256))
    for group, (first, last) in enumerate(itertools.pairwise(bounds)):
        if last > first:
            expected[first:last] = lhs.exact[first:last] @ rhs.exact[group]
            terms[first:last] = np.abs(lhs.exact[first:last]) @ np.abs(rhs.exact[group])
    with tpu_interpreter():
        found = pallas_tpu.forward(
            check_operand("test", "lhs", on_device(lhs), "R I"),
            check_operand("test", "rhs", on_device(rhs), "G I O"),
            jnp.asarray(bounds),
            transpose_rhs=False,
            out_dtype=np.float32,
            hardware=HARDWARE[chip],
            tiles=small,
        )
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert (error <= 6 * np.finfo(np.float32).eps * terms).all()


WIDE = dataclasses.replace(SMALL, out=256, piece_columns=256)
WIDE_IN_PARTS = dataclasses.replace(WIDE, cut=IN_PARTS.cut, matrix_slots=2, inner=256)


@pytest.mark.parametrize(
    ("small", "inner", "out", "transpose", "block"),
    [
        pytest.param(WIDE, 64, 512, False, (32, 1), marks=pytest.mark.ci, id="in pairs, two tiles of columns"),
        pytest.param(WIDE_IN_PARTS, 512, 512, False, (32, 1), marks=pytest.mark.slow, id="in parts"),
        pytest.param(WIDE_IN_PARTS, 512, 512, True, (1, 32), marks=pytest.mark.slow, id="transposed, in parts"),
        pytest.param(None, 96, 160, True, (1, 32), marks=pytest.mark.slow, id="transposed, by the rule"),
        pytest.param(None, 4416, 64, True, (1, 32), marks=pytest.mark.slow, id="more blocks than lanes"),
        pytest.param(None, 64, 288, False, (32, 1), marks=pytest.mark.slow, id="columns that fill no tile"),
    ],
)
def test_mxfp4_in_several_steps_agrees_with_numpy(small, inner, out, transpose, block):
    """Two values in a byte and shared exponents, in both layouts; groups begin and end inside a block of rows."""
    rng, sizes = np.random.default_rng(0), (128, 5, 0, 131, 70)
    bounds = 7 + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    num_rows = int(bounds[-1]) + 20
    row = np.arange(num_rows)
    lhs = rng.standard_normal((num_rows, inner)).astype(jnp.bfloat16)
    lhs[(row < bounds[0]) | (row >= bounds[-1])] = np.nan
    shape = (len(sizes), out, inner) if transpose else (len(sizes), inner, out)
    scale = (len(sizes), shape[1] // block[0], shape[2] // block[1])
    rhs = draw_stored(rng, shape, "mxfp4", scale, exponents=True, poisoned=np.asarray(sizes) == 0)
    expected, terms = np.zeros((num_rows, out)), np.zeros((num_rows, out))
    for group, (first, last) in enumerate(itertools.pairwise(bounds)):
        if last > first:
            left, matrix = lhs[first:last].astype(np.float64), rhs.exact[group].T if transpose else rhs.exact[group]
            expected[first:last], terms[first:last] = left @ matrix, np.abs(left) @ np.abs(matrix)
    with tpu_interpreter():
        found = pallas_tpu.forward(
            jnp.asarray(lhs),
            check_operand("test", "rhs", on_device(rhs), "G O I" if transpose else "G I O"),
            jnp.asarray(bounds),
            transpose_rhs=transpose,
            out_dtype=np.float32,
            hardware=HARDWARE["v6e"],
            tiles=small,
        )
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert (error <= 5 * np.finfo(np.float32).eps * terms).all()


def test_every_value_of_four_bits_is_unpacked_exactly():
    """Each byte, in each place of a word."""
    codes = np.stack([np.roll(np.arange(256), -64 * place) for place in range(4)]).astype(np.uint8)
    found = np.asarray(jax.jit(unpack_4_bits)(codes), np.float64) * UNPACKED
    np.testing.assert_array_equal(found, values_of(codes, "mxfp4"))


@pytest.mark.parametrize(
    ("repeats", "first", "width"), [(2, 0, 64), (2, 256, 320), (32, 0, 4416), (48, 128, 256), (90, 0, 300)]
)
def test_columns_are_repeated_over_lanes(repeats, first, width):
    array = np.arange(8 * 300, dtype=np.float32).reshape(8, 300)
    found = jax.jit(functools.partial(spread_lanes, repeats=repeats, first=first, width=width))(array)
    np.testing.assert_array_equal(found, array.repeat(repeats, axis=1)[:, first : first + width])


def describe(shape, qtype, scale=None, dtype="float32"):
    return MatmulOperand(shape, jnp.dtype(dtype), qtype, scale and jax.ShapeDtypeStruct(scale, jnp.float32))


@pytest.mark.parametrize(
    ("chip", "lhs", "rhs", "multiplied"),
    [
        ("v5e", "int8", "int8", "int8"),
        ("v6e", "int8", "int8", "int8"),
        ("tpu7x", "int8", "int8", "bfloat16"),
        ("tpu7x", E5M2, E4M3, E5M2),
        ("v5e", E4M3, E4M3, "bfloat16"),
        ("v6e", "int8", E4M3, "bfloat16"),
        ("v5p", "int8", "int8", "bfloat16"),
    ],
)
def test_8_bits_are_multiplied_where_the_chip_does(chip, lhs, rhs, multiplied):
    operands = describe((64, 256), lhs, (64, 1)), describe((2, 256, 128), rhs, (2, 1, 128))
    assert multiplication(*operands, False, HARDWARE[chip]).multiplied == multiplied


def test_sums_of_int8_that_int32_might_not_hold_are_of_bfloat16():
    operands = describe((64, 2**17), "int8", (64, 1)), describe((2, 2**17, 128), "int8", (2, 1, 128))
    assert multiplication(*operands, False, HARDWARE["v6e"]).multiplied == "bfloat16"


def assess(chip, lhs, rhs, *, transpose=False, direction="forward"):
    """What the kernel says of a call with such operands."""
    arrays, formats = operand_structs(lhs=lhs, rhs=rhs, group_sizes=jax.ShapeDtypeStruct((2,), jnp.int32))
    options = {"transpose_rhs": transpose, "group_offset": False, "out_dtype": str(lhs.dtype)}
    call = Call(operation="grouped_matmul", direction=direction, arrays=arrays, options=options, formats=formats)
    (found,) = candidates(call, "pallas_tpu", HARDWARE[chip])
    return found


def stored(shape, qtype, scale):
    values = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 2) if qtype == "mxfp4" else shape, jnp.uint8)
    return QArray(values, jax.ShapeDtypeStruct(scale, jnp.float32), None, qtype)


def plain(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize(
    ("chip", "lhs", "rhs", "direction", "said"),
    [
        ("v6e", stored((64, 256), "int8", (64, 1)), stored((2, 256, 128), "int8", (2, 1, 128)), "forward", "native: "),
        ("tpu7x", plain(64, 256), stored((2, 256, 128), "int8", (2, 1, 128)), "forward", "emulated: .* to bfloat16; "),
        ("tpu7x", plain(64, 256), stored((2, 256, 128), E4M3, (2, 2, 1)), "forward", "emulated: .* sums over 128"),
        ("tpu7x", plain(64, 256), stored((2, 256, 128), E4M3, (2, 8, 2)), "forward", "emulated: .* to float32, where"),
        ("tpu7x", plain(64, 256), stored((2, 256, 128), E4M3, (2, 1, 128)), BACKWARD, "emulated: .* a copy in float32"),
        ("v6e", plain(64, 256), stored((2, 256, 128), "mxfp4", (2, 8, 128)), "forward", "emulated: 4 bits .* where"),
    ],
)
def test_explain_says_what_is_done_with_8_bits(chip, lhs, rhs, direction, said):
    found = assess(chip, lhs, rhs, direction=direction)
    assert found.reason is None
    assert re.match(said, found.note), found.note


@pytest.mark.parametrize(
    ("lhs", "rhs", "reason"),
    [
        (plain(64, 256), stored((2, 256, 128), "mxfp4", (2, 8, 128)), None),
        (plain(64, 254), stored((2, 254, 128), "mxfp4", (2, 1, 128)), "a multiple of 4 rows in memory, .* have 254$"),
        (plain(64, 256), stored((2, 256, 128), "int8", (2, 256, 4)), None),
        (plain(64, 256), stored((2, 256, 128), "int8", (2, 64, 32)), "of rhs are of 4 × 4$"),
        (plain(64, 256), stored((2, 256, 128), "int8", (2, 16, 128)), None),
        (
            stored((64, 256), "int8", (64, 2)),
            stored((2, 256, 128), "int8", (2, 2, 1)),
            "rows with one scale each, and lhs has 2",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_said(lhs, rhs, reason):
    found = assess("v6e", lhs, rhs)
    assert found.reason is None if reason is None else re.search(reason, found.reason)


def test_plain_operands_are_cut_as_if_there_were_no_quantised_ones():
    """So that no cycle of theirs moves."""
    plain_problem = pallas_tpu.problem_of(
        describe((8192, 2048), None, dtype="bfloat16"),
        describe((16, 2048, 1408), None, dtype="bfloat16"),
        False,
        jnp.bfloat16,
        HARDWARE["v6e"],
    )
    found = tiles.tiles_for(plain_problem, HARDWARE["v6e"])
    assert (found.cut.rows, found.cut.packed, found.cut.paired, found.out) == (512, 16, True, 1408)
    assert plain_problem.widened_itemsize == 0
