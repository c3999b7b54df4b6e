"""Digests tell a wrong result from a rounded one."""

import ml_dtypes
import numpy as np
import pytest

from raggedmoe.bench.compare import Digests, difference, digest

RNG = np.random.default_rng(0)
VALUE = RNG.standard_normal((9, 16, 24)).astype(np.float32)


def compare(found, dtype="float32", name="dwo"):
    return difference({name: digest(found)}, {name: digest(VALUE)}, dtype, inner=64)


def changed(at, by):
    array = VALUE.copy()
    array[at] = by
    return array


def test_the_same_values_pass_in_both_types():
    assert compare(VALUE) is None
    assert compare(VALUE.astype(ml_dtypes.bfloat16), "bfloat16") is None


def test_rounding_to_bfloat16_is_a_fault_of_float32():
    assert "of its norm" in compare(VALUE.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "found",
    [
        pytest.param(changed(3, 0), id="left out"),
        pytest.param(changed(3, np.nan), id="nan"),
        pytest.param(changed(3, VALUE[4]), id="another expert's"),
        pytest.param(changed(3, -VALUE[3]), id="sign"),
        pytest.param(VALUE * np.float32(1.1), id="scale"),
        pytest.param(VALUE[:-1], id="fewer"),
    ],
)
def test_a_wrong_row_is_named(found, dtype):
    assert compare(found, dtype).startswith("dwo")


def test_a_row_that_should_be_zero_must_be():
    zero = changed(3, 0)
    assert difference({"dwo": digest(zero)}, {"dwo": digest(zero)}, "float32", 64) is None
    assert "dwo[3]" in difference({"dwo": digest(VALUE)}, {"dwo": digest(zero)}, "float32", 64)


def test_a_missing_gradient_is_named():
    assert difference({}, {"dx": digest(VALUE)}, "float32", 64) == "expected dx, got nothing"


def test_digests_survive_json_and_are_joined_by_experts():
    whole = digest(VALUE)
    parts = Digests.join(digest(VALUE[i : i + 1]) for i in range(9))
    read = Digests.from_lists(parts.as_lists())
    np.testing.assert_array_equal(read.squares, whole.squares)
    np.testing.assert_array_equal(read.signed, whole.signed)
