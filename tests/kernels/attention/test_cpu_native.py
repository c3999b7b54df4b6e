"""`attention` in C++ where a sink leaves no weight to the slots."""

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.attention import cpu_native, reference
from raggedmoe.kernels.attention.operands import Operands
from raggedmoe.kernels.native.library import why_absent

pytestmark = pytest.mark.skipif(why_absent() is not None, reason="the C++ kernels are not built here")


def test_sinks_above_all_scores_are_those_of_the_reference():
    """An infinite one makes NaN of its head alone."""
    query = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 4, 8)), jnp.float32)
    positions = jnp.array([[-1, *range(8)]], jnp.int32)
    sinks = jnp.array([np.inf, 300.0, 1.0, -np.inf])
    operands = Operands(query, query[:, :, :2], query[:, :, 2:], positions, None, sinks)
    found = cpu_native.forward(operands, scale=1.0, window=None)[0][:, 1:]
    expected = reference.forward(operands, scale=1.0, window=None)[0][:, 1:]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(found[:, :, 0]).all()
