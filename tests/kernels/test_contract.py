"""The one test body of every implementation: value and gradients against the reference, within the derived bound.

Every call runs in both types. Compiled as users compile it, which takes twice the time, it is in one of them, by turns.
"""

import pytest

from kernels.compare import on_cpu
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.verify.check import check

CASES = [
    pytest.param(
        name,
        spec,
        dtype,
        id=f"{name}-{spec.name}-{dtype}",
        marks=[pytest.mark.as_shipped] if (place + turn) % 2 == 0 else [],
    )
    for name in OPERATIONS
    for place, spec in enumerate(spec for spec in operation(name).specs if not spec.large)
    for turn, dtype in enumerate(("float32", "bfloat16"))
]


@pytest.mark.parametrize(("name", "spec", "dtype"), CASES)
def test_every_implementation_agrees_with_the_reference(name, spec, dtype):
    checks = list(check(operation(name), None, spec, dtype))
    # What says of itself that the tests run it must have been run.
    assert {found.implementation for found in checks} >= set(on_cpu(name)) - {"reference"} > set()
    assert [found for found in checks if not found.passed] == []
