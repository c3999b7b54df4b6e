"""The tiles of the gradient of the weights are chosen alike for both of its widths."""

import pytest

from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.grouped_matmul.peers import transposed_tiles


@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("widths", [(7168, 2048), (4096, 14336), (2880, 7168), (8192, 1024)])
def test_swapped_widths_swap_the_tiles(widths, chip):
    """``lhsᵀ rhs`` and ``rhsᵀ lhs`` are each other's transposes: they read and hold the same."""
    one = transposed_tiles(4096, *widths, 8, 2, HARDWARE[chip])
    other = transposed_tiles(4096, *widths[::-1], 8, 2, HARDWARE[chip])
    assert (one.inner, one.out) == (other.out, other.inner)
