"""Rows moved in 8 bits, by a move within one device: what arrives, and the straight-through gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.qarray import LHS_FORMATS
from raggedmoe.kernels.quantize import absmax_scale, encode_bits
from raggedmoe.kernels.quantized_move import move_quantized
from tests.kernels.quantized_training import absmax, round_to

NUM_ROWS, WIDTH = 24, 40
PLACES = np.append(np.random.default_rng(3).permutation(NUM_ROWS - 2)[:15], [-1, -1, 4, 4]).astype(np.int32)


def take_rows(array, places):
    """Copy each row to its places; where none comes there are zeros. The last two rows go nowhere."""
    return jnp.where((places >= 0)[:, None], jnp.take(array, places, axis=0, mode="clip"), 0)


def draw(dtype):
    """Rows of very different sizes, of which one is zero, and two that go nowhere hold NaN; and cotangents."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((NUM_ROWS, WIDTH)) * np.exp2(rng.integers(-20, 20, (NUM_ROWS, 1)))
    rows[4] = 0
    rows[-2:] = np.nan
    return jnp.asarray(rows, dtype), jnp.asarray(rng.standard_normal((len(PLACES), WIDTH)), dtype)


@functools.partial(jax.jit, static_argnums=2)
def run(rows, cotangent, qtype):
    value, vjp = jax.vjp(lambda rows: move_quantized(take_rows, qtype, rows, jnp.asarray(PLACES)), rows)
    return value, *vjp(cotangent)


every_format = pytest.mark.parametrize("qtype", LHS_FORMATS)
every_type = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@every_type
@every_format
def test_what_arrives_is_quantised_by_rows_and_its_gradient_comes_back_as_it_is(qtype, dtype):
    rows, cotangent = draw(dtype)
    value, gradient = run(rows, cotangent, qtype)
    assert value.dtype == gradient.dtype == rows.dtype
    eps = float(jnp.finfo(dtype).eps)
    wide = np.asarray(rows, np.float64)[:-2]
    expected = round_to(wide, qtype, absmax(wide, qtype, (1, WIDTH), None), ideal=False)
    here, came = PLACES >= 0, PLACES[PLACES >= 0]
    found = np.asarray(value, np.float64)
    np.testing.assert_array_equal(found[~here], 0)
    bound = expected.slack + eps * np.abs(expected.values)
    assert (np.abs(found[here] - expected.values[came]) <= bound[came]).all()
    assert (found[here] != wide[came]).any()
    sums, terms = np.zeros(rows.shape), np.zeros(rows.shape)
    for place, row in zip(PLACES[here], np.asarray(cotangent, np.float64)[here]):
        sums[place] += row
        terms[place] += np.abs(row)
    assert (np.abs(np.asarray(gradient, np.float64) - sums) <= 2 * eps * terms).all()
    np.testing.assert_array_equal(np.asarray(gradient)[np.setdiff1d(np.arange(NUM_ROWS), came)], 0)


@every_type
@every_format
def test_rows_that_a_matmul_quantises_alike_keep_their_values(qtype, dtype):
    """So rows that were sent in the format in which they are multiplied are rounded once."""
    rows = draw(dtype)[0][:-2]

    @jax.jit
    def codes_before_and_after(rows):
        sent = move_quantized(lambda array, _: array, qtype, rows, None)
        return tuple(encode_bits(each, absmax_scale(each, qtype, (len(each), 1)), qtype) for each in (rows, sent))

    np.testing.assert_array_equal(*codes_before_and_after(rows))


@every_format
def test_a_row_that_is_not_finite_spoils_no_other(qtype):
    rows, cotangent = draw("float32")
    clean, gradient = run(rows, cotangent, qtype)
    nan, inf = int(PLACES[0]), int(PLACES[1])
    spoilt, same = run(rows.at[nan, 3].set(jnp.nan).at[inf, 0].set(jnp.inf), cotangent, qtype)
    assert np.isnan(spoilt[:2]).all()
    np.testing.assert_array_equal(spoilt[2:], clean[2:])
    np.testing.assert_array_equal(same, gradient)


def test_no_rows_are_moved_as_they_are():
    empty = jnp.zeros((0, WIDTH))
    assert move_quantized(lambda array, _: array, "int8", empty, None).shape == empty.shape
