"""What an expert's weights or rows hold, NaN and infinity too, reaches its own rows and gradients and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.value_and_gradients import value_and_gradients
from tests.kernels import numpy_oracle
from tests.kernels.compare import on_cpu
from tests.kernels.test_interpreted import KERNELS
from tests.kernels.tpu_interpreter import tpu_interpreter

ROWS, SIZES = 13, (4, 0, 5, 2)  # and two rows of no group
EMPTY, BUSY = 1, 2
NAMES = {"grouped_matmul": ("lhs", "rhs"), "expert_ffn": ("rows", "wi_0", "wi_1", "wo")}
INTERPRETED = {name: [each.name for of, each in KERNELS if of == name] for name in NAMES}
CASES = [(name, each) for name in NAMES for each in on_cpu(name)]


def finite_arrays(name):
    rng = np.random.default_rng(0)
    width, hidden = 8, 16
    shapes = dict.fromkeys(NAMES[name], (len(SIZES), hidden, width)) | {NAMES[name][0]: (ROWS, width)}
    arrays = {key: rng.standard_normal(shape, dtype=np.float32) for key, shape in shapes.items()}
    cotangent = rng.standard_normal((ROWS, hidden if name == "grouped_matmul" else width), dtype=np.float32)
    return arrays, cotangent, {"transpose_rhs": True} if name == "grouped_matmul" else {"activation": "silu"}


@functools.cache
def compiled(name, implementation):
    """One program for all of an implementation's cases."""
    options = finite_arrays(name)[2] | {"implementation": implementation}
    if implementation in INTERPRETED[name]:
        options["hardware"] = "v6e"
    function = functools.partial(operation(name).function, **options)
    return jax.jit(functools.partial(value_and_gradients, function))


def found_and_expected(name, implementation, spoil):
    arrays, cotangent, options = finite_arrays(name)
    spoil(arrays, cotangent)
    with np.errstate(all="ignore"):
        expected = getattr(numpy_oracle, name)(
            cotangent.astype(np.float64),
            **{key: array.astype(np.float64) for key, array in arrays.items()},
            group_sizes=SIZES,
            **options,
        )
    given = jax.tree.map(jnp.asarray, arrays) | {"group_sizes": jnp.asarray(SIZES, jnp.int32)}
    if implementation in INTERPRETED[name]:
        with tpu_interpreter():
            found = jax.device_get(compiled(name, implementation)(given, jnp.asarray(cotangent)))
    else:
        found = jax.device_get(compiled(name, implementation)(given, jnp.asarray(cotangent)))
    return found, expected


def weight(name, number, expert, value):
    def spoil(arrays, cotangent):
        arrays[NAMES[name][number]][expert, 3, 5] = value

    return spoil


def row(name, value, of_cotangent):
    def spoil(arrays, cotangent):
        (cotangent if of_cotangent else arrays[NAMES[name][0]])[5, 2] = value  # of the busy group

    return spoil


def spoilings(name):
    for number in range(1, len(NAMES[name])):
        for expert in (EMPTY, BUSY):
            for value in (np.nan, np.inf):
                yield f"{NAMES[name][number]} of expert {expert} {value}", weight(name, number, expert, value)
    for of_cotangent in (False, True):
        yield f"a row, cotangent {of_cotangent}", row(name, np.nan, of_cotangent)


def check_what_is_finite(name, implementation, what, spoil):
    """Everything as NumPy has it; what is not finite there need only be not finite here. Whether there is any."""
    found, expected = found_and_expected(name, implementation, spoil)
    assert found.keys() == expected.keys()
    for quantity, array in found.items():
        finite, message = np.isfinite(expected[quantity]), f"{quantity} with {what}"
        np.testing.assert_array_equal(np.isfinite(array), finite, err_msg=message)
        difference = np.abs(np.where(finite, array, 0) - np.where(finite, expected[quantity], 0))
        assert difference.max() < 1e-3, message
    return not all(np.isfinite(array).all() for array in expected.values())


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_what_is_not_finite_stays_in_its_own_group(name, implementation):
    for what, spoil in spoilings(name):
        spoilt = check_what_is_finite(name, implementation, what, spoil)
        assert spoilt == (f"expert {EMPTY}" not in what), what


# A run of the interpreter is seconds: all at once.
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(name, each, marks=[] if each == "megablox" else [pytest.mark.slow])
        for name in NAMES
        for each in INTERPRETED[name]
    ],
)
def test_what_is_not_finite_stays_in_its_own_group_in_interpreted_kernels(name, implementation):
    def spoil(arrays, cotangent):
        for matrix in NAMES[name][1:]:
            arrays[matrix][EMPTY] = np.inf
        arrays[NAMES[name][1]][BUSY, 3, 5] = np.nan
        cotangent[6, 2] = np.nan

    assert check_what_is_finite(name, implementation, "all", spoil)
