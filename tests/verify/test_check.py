"""The check fails what is wrong: each broken implementation by the quantity that it breaks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.kernels.value_and_gradients import jitted_value_and_gradients
from raggedmoe.verify.check import check, runnable


def spoiled(name, spoil):
    """The operation with an implementation "bad" that spoils its arguments or its result."""
    right = operation(name).function

    def function(*args, implementation, **kwargs):
        call = functools.partial(right, *args, implementation="reference")
        return call(**kwargs) if implementation == "reference" else spoil(call, kwargs)

    return dataclasses.replace(operation(name), function=function)


def scaled(call, arguments):
    return call(**arguments) * jnp.float32(1 + 1e-5)


def of_another_type(call, arguments):
    return call(**arguments).astype(jnp.float16)


def without_weight_gradient(call, arguments):
    return call(**arguments | {"weights": jax.lax.stop_gradient(arguments["weights"])})


def not_finite(call, arguments):
    return call(**arguments).at[-1].set(jnp.nan)


def with_narrow_inputs(call, arguments):
    return call(**arguments | {"rows": arguments["rows"].astype(jnp.bfloat16).astype(jnp.float32)})


@pytest.mark.parametrize(
    ("spoil", "failing"),
    [
        (scaled, {"value", "drows", "dweights"}),
        (of_another_type, {"value"}),
        (without_weight_gradient, {"dweights"}),
        (not_finite, {"value"}),
        (with_narrow_inputs, {"value", "drows", "dweights"}),
    ],
)
def test_a_spoiled_implementation_fails_where_it_is_wrong(spoil, failing):
    bad = spoiled("ragged_gather_reduce", spoil)
    spec = next(spec for spec in bad.specs if spec.name == "plain")
    found = {c.quantity for c in check(bad, ["bad"], spec, "float32") if not c.passed}
    assert found >= failing  # casting the result rounds its cotangent as well, and a constant row has no gradient
    assert "value" in found or found == failing


@pytest.mark.ci
def test_sums_kept_in_bfloat16_fail():
    def narrow(call, arguments):
        sums = jnp.zeros((arguments["lhs"].shape[0], arguments["rhs"].shape[1]), jnp.bfloat16)
        for first in range(0, 2880, 288):
            part = {name: arguments[name][..., first : first + 288] for name in ("lhs", "rhs")}
            sums = sums + call(**arguments | part)
        return sums

    bad = spoiled("grouped_matmul", narrow)
    spec = next(spec for spec in bad.specs if spec.name == "width-2880")
    assert not next(c for c in check(bad, ["bad"], spec, "bfloat16") if c.quantity == "value").passed


def test_the_reference_passes_its_own_check():
    same = spoiled("ragged_gather", lambda call, arguments: call(**arguments))
    checks = list(check(same, ["bad"], same.specs[0], "float32"))
    assert [(c.share, c.problem) for c in checks] == [(0.0, None)] * len(checks)


def test_the_reference_is_not_checked_against_itself():
    gather = operation("ragged_gather")
    assert "reference" not in runnable(gather, gather.specs[0].example("float32"))


def test_a_check_without_a_number_has_not_passed():
    gather = operation("ragged_gather")
    one = next(check(gather, None, gather.specs[0], "float32"))
    assert one.passed
    assert not dataclasses.replace(one, share=float("nan")).passed


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_bounds_each_quantity_that_its_reference_computes(name):
    example = operation(name).specs[0].example("float32")
    options = (*example.options.items(), ("implementation", "reference"))
    reference = jitted_value_and_gradients(operation(name).function, options, dict(example.arrays), example.cotangent)
    bounds = operation(name).error_bounds(example, reference)
    assert {quantity: bound.shape for quantity, bound in bounds.items()} == {
        quantity: array.shape for quantity, array in reference.items()
    }
    assert all((bound >= 0).all() for bound in bounds.values())
