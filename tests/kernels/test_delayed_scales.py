"""Delayed scaling: values, gradients and largest values of several steps, against a simulation by hand."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.amax import Amax
from raggedmoe.kernels.grouped_matmul.quantized_matmuls import quantized_matmuls
from raggedmoe.kernels.quant_config import QUANTIZATIONS, QuantConfig
from tests.kernels.delayed_oracle import Histories, one_step
from tests.kernels.test_quantized_training import SIZES, TAKERS, draw

LENGTH, NUM_STEPS, SPIKE = 3, 7, 2  # the spike is forgotten before the last step


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def run(lhs, weights, cotangents, before, config, transpose, implementation):
    def products(lhs, weights, amax):
        options = {"transpose_rhs": transpose, "implementation": implementation}
        return quantized_matmuls(lhs, tuple(weights), jnp.asarray(SIZES), config=config, amax=amax, **options)

    values, vjp = jax.vjp(products, lhs, weights, before)
    dlhs, dweights, current = vjp(tuple(cotangents))
    numbered = {f"value{n}": value for n, value in enumerate(values)}
    return {**numbered, "dlhs": dlhs, **{f"dweight{n}": dweight for n, dweight in enumerate(dweights)}}, current


def by_name(config, value):
    """What a call is given or gives back, from or to names."""
    names = {"weights": ["weight0", "weight1"], "cotangents": ["cotangent0", "cotangent1"], "rows": ["rows"]}
    return {name: value(name) for operand, of in names.items() for name in of if config.is_delayed(operand)}


def amax_of(values):
    return Amax(
        rows=values.get("rows"),
        weights=tuple(values.get(f"weight{n}") for n in range(2)),
        cotangents=tuple(values.get(f"cotangent{n}") for n in range(2)),
    )


def arrays_of_step(number, dtype, transpose):
    """Rows, weights and cotangents, of which all rows are a thousand times as large in one step."""
    lhs, weights, cotangents = draw(dtype, transpose, seed=number)
    factor = np.asarray(1000 if number == SPIKE else 1, lhs.dtype)
    return lhs * factor, weights, [g * factor for g in cotangents]


CONFIGS = {
    **QUANTIZATIONS,
    "constant": replace(QUANTIZATIONS["fp8"], weight_scale=2.0**-9),  # the other operands have histories
    "gradients": QuantConfig(weights="int8", cotangents="float8_e5m2"),
}
CASES = [
    *((name, "cpu", "float32", True) for name in CONFIGS),
    *(pytest.param(name, "xla", "bfloat16", False, marks=pytest.mark.ci) for name in ("fp8", "int8")),
    *(pytest.param("fp8", name, "float32", True, marks=pytest.mark.ci) for name in TAKERS if name != "cpu"),
]


@pytest.mark.parametrize(("name", "implementation", "dtype", "transpose"), CASES)
def test_steps_are_those_of_a_simulation_by_hand(name, implementation, dtype, transpose):
    config = replace(CONFIGS[name], history=LENGTH)
    oracle, histories = Histories(LENGTH), by_name(config, lambda name: np.zeros(LENGTH, np.float32))
    for number in range(NUM_STEPS):
        lhs, weights, cotangents = arrays_of_step(number, dtype, transpose)
        before = amax_of({name: jnp.asarray(history.max()) for name, history in histories.items()})
        inputs = jax.tree.map(jnp.asarray, (lhs, weights, cotangents))
        found, current = jax.device_get(run(*inputs, before, config, transpose, implementation))
        wide = jax.tree.map(lambda array: np.asarray(array, np.float64), (lhs, weights, cotangents))
        wanted = one_step(config, oracle, wide[0], wide[1], SIZES, wide[2], transpose=transpose)
        for quantity, (value, bound) in wanted.items():
            array = np.asarray(found[quantity], np.float64)
            # What is rounded to the type of the result is within the bound of the value.
            allowed = bound + float(jnp.finfo(found[quantity].dtype).eps) * (np.abs(value) + bound)
            assert np.isfinite(array).all(), (number, quantity)
            assert (np.abs(array - value) <= allowed).all(), (number, quantity)
        now = {"rows": current.rows}
        now |= {f"weight{n}": value for n, value in enumerate(current.weights)}
        now |= {f"cotangent{n}": value for n, value in enumerate(current.cotangents)}
        histories = {n: np.append(now[n], history[:-1]) for n, history in histories.items()}
        for n, history in histories.items():
            np.testing.assert_array_equal(history, oracle.values[n], err_msg=f"{n} after step {number}")
    assert histories.keys() == oracle.values.keys()


def test_what_is_larger_than_before_is_clipped_and_what_follows_is_not():
    config = replace(QUANTIZATIONS["int8"], history=LENGTH)
    lhs, weights, cotangents = jax.tree.map(jnp.asarray, arrays_of_step(0, "float32", True))
    known = amax_of(by_name(config, lambda name: jnp.asarray(1e9, jnp.float32)))
    _, largest = run(lhs, weights, cotangents, known, config, True, "cpu")
    plain, _ = run(lhs, weights, cotangents, largest, config, True, "cpu")
    clipped, seen = run(1000 * lhs, weights, cotangents, largest, config, True, "cpu")
    wide, _ = run(1000 * lhs, weights, cotangents, seen, config, True, "cpu")
    live = np.repeat(np.arange(len(SIZES)), SIZES).size
    size = {name: np.abs(found["value0"][:live]).max() for name, found in (("plain", plain), ("clipped", clipped))}
    assert np.isfinite(clipped["value0"][:live]).all()
    assert size["clipped"] < 20 * size["plain"]  # no entry of a row is above what was known
    np.testing.assert_allclose(wide["value0"][:live], 1000 * plain["value0"][:live], rtol=1e-5, atol=1e-3)
    assert float(seen.rows) == float(np.abs(1000 * np.asarray(lhs)[:live]).max())


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_what_is_not_finite_stays_with_its_own_group_and_enters_no_history(name):
    config = replace(QUANTIZATIONS[name], history=LENGTH)
    lhs, weights, cotangents = (jax.tree.map(np.nan_to_num, part) for part in draw())
    before = amax_of(by_name(config, lambda name: jnp.asarray(4.0, jnp.float32)))
    clean, largest = run(lhs, weights, cotangents, before, config, True, "cpu")
    spoilt = [lhs.copy(), weights, [g.copy() for g in cotangents]]
    first, second = 1, int(SIZES[:3].sum())  # a row of group 0, and one of group 3
    spoilt[0][first, 5], spoilt[2][0][second, 3] = np.nan, np.inf
    found, seen = run(*spoilt, before, config, True, "cpu")
    assert np.isnan(found["value0"][first]).all()
    assert not np.isfinite(found["dlhs"][second]).any()
    assert np.isnan(found["dweight0"][3]).all()
    for quantity, touched in (("dlhs", [second]), ("value0", [first]), ("dweight0", [0, 3]), ("dweight1", [0])):
        rest = np.delete(np.arange(clean[quantity].shape[0]), touched)
        np.testing.assert_array_equal(found[quantity][rest], clean[quantity][rest])
    assert all(np.isfinite(value) for value in jax.tree.leaves(seen))
    np.testing.assert_array_equal(seen.weights, largest.weights)


def test_a_first_step_without_histories_is_that_of_empty_ones():
    config = replace(QUANTIZATIONS["fp8"], history=LENGTH)
    arrays = jax.tree.map(jnp.asarray, arrays_of_step(0, "float32", True))
    empty = amax_of(by_name(config, lambda name: jnp.zeros((), jnp.float32)))
    found, _ = run(*arrays, empty, config, True, "cpu")
    without, _ = run(*arrays, None, config, True, "cpu")
    jax.tree.map(np.testing.assert_array_equal, found, without)


def test_a_history_and_blocks_contradict_each_other():
    with pytest.raises(ValueError, match="history=4 makes one scale for a whole operand, got block=16 as well"):
        replace(QUANTIZATIONS["fp8"], history=4, block=16)
    with pytest.raises(ValueError, match="expected history to be a positive integer, got 0"):
        replace(QUANTIZATIONS["fp8"], history=0)
