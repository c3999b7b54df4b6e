"""The one test body of every implementation: value and gradients against the reference, within the derived bound.

Every call runs in both types. Compiled as users compile it, which takes twice the time, it is in one of them, by turns.
"""

import pytest

from kernels.compare import FAST
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.verify.check import check

CASES = [
    pytest.param(
        name,
        implementation,
        spec,
        dtype,
        id=f"{name}-{implementation}-{spec.name}-{dtype}",
        marks=[pytest.mark.as_shipped] if (place + turn) % 2 == 0 else [],
    )
    for name in OPERATIONS
    for place, spec in enumerate(spec for spec in operation(name).specs if not spec.large)
    for turn, dtype in enumerate(("float32", "bfloat16"))
    for operation_name, implementation in FAST  # neighbours, so that they share the compiled reference
    if operation_name == name
]


@pytest.mark.parametrize(("name", "implementation", "spec", "dtype"), CASES)
def test_every_implementation_agrees_with_the_reference(name, implementation, spec, dtype):
    checks = list(check(operation(name), [implementation], spec, dtype))
    assert "value" in {found.quantity for found in checks}
    assert [found for found in checks if not found.passed] == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_an_implementation_that_the_tests_run(name):
    assert [implementation for operation_name, implementation in FAST if operation_name == name] != []
