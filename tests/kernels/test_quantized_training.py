"""Grouped matmuls that quantise their operands: values and gradients of every format, granularity and implementation.

They are compared with NumPy loops that quantise by hand, and with what nothing has rounded, within what rounding
explains. Spare rows and idle groups hold NaN.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.grouped_matmul.api import grouped_matmul
from raggedmoe.kernels.grouped_matmul.quantized_matmuls import quantized_matmuls
from raggedmoe.kernels.quant_config import E4M3, QUANTIZATIONS, QuantConfig
from raggedmoe.kernels.registry import CannotRunError, Directions, implementations, quantizes_why_not, record_selections
from tests.kernels.compare import on_cpu
from tests.kernels.quantized_training import expected
from tests.kernels.test_quantized import as_params, product
from tests.kernels.tpu_interpreter import tpu_interpreter

TAKERS = [name for name in on_cpu("grouped_matmul") if implementations("grouped_matmul")[name].quantized is not None]
SIZES, INNER, OUT, SPARE = np.asarray([3, 0, 21, 9, 0]), 64, 32, 4
NUM_ROWS = int(SIZES.sum()) + SPARE


def draw(dtype="float32", transpose=True, seed=0):
    """Rows, two weights and their cotangents, of which no group nor row is as large as the others."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    past, idle = np.arange(NUM_ROWS) >= SIZES.sum(), SIZES == 0
    shape = (OUT, INNER) if transpose else (INNER, OUT)
    lhs = rng.standard_normal((NUM_ROWS, INNER)) * np.exp2(rng.integers(-4, 5, (NUM_ROWS, 1)))
    weights = [rng.standard_normal((len(SIZES), *shape)) / 8 for _ in range(2)]
    group = np.repeat(np.arange(len(SIZES)), SIZES)
    sizes = np.append(np.exp2(np.asarray([0, 0, -6, 2, 0]))[group], np.ones(SPARE))
    cotangents = [rng.standard_normal((NUM_ROWS, OUT)) * sizes[:, None] for _ in range(2)]
    for array in (lhs, *cotangents):
        array[past] = np.nan
    for weight in weights:
        weight[idle] = np.nan
    return lhs.astype(dtype), [w.astype(dtype) for w in weights], [g.astype(dtype) for g in cotangents]


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 7))
def run(lhs, weights, cotangents, config, transpose, implementation, key=None, hardware=None):
    def products(lhs, weights):
        options = {"transpose_rhs": transpose, "implementation": implementation, "hardware": hardware}
        return quantized_matmuls(lhs, tuple(weights), jnp.asarray(SIZES), config=config, key=key, **options)

    values, vjp = jax.vjp(products, lhs, weights)
    dlhs, dweights = vjp(tuple(cotangents))
    numbered = {f"value{n}": value for n, value in enumerate(values)}
    return {**numbered, "dlhs": dlhs, **{f"dweight{n}": dweight for n, dweight in enumerate(dweights)}}


def shares_of_bound(arrays, found, config, transpose, *, ideal=False):
    lhs, weights, cotangents = jax.tree.map(lambda array: np.asarray(array, np.float64), arrays)
    shares = {}
    for name, (value, bound) in expected(
        config, lhs, weights, SIZES, cotangents, transpose=transpose, ideal=ideal
    ).items():
        array = np.asarray(found[name], np.float64)
        error, allowed = np.abs(array - value), bound + float(jnp.finfo(found[name].dtype).eps) * np.abs(value)
        share = np.divide(error, allowed, out=np.where(error == 0, 0.0, np.inf), where=allowed > 0)
        shares[name] = float("inf") if np.isnan(share).any() else float(share.max())
    return shares


CONFIGS = {
    **QUANTIZATIONS,
    "constant": replace(QUANTIZATIONS["fp8"], weight_scale=2.0**-9, row_scale=0.25, cotangent_scale=2.0**-14),
    "gradients": QuantConfig(weights=E4M3, cotangents="int8"),  # the rows are as they are
}
CASES = product(
    implementation=TAKERS,
    config=tuple(CONFIGS),
    block=(None, 16),
    dtype=("float32", "bfloat16"),
    transpose=(False, True),
)


def is_quick(case):
    """Some of each configuration are enough while one works."""
    return case["implementation"] in ("cpu", "cpu_native") and case["dtype"] == "float32"


@as_params(CASES, is_quick)
def test_values_and_gradients_are_those_of_loops_that_quantise_by_hand(case):
    config, transpose = replace(CONFIGS[case["config"]], block=case["block"]), case["transpose"]
    arrays = draw(case["dtype"], transpose)
    found = jax.device_get(run(*jax.tree.map(jnp.asarray, arrays), config, transpose, case["implementation"]))
    shares = shares_of_bound(arrays, found, config, transpose)
    assert {name: share for name, share in shares.items() if not share <= 1} == {}
    for name in ("dweight0", "dweight1"):
        np.testing.assert_array_equal(found[name][SIZES == 0], 0)  # exactly


@pytest.mark.parametrize(
    ("chip", "config", "dtype"),
    [
        pytest.param("v6e", "int8", "bfloat16", marks=pytest.mark.ci),
        pytest.param("tpu7x", "fp8", "bfloat16", marks=pytest.mark.slow),
        pytest.param("tpu7x", "int8", "float32", marks=pytest.mark.slow),
        pytest.param("v5e", "fp8_weights", "bfloat16", marks=pytest.mark.slow),
        pytest.param("v6e", "gradients", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_tpu_kernel_trains_as_loops_that_quantise_by_hand(chip, config, dtype):
    """Natively where the chip multiplies the formats: forward, and in both gradients."""
    arrays, config = draw(dtype), CONFIGS[config]
    with tpu_interpreter():
        found = run(*jax.tree.map(jnp.asarray, arrays), config, True, "pallas_tpu", None, chip)
    shares = shares_of_bound(arrays, jax.device_get(found), config, True)
    assert {name: share for name, share in shares.items() if not share <= 1} == {}


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_the_error_is_what_the_formats_units_of_rounding_explain(name):
    """(u_l + u_r + u_l u_r) Σ|terms|, and half the least step times the scale: right results use a part of it."""
    config, arrays = QUANTIZATIONS[name], draw()
    found = jax.device_get(run(*jax.tree.map(jnp.asarray, arrays), config, True, "cpu"))
    shares = shares_of_bound(arrays, found, config, True, ideal=True)
    assert max(shares.values()) <= 1
    assert min(shares[quantity] for quantity in ("value0", "value1", "dlhs")) > 0.02


@pytest.mark.parametrize("implementation", TAKERS)
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_what_is_not_finite_stays_with_its_own_group(name, implementation):
    lhs, weights, cotangents = (jax.tree.map(np.nan_to_num, part) for part in draw())
    clean = run(lhs, weights, cotangents, QUANTIZATIONS[name], True, implementation)
    spoilt = [lhs.copy(), [w.copy() for w in weights], [g.copy() for g in cotangents]]
    first, second = 1, int(SIZES[:3].sum())  # a row of group 0, and one of group 3
    spoilt[0][first, 5], spoilt[2][0][second, 3] = np.nan, np.inf
    found = run(*spoilt, QUANTIZATIONS[name], True, implementation)
    assert np.isnan(found["value0"][first]).all()
    assert not np.isfinite(found["dlhs"][second]).any()
    assert np.isnan(found["dweight0"][3]).all()
    assert np.isnan(found["dweight0"][0]).any()
    for quantity in clean:
        touched = {"dlhs": [second], "value0": [first], "value1": [first]}.get(quantity, [0, 3])
        rest = np.delete(np.arange(clean[quantity].shape[0]), touched)
        assert np.isfinite(found[quantity][rest]).all()
        if not quantity.startswith("dweight"):  # whose scales of columns are of the groups that are finite
            np.testing.assert_array_equal(found[quantity][rest], clean[quantity][rest])


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_rounding_by_chance_is_right_in_the_mean_and_the_same_for_a_key(name):
    config = replace(QUANTIZATIONS[name], stochastic_rounding=True)
    arrays = draw()
    keys = jax.random.split(jax.random.key(0), 64)
    each = [jax.device_get(run(*arrays, config, True, "cpu", key)) for key in keys]
    drawn = {quantity: np.stack([one[quantity] for one in each]) for quantity in each[0]}
    again = jax.device_get(run(*arrays, config, True, "cpu", keys[0]))
    nearest = jax.device_get(run(*arrays, QUANTIZATIONS[name], True, "cpu"))
    np.testing.assert_array_equal(drawn["value0"][0], nearest["value0"])  # forward nothing is left to chance
    lhs, weights, cotangents = (jax.tree.map(lambda a: np.asarray(a, np.float64), part) for part in arrays)
    # The mean is that of cotangents which nothing has rounded.
    plain = expected(replace(QUANTIZATIONS[name], cotangents=None), lhs, weights, SIZES, cotangents, transpose=True)
    for quantity in ("dlhs", "dweight0", "dweight1"):
        assert (drawn[quantity][0] != drawn[quantity][1]).any()
        np.testing.assert_array_equal(drawn[quantity][0], again[quantity])
        # Errors that have no common part shrink by the root of their number.
        exact = plain[quantity][0]
        of_one, of_mean = (
            np.sqrt(np.mean(np.square(array - exact))) for array in (drawn[quantity], drawn[quantity].mean(0))
        )
        assert of_one > 0
        assert of_mean < 1.5 / np.sqrt(len(keys)) * of_one
    with pytest.raises(ValueError, match="stochastic_rounding=True needs a random key, got None"):
        run(*arrays, config, True, "cpu")
    lhs, weights = jax.tree.map(jnp.asarray, (arrays[0], tuple(arrays[1])))
    values = quantized_matmuls(
        lhs, weights, jnp.asarray(SIZES), config=config, transpose_rhs=True, implementation="cpu"
    )
    np.testing.assert_array_equal(values[0], nearest["value0"])  # as in evaluation, which has no gradient


def test_each_call_of_the_backward_pass_is_chosen_by_what_it_is_given():
    arrays, sizes = draw(), jnp.asarray(SIZES)
    choice = Directions(forward="cpu", backward="xla")
    with record_selections() as selections:
        options = {"transpose_rhs": True, "implementation": choice}
        jax.eval_shape(
            lambda lhs, weights: quantized_matmuls(lhs, weights, sizes, config=QUANTIZATIONS["fp8"], **options),
            arrays[0],
            tuple(arrays[1]),
        )
    chosen = [(s.call.direction, s.chosen.name, dict(s.call.formats)) for s in selections]
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    assert chosen == [
        ("forward", "cpu", {"lhs": e4m3, "rhs": e4m3}),
        ("dlhs", "xla", {"lhs": e5m2, "rhs": e4m3}),
        ("drhs", "xla", {"lhs": e4m3, "cotangent": e5m2}),
    ]
    # What is folded into the cotangent is no scale of the operand any more.
    assert selections[1].call.arrays["rhs_scale"].shape == (1, 1, 1)
    assert selections[2].call.arrays["lhs_scale"].shape == (1, 1)


def test_a_kernel_without_a_transposed_matmul_of_its_own_is_refused_for_that_gradient():
    arrays, sizes = draw(), jnp.asarray(SIZES)
    choice = Directions(backward="megablox")
    with pytest.raises(CannotRunError, match=r"\(dlhs\) .*\n  megablox: it takes no quantised operands"):
        quantized_matmuls(
            jnp.asarray(arrays[0]),
            tuple(map(jnp.asarray, arrays[1])),
            sizes,
            config=QUANTIZATIONS["int8_weights"],
            transpose_rhs=True,
            implementation=choice,
        )


def test_a_gradient_of_a_gradient_is_refused_with_the_reason():
    arrays = jax.tree.map(jnp.nan_to_num, jax.tree.map(jnp.asarray, draw()))
    sizes = jnp.asarray(SIZES)

    def loss(lhs):
        values = quantized_matmuls(lhs, tuple(arrays[1]), sizes, config=QUANTIZATIONS["fp8"], transpose_rhs=True)
        return sum(jnp.sum(jnp.sin(value)) for value in values)

    with pytest.raises(NotImplementedError, match="gradients of first order alone"):
        jax.grad(lambda lhs: jnp.sum(jax.grad(loss)(lhs) ** 2))(arrays[0])


@pytest.mark.ci
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_the_error_is_no_larger_than_that_of_qwixs_quantised_ragged_dot(name):
    qt = pytest.importorskip("qwix._src.core.ragged_dot_qt")
    config = QUANTIZATIONS[name]
    live, (lhs, weights, cotangents) = int(SIZES.sum()), jax.tree.map(np.nan_to_num, draw(transpose=False))
    lhs, weight, cotangent, sizes = lhs[:live], weights[0], cotangents[0][:live], jnp.asarray(SIZES)
    theirs = qt.RaggedDotQtConfig(
        lhs_qtype=config.rows,
        rhs_qtype=config.weights,
        dlhs_grad_qtype=config.cotangents,
        drhs_grad_qtype=config.cotangents,
    )

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(matmul, lhs, weight, cotangent):
        value, vjp = jax.vjp(matmul, lhs, weight)
        return value, *vjp(cotangent)

    matmuls = (
        lambda lhs, weight: grouped_matmul(lhs, weight, sizes),
        lambda lhs, weight: quantized_matmuls(lhs, (weight,), sizes, config=config)[0],
        lambda lhs, weight: qt.ragged_dot_qt(lhs, weight, sizes, theirs),
    )
    plain, found, other = (jax.device_get(value_and_gradients(m, lhs, weight, cotangent)) for m in matmuls)
    for quantity, exact, ours, qwixs in zip(("value", "dlhs", "drhs"), plain, found, other):
        error, others = (np.sqrt(np.mean(np.square(array - exact))) for array in (ours, qwixs))
        assert 0.5 * others <= error <= 1.3 * others, quantity
    # Of the group with small gradients they are far nearer where no exponent keeps their resolution.
    error, others = (np.sqrt(np.mean(np.square(array[2] - plain[2][2]))) for array in (found[2], other[2]))
    assert error < (0.6 if name == "int8" else 1.3) * others


REFUSED = {
    "format": ({"weights": "int4"}, "format of weights 'int4'"),
    "scale of nothing": ({"weights": E4M3, "row_scale": 1.0}, "row_scale=1.0 is the scale of quantised rows"),
    "zero": ({"weights": E4M3, "weight_scale": 0.0}, "expected weight_scale > 0 and finite, got 0.0"),
    "block": ({"weights": E4M3, "block": 0}, "expected block to be a positive integer, got 0"),
    "chance": ({"weights": E4M3, "stochastic_rounding": True}, "stochastic_rounding=True is of cotangents"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_config_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QuantConfig(**options)


def test_blocks_must_divide_the_sizes():
    config = replace(QUANTIZATIONS["fp8"], block=24)
    with pytest.raises(ValueError, match="expected sizes divisible by block=24, got"):
        quantized_matmuls(jnp.ones((4, 64)), (jnp.ones((1, 64, 48)),), jnp.asarray([4]), config=config)


def test_kernels_that_take_no_quantised_operands_are_refused_when_they_are_named():
    why_not = functools.partial(quantizes_why_not, "grouped_matmul")
    assert why_not(("megablox", "cpu")) is None
    assert why_not("megablox").startswith("megablox (forward) takes no quantised operands; use auto, cpu")
    assert why_not(Directions(backward="gmm_v2")).startswith("gmm_v2 (backward) takes no quantised operands")
