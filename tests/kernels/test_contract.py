"""The one test body of every implementation: value and gradients against loops in NumPy, within the derived bound.

Every call runs in float32 or in bfloat16, by turns, and in the other type where there is time (`slow`). One call of
every implementation runs as users compile it; so does the one of several tiles, for which the tile loops of the CPU
have many sizes that are cut down where compiling must be quick.
"""

import pytest

from kernels.compare import FAST, beyond_rounding, run
from kernels.test_transforms import SPECS
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import OPERATIONS


def marks_of(name, implementation, spec, turn):
    if turn % 2:
        return [pytest.mark.slow]
    all_sizes = implementation == "cpu" and spec.name == "several-tiles"
    return [pytest.mark.as_shipped] if all_sizes or spec.name == SPECS[name] else []


CASES = [
    pytest.param(
        name,
        implementation,
        spec,
        dtype,
        id=f"{name}-{implementation}-{spec.name}-{dtype}",
        marks=marks_of(name, implementation, spec, place + turn),
    )
    for name, implementation in FAST
    for place, spec in enumerate(spec for spec in operation(name).specs if not spec.large)
    for turn, dtype in enumerate(("float32", "bfloat16"))
]


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation", "spec", "dtype"), CASES)
def test_every_implementation_agrees_with_numpy(name, implementation, spec, dtype):
    example = spec.example(dtype)
    found = run(name, example, implementation)
    assert {quantity: str(array.dtype) for quantity, array in found.items()} == expected_types(name, example)
    assert beyond_rounding(name, example, found) == {}


def expected_types(name, example):
    """Results have the input's type, or the one asked for; gradients that of their argument."""
    value = example.options.get("preferred_element_type") or example.cotangent.dtype
    types = {"value": str(value)}
    for argument, array in example.arrays.items():
        if argument == "biases":
            types |= {f"dbiases.{part}": str(bias.dtype) for part, bias in array._asdict().items() if bias is not None}
        elif array is not None and array.dtype.kind not in "iu":
            types[f"d{argument}"] = str(array.dtype)
    return types


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_an_implementation_that_the_tests_run(name):
    assert [implementation for operation_name, implementation in FAST if operation_name == name] != []
