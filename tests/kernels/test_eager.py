"""What `compile_once` compiles, and what it leaves to the function itself."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from raggedmoe.kernels.eager import compile_once
from raggedmoe.kernels.registry import record_selections


def traced():
    """A function that is compiled once, and what it was called with so far."""
    arguments = []

    def function(x, *, factor):
        arguments.append(x)
        return factor * jnp.sin(x)

    return compile_once(function, static=("factor",)), arguments


def test_a_call_outside_of_jit_is_traced_once_for_each_shape_and_static_argument():
    function, arguments = traced()
    for x in (1.0, 2.0, np.ones(3)):
        for factor in (2, 3):
            np.testing.assert_allclose(function(x, factor=factor), factor * np.sin(x), rtol=1e-6)
    assert len(arguments) == 4
    for x in (1.0, 2.0):
        np.testing.assert_allclose(jax.grad(function)(x, factor=2), 2 * np.cos(x), rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(lambda x: function(x, factor=2))(jnp.full(3, x)), 2 * np.sin(x), rtol=1e-6)
    assert len(arguments) == 4


def test_in_anothers_jit_it_is_the_function_itself():
    function, arguments = traced()
    assert "jit" not in str(jax.make_jaxpr(lambda x: function(x, factor=2))(1.0))
    assert "jit" not in str(jax.make_jaxpr(jax.grad(lambda x: function(x, factor=2)))(1.0))
    assert len(arguments) == 2


def test_forward_mode_is_seen_by_the_function():
    function, arguments = traced()
    jax.jvp(lambda x: function(x, factor=2), (1.0,), (1.0,))
    assert isinstance(arguments[0], ad.JVPTracer)


def test_a_recorded_call_is_traced_again():
    function, arguments = traced()
    function(jnp.ones(()), factor=2)
    with record_selections():
        function(jnp.ones(()), factor=2)
    assert len(arguments) == 2
    assert not isinstance(arguments[1], jax.core.Tracer)
