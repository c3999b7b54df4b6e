"""Parameters are checked by the names of their axes, not by their sizes."""

import re

import jax
import numpy as np
import pytest

from raggedmoe.params import ParamSpec, check_param, check_params, init_params

SQUARE = ParamSpec(shape=(2, 4, 4), dtype="float32", axes=("E", "F", "D"), contracts="D")
AXES = {"wi_0": ("E", "F", "D")}
WEIGHT = np.zeros((2, 4, 4), np.float32)


def test_the_declared_axes_are_accepted():
    check_params({"wi_0": SQUARE}, {"wi_0": WEIGHT}, AXES)


@pytest.mark.parametrize(
    ("axes", "order"), [(("E", "D", "F"), (0, 2, 1)), (("F", "D", "E"), (2, 0, 1)), (("D", "E", "F"), (1, 2, 0))]
)
def test_swapped_axes_are_refused_with_the_transpose_that_mends_them(axes, order):
    sizes = {"E": 2, "F": 4, "D": 4}
    array = np.zeros([sizes[axis] for axis in axes], np.float32)
    message = f"expected wi_0 (E, F, D) = (2, 4, 4), got ({', '.join(axes)}) = {array.shape}"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_param("wi_0", SQUARE, array, axes)
    assert f"transpose it with {order}" in str(error.value)
    check_param("wi_0", SQUARE, array.transpose(order), tuple(axes[i] for i in order))


def test_other_axes_are_refused():
    with pytest.raises(ValueError, match="check which tensor this is"):
        check_param("wi_0", SQUARE, WEIGHT, ("E", "V", "D"))


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match="check the configuration's sizes"):
        check_param("wi_0", SQUARE, np.zeros((2, 4, 5)), ("E", "F", "D"))


def test_missing_and_unknown_names_are_listed():
    with pytest.raises(ValueError, match=re.escape("missing ['wi_0'], unknown ['wi_2']")):
        check_params({"wi_0": SQUARE}, {"wi_2": WEIGHT}, AXES)


def test_a_tensor_without_named_axes_is_refused():
    with pytest.raises(ValueError, match=r"expected the axes of wi_0.*sizes alone cannot tell F from D"):
        check_params({"wi_0": SQUARE}, {"wi_0": WEIGHT}, {})


def test_a_spec_names_every_dimension():
    with pytest.raises(ValueError, match="one axis name for each"):
        ParamSpec(shape=(2, 3), dtype="float32", axes=("E",))


def test_initial_values_have_the_declared_shape_type_and_scale():
    specs = {
        "kernel": ParamSpec(shape=(64, 400), dtype="bfloat16", axes=("F", "D"), contracts="D"),
        "bias": ParamSpec(shape=(64,), dtype="float32", axes=("F",), init="zeros"),
        "scale": ParamSpec(shape=(64,), dtype="float32", axes=("F",), init="ones"),
    }
    params = init_params(specs, jax.random.key(0))
    assert {n: (p.shape, str(p.dtype)) for n, p in params.items()} == {n: (s.shape, s.dtype) for n, s in specs.items()}
    assert float(params["kernel"].astype("float32").std()) == pytest.approx(400**-0.5, rel=0.02)
    assert (params["bias"] == 0).all()
    assert (params["scale"] == 1).all()


def test_a_normal_parameter_must_say_what_it_contracts():
    with pytest.raises(ValueError, match="'normal' with what it contracts"):
        init_params({"w": ParamSpec(shape=(2,), dtype="float32", axes=("D",))}, jax.random.key(0))
