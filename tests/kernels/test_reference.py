"""The references against loops in NumPy, which share no code with them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import OPERATIONS
from tests.kernels.compare import beyond_rounding, run
from tests.kernels.test_transforms import SPECS

CASES = [
    pytest.param(name, spec, id=f"{name}-{spec.name}")
    for name in OPERATIONS
    for spec in operation(name).specs
    if not spec.large
]


# Its arithmetic is that of float64; what a narrow type changes is the same in every call.
@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(
            *case.values, id=case.id, marks=[] if case.values[1].name == SPECS[case.values[0]] else [pytest.mark.slow]
        )
        for case in CASES
    ],
)
def test_reference_agrees_with_numpy_but_for_rounding(name, spec):
    example = spec.example("bfloat16")
    assert beyond_rounding(name, example, run(name, example, "reference")) == {}


@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow] if place % 4 else [])
        for place, case in enumerate(CASES)
    ],
)
def test_reference_agrees_with_numpy_to_the_last_digits_of_float64(name, spec):
    with jax.enable_x64(True):
        example = spec.example("float64")
        arrays, cotangent = jax.tree.map(
            lambda a: a.astype("float64") if jnp.issubdtype(a.dtype, jnp.floating) else a,
            (dict(example.arrays), example.cotangent),
        )
        options = {key: value for key, value in example.options.items() if key != "preferred_element_type"}
        example = dataclasses.replace(example, arrays=arrays, cotangent=cotangent, options=options)
        found = run(name, example, "reference")
        assert {quantity: str(array.dtype) for quantity, array in found.items()} == dict.fromkeys(found, "float64")
        assert beyond_rounding(name, example, found) == {}
