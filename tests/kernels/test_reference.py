"""The references against loops in NumPy, which share no code with them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from kernels.compare import beyond_rounding, run
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import OPERATIONS

CASES = [
    pytest.param(name, spec, id=f"{name}-{spec.name}")
    for name in OPERATIONS
    for spec in operation(name).specs
    if not spec.large
]


# float32 is in between, and is what the properties are tested in.
@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize(("name", "spec"), CASES)
def test_reference_agrees_with_numpy_but_for_rounding(name, spec, dtype):
    example = spec.example(dtype)
    assert beyond_rounding(name, example, run(name, example, "reference")) == {}


@pytest.mark.parametrize(("name", "spec"), CASES)
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
