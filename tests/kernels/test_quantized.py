"""Quantised operands of `grouped_matmul` and `expert_ffn`: every format and granularity, values and all gradients.

Every implementation that takes them is compared with NumPy loops over what the codes mean by their formulas, within the
bound that rounding explains. Spare rows and idle experts hold NaN, in values and in scales.
"""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import QArray, expert_ffn, grouped_matmul
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.qarray import FORMATS, LHS_FORMATS, check_operand
from raggedmoe.kernels.registry import CannotRunError, implementations
from tests.kernels.compare import on_cpu
from tests.kernels.quantized_cases import (
    GRANULARITIES,
    ROW_BLOCKS,
    draw_ffn,
    draw_matmul,
    draw_stored,
    on_device,
    positive,
    run,
    shares_of_bound,
)
from tests.kernels.quantized_oracle import EXPONENTS, VALUES, values_of
from tests.pairwise import pairwise


def takers(operation):
    """The implementations that take quantised operands and run here."""
    return [name for name in on_cpu(operation) if implementations(operation)[name].quantized is not None]


def as_params(cases, is_quick=lambda case: True):
    """Those in which every two values meet run in `make test`, or in CI, and all of them in `make test-all`."""
    cases = list(cases)
    some = pairwise(cases)

    def mark(case):
        if case not in some:
            return [pytest.mark.slow]
        return [] if is_quick(case) else [pytest.mark.ci]

    return pytest.mark.parametrize(
        "case", [pytest.param(case, id="-".join(map(str, case.values())), marks=mark(case)) for case in cases]
    )


def product(**values):
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


DTYPES = ("float32", "bfloat16")
WEIGHTS = product(
    implementation=takers("grouped_matmul"),
    rhs=FORMATS,
    rhs_scale=(*GRANULARITIES, "exponents"),
    dtype=DTYPES,
    transpose=(False, True),
)
ROWS = product(
    implementation=takers("grouped_matmul"),
    lhs=LHS_FORMATS,
    lhs_scale=tuple(ROW_BLOCKS),
    rhs=(None, "int8", "mxfp4"),
    dtype=DTYPES,
    transpose=(False, True),
)
FFN = product(
    implementation=takers("expert_ffn"),
    weights=FORMATS,
    scale=("channel", "block", "exponents"),
    rows=(None, "int8", "float8_e4m3fn"),
    dtype=DTYPES,
    biases=(False, True),
    gated=(False, True),
)


def assert_within_bound(draw, seed, *, implementation, **options):
    call = draw(seed, **options)
    shares = shares_of_bound(call, run(call, implementation))
    assert {quantity: share for quantity, share in shares.items() if not share <= 1} == {}


@as_params(WEIGHTS)
def test_a_matmul_with_quantised_weights_is_that_of_what_they_stand_for(case):
    assert_within_bound(draw_matmul, 0, **case)


@as_params(ROWS)
def test_a_matmul_of_quantised_rows_is_that_of_what_they_stand_for(case):
    assert_within_bound(draw_matmul, 1, **case)


@as_params(FFN)
def test_experts_with_quantised_weights_are_those_of_what_they_stand_for(case):
    assert_within_bound(draw_ffn, 2, **case)


@pytest.mark.product
@pytest.mark.parametrize("scale", [*GRANULARITIES, "exponents"])
@pytest.mark.parametrize("qtype", FORMATS)
@pytest.mark.parametrize("name", takers("grouped_matmul"))
def test_right_results_of_a_matmul_use_at_least_a_fiftieth_of_the_bound(name, qtype, scale):
    call = draw_matmul(0, rhs=qtype, rhs_scale=scale, dtype="float32")
    shares = shares_of_bound(call, run(call, name))
    assert all(share <= 1 for share in shares.values())
    # A scale of a whole matrix, or of a column of all inputs, has a gradient in whose sum most terms cancel.
    cancels = {"drhs"} if scale in ("expert", "other-channel") else set()
    assert {quantity: share for quantity, share in shares.items() if not share > 0.02 and quantity not in cancels} == {}


@pytest.mark.product
@pytest.mark.parametrize("qtype", FORMATS)
@pytest.mark.parametrize("name", takers("expert_ffn"))
def test_right_results_of_experts_use_at_least_a_fiftieth_of_the_bound(name, qtype):
    """Where all terms have one sign. In others' sums most cancel, but not in the bound, a polynomial of them."""
    call = positive(draw_ffn(0, weights=qtype, dtype="bfloat16"))
    shares = shares_of_bound(call, run(call, name))
    # The reference rounds no hidden row, so its gradients of the scales, in float32, have hardly an error.
    rounded = shares if name != "reference" else {quantity: shares[quantity] for quantity in ("value", "drows")}
    assert all(share <= 1 for share in shares.values())
    assert {quantity: share for quantity, share in rounded.items() if not share > 0.02} == {}


def float64_cases(operation):
    names = [name for name in takers(operation) if name != "cpu_native"]  # which takes no float64
    return [(operation, name, qtype) for name in names for qtype in FORMATS]


@pytest.mark.product
@pytest.mark.parametrize(
    ("operation", "name", "qtype"), float64_cases("grouped_matmul") + float64_cases("expert_ffn"), ids=str
)
def test_sums_of_float64_are_within_a_bound_of_float64(operation, name, qtype):
    with jax.enable_x64(True):
        if operation == "grouped_matmul":
            call = draw_matmul(0, rhs=qtype, dtype="float64")
        else:
            call = draw_ffn(0, weights=qtype, dtype="float64")
        shares = shares_of_bound(call, run(call, name))
    assert {quantity: share for quantity, share in shares.items() if not share <= 1} == {}


@pytest.mark.parametrize("wide", DTYPES[:1])
@pytest.mark.parametrize("qtype", FORMATS)
def test_every_value_of_a_format_comes_back_exactly(qtype, wide):
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    given = codes if qtype == "mxfp4" else codes.view(qtype)
    operand = check_operand("test", "rhs", QArray(jnp.asarray(given), jnp.ones((1, 1, 1)), None, qtype), "G O I")
    found = np.asarray(jax.jit(lambda operand: dequantize(operand, jnp.dtype(wide)))(operand))
    want = values_of(codes, qtype)
    np.testing.assert_array_equal(found, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(want[number]))


def test_every_shared_exponent_comes_back_exactly():
    scale = jnp.arange(256, dtype=jnp.uint8).reshape(256, 1, 1)
    operand = QArray(jnp.ones((256, 1, 1), jnp.int8), scale, None, "int8")
    found = np.asarray(jax.jit(lambda operand: dequantize(operand, jnp.float32))(operand))[:, 0, 0]
    np.testing.assert_array_equal(found[1:], EXPONENTS[1:])
    assert found[0] in (0, EXPONENTS[0])  # it is no normal float32: some CPUs' settings make it zero


def test_formats_of_four_bits_and_exponents_may_be_arrays_of_their_own_types():
    values = jnp.asarray(VALUES["mxfp4"].reshape(1, 2, 8), jnp.float4_e2m1fn)
    scale = jnp.full((1, 2, 1), 4.0).astype(jnp.float8_e8m0fnu)
    out = grouped_matmul(jnp.eye(2), QArray(values, scale), jnp.asarray([2]), implementation="cpu")
    np.testing.assert_array_equal(out, 4 * VALUES["mxfp4"].reshape(2, 8))


@pytest.mark.parametrize("name", takers("grouped_matmul"))
def test_blocks_of_128_are_those_of_a_plain_loop(name):
    rng = np.random.default_rng(0)
    weights = draw_stored(rng, (2, 256, 384), "float8_e4m3fn", (2, 2, 3))
    lhs, sizes = rng.standard_normal((5, 384)), np.asarray([2, 3])
    lhs = lhs.astype(np.float32)
    out = grouped_matmul(
        jnp.asarray(lhs), on_device(weights), jnp.asarray(sizes), transpose_rhs=True, implementation=name
    )
    for g, i, j in itertools.product(range(2), range(2), range(3)):
        block = (g, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        np.testing.assert_array_equal(weights.exact[block], weights.values[block] * float(weights.scale[g, i, j]))
    want = np.concatenate([lhs[:2] @ weights.exact[0].T, lhs[2:] @ weights.exact[1].T])
    np.testing.assert_allclose(out, want, rtol=0, atol=8 * np.finfo(np.float32).eps * np.abs(want).max() * 20)


@pytest.mark.parametrize("name", takers("grouped_matmul"))
def test_scales_that_are_traced_are_multiplied_as_they_are(name):
    lhs, values = jnp.ones((3, 2)), jnp.ones((3, 2, 2), jnp.int8)
    scale = jnp.asarray([[[0.0, 1.0]], [[np.nan, 1.0]], [[2.0, 1.0]]])
    out = jax.jit(
        lambda scale: grouped_matmul(lhs, QArray(values, scale), jnp.ones(3, jnp.int32), implementation=name)
    )(scale)
    np.testing.assert_array_equal(out, [[0, 2], [np.nan, 2], [4, 2]])


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_scale_without_a_meaning_is_refused_where_it_is_known(value):
    scale = jnp.ones((2, 1, 6)).at[1, 0, 4].set(value)
    rhs = QArray(jnp.ones((2, 4, 6), jnp.int8), scale)
    with pytest.raises(ValueError, match=rf"scales of rhs .* got {value} at \[G=1, I=0\.\.3, O=4\]"):
        grouped_matmul(jnp.ones((5, 4)), rhs, jnp.asarray([2, 3]))
    idle = grouped_matmul(jnp.ones((5, 4)), rhs, jnp.asarray([5, 0]))
    np.testing.assert_array_equal(idle, np.full((5, 6), 4))
    rows = QArray(jnp.ones((3, 4), jnp.int8), jnp.ones((3, 2)).at[2, 1].set(value))
    with pytest.raises(ValueError, match=rf"scales of lhs .* got {value} at \[R=2, I=2\.\.3\]"):
        grouped_matmul(rows, jnp.ones((1, 4, 6)), jnp.asarray([3]))
    spare = grouped_matmul(rows, jnp.ones((1, 4, 6)), jnp.asarray([2]))
    np.testing.assert_array_equal(spare, [[4] * 6, [4] * 6, [0] * 6])


INT8, SCALE = np.ones((2, 4, 6), np.int8), np.ones((2, 1, 6), np.float32)
REFUSED = {
    "rank": (INT8, SCALE[:, 0], None, r"\[G I O\] = \[2, 4, 6\].*got \[2, 6\], of 2 dimensions"),
    "not a divisor": (INT8, SCALE[..., :4], None, r"its 4 for O are not a divisor of 6"),
    "experts in blocks": (INT8.repeat(2, axis=0), SCALE, None, r"its 2 for G are not 1 or 4"),
    "type of scale": (INT8, SCALE.astype(np.int32), None, r"the scale of rhs in one of .*, got int32"),
    "format": (INT8.astype(np.int16), SCALE, None, r"format of rhs, .* 'int16': expected one of float8_e4m3fn"),
    "bits without a format": (INT8.astype(np.uint8), SCALE, None, r"'uint8'"),
    "zero point": (INT8, SCALE, SCALE.astype(np.int8), r"without a zero_point, got one"),
}


@pytest.mark.parametrize(("values", "scale", "zero_point", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_said_with_the_names_of_the_axes(values, scale, zero_point, message):
    with pytest.raises((ValueError, TypeError), match=message):
        grouped_matmul(jnp.ones((4, 4)), QArray(values, scale, zero_point), jnp.ones(len(values), jnp.int32))


def test_rows_of_four_bits_are_refused():
    rows = QArray(jnp.zeros((3, 2), jnp.uint8), jnp.ones((3, 1)), None, "mxfp4")
    with pytest.raises(ValueError, match=r"format of lhs, .* 'mxfp4': expected one of .*, int8$"):
        grouped_matmul(rows, jnp.ones((1, 4, 6)), jnp.asarray([3]))


def test_a_transposed_operand_is_told_what_to_pass():
    rhs = QArray(jnp.ones((2, 6, 4), jnp.int8), jnp.ones((2, 6, 1)))
    with pytest.raises(ValueError, match="pass transpose_rhs=True"):
        grouped_matmul(jnp.ones((4, 4)), rhs, jnp.asarray([1, 3]))


@pytest.mark.parametrize("name", sorted(n for n, i in implementations("grouped_matmul").items() if i.quantized is None))
def test_an_implementation_that_takes_no_quantised_operands_says_so(name):
    rhs = QArray(jnp.ones((2, 4, 6), jnp.int8), jnp.ones((2, 1, 6)))
    with pytest.raises(CannotRunError, match=r"it takes no quantised operands, such as rhs \(int8\)|not built|needs"):
        grouped_matmul(jnp.ones((4, 4)), rhs, jnp.asarray([1, 3]), implementation=name)


def test_the_type_of_the_result_is_that_of_the_rows_or_of_their_scales():
    sizes, rhs = jnp.asarray([3]), QArray(jnp.ones((1, 4, 6), jnp.int8), jnp.ones((1, 1, 6)))
    rows = QArray(jnp.ones((3, 4), jnp.int8), jnp.ones((3, 1), jnp.bfloat16))
    assert grouped_matmul(jnp.ones((3, 4), jnp.bfloat16), rhs, sizes).dtype == jnp.bfloat16
    assert grouped_matmul(rows, rhs, sizes).dtype == jnp.bfloat16
    assert grouped_matmul(rows, rhs, sizes, preferred_element_type="float32").dtype == jnp.float32
    weights = QArray(jnp.ones((1, 5, 4), jnp.int8), jnp.ones((1, 5, 1)))
    assert expert_ffn(rows, weights, None, weights, sizes).dtype == jnp.bfloat16


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_arrays_of_qwix_are_taken_and_give_what_its_ragged_dot_gives(qtype):
    qwix = pytest.importorskip("qwix")
    rng, sizes = np.random.default_rng(0), jnp.asarray([3, 0, 9])
    lhs = qwix.quantize(jnp.asarray(rng.standard_normal((12, 64)), jnp.float32), qtype, channelwise_axes=[0])
    weights = jnp.asarray(rng.standard_normal((3, 64, 32)), jnp.float32)
    rhs = qwix.quantize(weights, qtype, channelwise_axes=[0, 2])
    found = grouped_matmul(lhs, rhs, sizes)
    want = qwix.ragged_dot(lhs, rhs, sizes)
    # Two sums of 64 terms, each with the roundings of its scales.
    terms = np.abs(qwix.dequantize(lhs)) @ np.abs(qwix.dequantize(rhs))[np.repeat([0, 2], [3, 9])].max(0)
    assert (np.abs(found - want) <= 6 * np.finfo(np.float32).eps * terms).all()
    tiles = qwix.quantize(weights, qtype, channelwise_axes=[0, 2], tiled_axes={1: 32})
    plain = grouped_matmul(jnp.ones((12, 64)), qwix.dequantize(tiles), sizes)
    np.testing.assert_allclose(grouped_matmul(jnp.ones((12, 64)), tiles, sizes), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_gradients_are_those_of_qwixs_quantised_training(qtype):
    """Its `ragged_dot_qt` gives the gradients of the arrays; ours of the scales are those times the values, summed."""
    qwix = pytest.importorskip("qwix")
    training = pytest.importorskip("qwix._src.core.ragged_dot_qt")
    rng, sizes = np.random.default_rng(0), jnp.asarray([3, 0, 9])
    lhs, rhs, cotangent = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((12, 64), (3, 64, 32), (12, 32))
    )
    config = training.RaggedDotQtConfig(lhs_qtype=qtype, rhs_qtype=qtype)
    want, pullback = jax.vjp(lambda lhs, rhs: training.ragged_dot_qt(lhs, rhs, sizes, config), lhs, rhs)
    rows = qwix.quantize(lhs, qtype, channelwise_axes=[0])
    weights = qwix.quantize(rhs, qtype, channelwise_axes=[2])

    def ours(scales):
        stored = (replace(rows, scale=scales[0]), replace(weights, scale=scales[1]))
        return grouped_matmul(*stored, sizes)

    found, scale_pullback = jax.vjp(ours, (rows.scale, weights.scale))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())
    (gradients,) = scale_pullback(cotangent)
    for stored, of_array, gradient in zip((rows, weights), pullback(cotangent), gradients):
        terms = np.asarray(stored.qvalue, np.float64) * np.asarray(of_array, np.float64)
        shared = tuple(i for i in range(terms.ndim) if gradient.shape[i] == 1)
        bound = 1e-6 * np.abs(terms).sum(axis=shared, keepdims=True)
        assert (np.abs(gradient - terms.sum(axis=shared, keepdims=True)) <= bound).all()
    # Of rows that stay arrays the gradient is its own.
    _, row_pullback = jax.vjp(lambda lhs: grouped_matmul(lhs, weights, sizes), lhs)
    np.testing.assert_allclose(row_pullback(cotangent)[0], pullback(cotangent)[0], rtol=0, atol=1e-4)


def test_blocks_of_fp8_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")
    rng = np.random.default_rng(0)
    weights = draw_stored(rng, (2, 256, 384), "float8_e4m3fn", (2, 2, 3))
    want = theirs._dequantize_fp8_weight(
        torch.from_numpy(weights.codes).view(torch.float8_e4m3fn),
        torch.from_numpy(weights.scale),
        [128, 128],
        torch.float32,
    )
    operand = check_operand("test", "rhs", on_device(weights), "G O I")
    found = jax.jit(lambda operand: dequantize(operand, jnp.float32))(operand)
    np.testing.assert_array_equal(found, want.numpy())


def test_gradients_of_gradients_are_those_of_what_is_stored():
    call = draw_matmul(0, rhs="int8", rhs_scale="block")
    lhs, rhs = (on_device(operand) for operand in call.operands.values())
    lhs, sizes = jnp.where(jnp.isnan(lhs), 0, lhs), jnp.asarray(call.group_sizes)
    rhs = replace(rhs, scale=jnp.nan_to_num(rhs.scale))

    def slope(scale, lhs, matmul):
        def value(lhs):
            return jnp.sum(jnp.sin(matmul(lhs, replace(rhs, scale=scale))))

        return jnp.sum(jnp.square(jax.grad(value)(lhs)))

    stored = functools.partial(grouped_matmul, group_sizes=sizes, implementation="cpu")

    def widened(lhs, rhs):
        rhs = dequantize(check_operand("test", "rhs", rhs, "G I O"), jnp.float32)
        return grouped_matmul(lhs, rhs, sizes, implementation="cpu")

    found = jax.jit(jax.grad(functools.partial(slope, matmul=stored), argnums=(0, 1)))(rhs.scale, lhs)
    want = jax.jit(jax.grad(functools.partial(slope, matmul=widened), argnums=(0, 1)))(rhs.scale, lhs)
    for one, other in zip(found, want):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("lhs", "rhs_scale", "dtype", "widest"),
    [
        (None, "channel", "bfloat16", "bfloat16"),
        (None, "expert", "bfloat16", "bfloat16"),
        ("int8", "channel", "bfloat16", "bfloat16"),
        (None, "block", "bfloat16", "float32"),
        (None, "channel", "float32", "float32"),
    ],
)
def test_xla_multiplies_values_in_bfloat16_where_scales_can_wait_for_the_sums(lhs, rhs_scale, dtype, widest):
    """Half the copy, and on a TPU one pass instead of six; the sums are float32 either way."""
    call = draw_matmul(0, rhs="float8_e4m3fn", rhs_scale=rhs_scale, lhs=lhs, dtype=dtype)
    operands = [on_device(operand) for operand in call.operands.values()]
    matmul = functools.partial(grouped_matmul, group_sizes=jnp.asarray(call.group_sizes), implementation="xla")
    text = jax.jit(matmul).lower(*operands).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line or "ragged_dot" in line]
    assert products
    short = {"bfloat16": "bf16", "float32": "f32"}[widest]
    for line in products:
        inputs, _, result = line.rpartition("->")
        assert inputs.count(f"x{short}>") == 2, line
        assert "xf32>" in result, line
