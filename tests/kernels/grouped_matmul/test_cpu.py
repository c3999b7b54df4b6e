"""The CPU's loop over tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.grouped_matmul.cpu import for_each_tile


@pytest.mark.parametrize("num_rows", [1, 5, 8, 30, 31, 100])
def test_tiles_visit_each_row_of_a_group_once(num_rows):
    @jax.jit
    def visits(first, last):
        def one_tile(position, size, new, count):
            old = jax.lax.dynamic_slice_in_dim(count, position, size)
            return jax.lax.dynamic_update_slice_in_dim(count, old + new, position, 0)

        return for_each_tile(first, last, num_rows, (16, 8, 4), one_tile, jnp.zeros((num_rows, 1), jnp.int32))[:, 0]

    row = np.arange(num_rows)
    for first in range(num_rows + 1):
        for last in {first, min(first + 1, num_rows), (first + num_rows) // 2, num_rows}:
            expected = (row >= first) & (row < last)
            assert (visits(jnp.int32(first), jnp.int32(last)) == expected).all(), (first, last)
