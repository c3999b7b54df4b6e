"""Fixtures of the layer's tests."""

import jax
import pytest


@pytest.fixture
def x64():
    """float64, so that a difference from the oracle is a difference in the mathematics."""
    with jax.enable_x64(True):
        yield
