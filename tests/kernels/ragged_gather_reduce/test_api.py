"""What the combine promises of its weights."""

import pytest

from tests.kernels.compare import beyond_rounding, example_of, on_cpu, run


@pytest.mark.product
@pytest.mark.parametrize("spec", ["plain", "every-expert", "range"])
@pytest.mark.parametrize("implementation", on_cpu("ragged_gather_reduce"))
def test_combine_weights_get_their_gradient(implementation, spec):
    example = example_of("ragged_gather_reduce", spec, "float32")
    found = run("ragged_gather_reduce", example, implementation)
    assert (found["dweights"] != 0).any()
    # A few float32 roundings of the row-dot, not 8e-2.
    assert beyond_rounding("ragged_gather_reduce", example, found) == {}
