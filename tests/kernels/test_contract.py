"""The one test body of every implementation: value and gradients against the reference, within the derived bound."""

import pytest

from raggedmoe.compat import JAX_VERSION
from raggedmoe.hardware import hardware_named
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.proof import Level, level_on
from raggedmoe.kernels.registry import OPERATIONS, implementations
from raggedmoe.verify.check import check

CASES = [
    pytest.param(name, spec, dtype, id=f"{name}-{spec.name}-{dtype}")
    for name in OPERATIONS
    for spec in operation(name).specs
    if not spec.large
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("name", "spec", "dtype"), CASES)
def test_every_implementation_agrees_with_the_reference(name, spec, dtype):
    checks = list(check(operation(name), None, spec, dtype))
    on_cpu = {
        i.name
        for i in implementations(name).values()
        if level_on(i.full_name, i.proofs, hardware_named("cpu"), JAX_VERSION, ())[0] == Level.RUN
    }
    # What says of itself that the tests run it must have been run.
    assert {found.implementation for found in checks} >= on_cpu - {"reference"} > set()
    assert [found for found in checks if not found.passed] == []
