"""Arrays made into 8 bits: every value of a format comes back, and every other goes to the nearest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.quantize import LARGEST, absmax_scale, encode, quantize
from tests.kernels.quantized_oracle import VALUES, nearest_codes

FORMATS = tuple(LARGEST)


@pytest.mark.parametrize("qtype", FORMATS)
def test_the_largest_value_of_a_format_is_its_largest_code(qtype):
    assert LARGEST[qtype] == np.nanmax(np.where(np.isfinite(VALUES[qtype]), VALUES[qtype], np.nan))


@pytest.mark.parametrize("qtype", FORMATS)
def test_every_value_of_a_format_comes_back_as_its_own_code(qtype):
    values = VALUES[qtype]
    kept = np.isfinite(values) & ((values != -128) | (qtype != "int8"))  # int8 is used as far as it has negatives
    found = jax.jit(lambda array: encode(array, jnp.ones(1), qtype))(jnp.asarray(values[kept], jnp.float32))
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.arange(256)[kept])


@pytest.mark.parametrize("qtype", FORMATS)
def test_values_between_go_to_the_nearest_and_halves_to_the_even_code(qtype):
    values = np.unique(VALUES[qtype][np.isfinite(VALUES[qtype])])
    values = values[np.abs(values) <= LARGEST[qtype]]
    halves = (values[:-1] + values[1:]) / 2
    rng = np.random.default_rng(0)
    largest = LARGEST[qtype]
    between = np.concatenate(
        [
            halves,
            np.nextafter(halves.astype(np.float32), np.float32(np.inf)),
            np.nextafter(halves.astype(np.float32), np.float32(-np.inf)),
            rng.uniform(-largest, largest, 2000),
            largest * rng.choice([-1, 1], 2000) * 2.0 ** rng.uniform(-20, 0, 2000),
            [2 * largest, -3 * largest],
        ]
    ).astype(np.float32)
    found = np.asarray(jax.jit(lambda array: encode(array, jnp.ones(1), qtype))(jnp.asarray(between)))
    np.testing.assert_array_equal(VALUES[qtype][found.view(np.uint8)], VALUES[qtype][nearest_codes(between, qtype)])


@pytest.mark.parametrize("qtype", FORMATS)
@pytest.mark.parametrize("scale_shape", [(6, 1), (1, 8), (2, 4), (6, 8), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_stored_is_within_half_a_step_of_the_array(qtype, scale_shape, dtype):
    rng = np.random.default_rng(1)
    array = jnp.asarray(rng.standard_normal((6, 8)) * np.exp2(rng.integers(-30, 30, (6, 1))), dtype)
    stored = quantize(array, qtype, scale_shape)
    assert (stored.qvalue.dtype, stored.scale.dtype, stored.scale.shape) == (qtype, jnp.float32, scale_shape)
    exact = np.asarray(array, np.float64)
    scale = np.asarray(stored.scale, np.float64)
    blocks = exact.reshape(scale_shape[0], 6 // scale_shape[0], scale_shape[1], 8 // scale_shape[1])
    largest = np.abs(blocks).max((1, 3))
    # XLA may multiply by the rounded reciprocal of the format's largest value.
    np.testing.assert_allclose(scale, largest / LARGEST[qtype], rtol=2.01 * 2.0**-24)
    scale = scale.repeat(6 // scale_shape[0], 0).repeat(8 // scale_shape[1], 1)
    back = VALUES[qtype][np.asarray(stored.qvalue).view(np.uint8)] * scale
    # Half of the step to the next value, and the rounding of the quotient.
    relative, least = {"int8": (0, 0.5), "float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17)}[
        qtype
    ]
    bound = np.maximum(relative * np.abs(exact), least * scale) + 2 * 2.0**-24 * np.abs(exact)
    assert (np.abs(back - exact) <= bound).all()
    assert (np.abs(back - exact) > 0).any() or scale_shape == (6, 8)


def test_zeros_have_a_scale_of_one_and_the_smallest_numbers_a_normal_one():
    array = jnp.asarray([[0.0, 0.0], [1e-37, -1e-37], [1.0, 2.0]])
    stored = quantize(array, "int8", (3, 1))
    np.testing.assert_array_equal(stored.scale[0], 1)
    assert float(stored.scale[1, 0]) == np.finfo(np.float32).tiny
    np.testing.assert_array_equal(stored.qvalue[0], 0)


@pytest.mark.parametrize("qtype", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_nan_in_its_own_block_alone(qtype, value):
    stored = quantize(jnp.asarray([[1.0, value], [1.0, 2.0]]), qtype, (2, 1))
    with np.errstate(invalid="ignore"):  # 0 · inf
        products = VALUES[qtype][np.asarray(stored.qvalue).view(np.uint8)] * np.asarray(stored.scale)
    assert np.isnan(products[0, 1])
    assert np.isfinite(products[1]).all()


def test_a_scale_that_does_not_divide_and_an_unknown_format_are_refused():
    with pytest.raises(ValueError, match=r"divide those of the array, \[6, 8\], got \[4, 1\]"):
        absmax_scale(jnp.ones((6, 8)), "int8", (4, 1))
    with pytest.raises(ValueError, match=r"'int4'.*expected one of float8_e4m3fn"):
        quantize(jnp.ones((6, 8)), "int4", (6, 1))


@pytest.mark.parametrize("qtype", FORMATS)
def test_chance_makes_no_more_of_the_largest_value(qtype, monkeypatch):
    """A number just below one, added to it, would be rounded to one more, which float8 has as inf or NaN."""
    just_below = np.nextafter(np.float32(1), np.float32(0))
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, just_below, dtype))
    largest = LARGEST[qtype] * np.asarray([1, -1], np.float32)
    found = encode(jnp.asarray(largest), jnp.ones(1), qtype, jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(found).astype(np.float32), largest)
