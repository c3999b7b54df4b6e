"""Strategy `local`: the order of the slots."""

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.moe.dispatch.local import sort_slots


@pytest.mark.parametrize("num_groups", [5, 2**31 - 2], ids=["one array", "two arrays"])
@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (7, 3), (500, 8)], ids=str)
def test_slots_are_in_the_order_of_their_groups_and_ties_in_their_own(num_groups, shape):
    groups = np.random.default_rng(0).choice([0, 1, 4, num_groups], shape)  # two groups are empty, some go nowhere
    slots, places = sort_slots(jnp.asarray(groups, jnp.int32), num_groups)
    expected = sorted(range(groups.size), key=lambda slot: (groups.flat[slot], slot))
    np.testing.assert_array_equal(slots, expected)
    np.testing.assert_array_equal(places.reshape(-1)[np.array(expected, int)], np.arange(groups.size))
    assert (slots.dtype, places.shape) == (jnp.int32, shape)
