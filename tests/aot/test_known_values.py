"""The integers that reach a kernel: through the traced program, and through the compiled one."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from raggedmoe.aot.known_values import CustomCalls, kernel_calls

DATA = Path(__file__).parent / "data"
SIZES = np.array([3, 0, 5, 1], np.int32)


def _copy(x_ref, sizes_ref, out_ref):
    out_ref[...] = x_ref[...]


def kernel(x, integers):
    return pl.pallas_call(_copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, integers)


def traced(function, *args):
    return jax.jit(function).trace(*args).jaxpr


def test_what_leads_from_known_integers_to_a_kernel_is_evaluated():
    @jax.jit
    def ends(sizes):
        return jnp.cumsum(sizes)

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    (call,) = kernel_calls(traced(lambda x, sizes: kernel(x * 2, ends(sizes) + 1), x, SIZES), [x, SIZES])
    assert call.shapes == ((8, 128), (4,))
    assert call.values == {1: [4, 4, 9, 10]}


def test_what_depends_on_an_unknown_array_is_unknown():
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    program = traced(lambda x, sizes: kernel(x, sizes + x[0, 0].astype(jnp.int32)), x, SIZES)
    (call,) = kernel_calls(program, [x, SIZES])
    assert call.values == {}


def test_loops_and_branches_over_known_integers_are_evaluated():
    def function(x, sizes):
        total = jax.lax.fori_loop(0, 4, lambda i, t: t + sizes[i], jnp.int32(0))
        return kernel(x, jax.lax.cond(total > 8, lambda s: s[::-1], lambda s: s, sizes))

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    (call,) = kernel_calls(traced(function, x, SIZES), [x, SIZES])
    assert call.values == {1: [1, 5, 0, 3]}


def test_a_custom_calls_operands_are_followed_to_parameters_and_to_another_calls_outputs():
    asked = []

    def outputs(name):
        asked.append(name)
        return {1: [10], 2: [20], 3: [30], 4: [40]}  # numbered after its one operand

    sizes = np.arange(16, dtype=np.int32)
    calls = CustomCalls((DATA / "ragged_dot_hlo.txt").read_text(), [sizes], outputs)
    assert calls.operands("ragged-dot-metadata") == {0: list(range(16))}
    assert calls.operands("ragged-dot-none") == {0: [40], 1: [10], 2: [20], 3: [30], 4: [40]}
    assert set(asked) == {"ragged-dot-metadata"}
    assert "ragged-dot-none" in calls
    assert "a.1" not in calls
    assert calls.operands("no-such-call") == {}


def test_two_arguments_of_one_shape_leave_a_parameter_unknown():
    sizes = np.arange(16, dtype=np.int32)
    calls = CustomCalls((DATA / "ragged_dot_hlo.txt").read_text(), [sizes, sizes + 1], lambda name: {})
    assert calls.operands("ragged-dot-metadata") == {}


def test_a_ragged_dots_sizes_are_known_though_they_are_computed():
    lhs, rhs = jax.ShapeDtypeStruct((9, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)
    program = traced(lambda lhs, rhs, sizes: jax.lax.ragged_dot(lhs, rhs, sizes[::-1] + 0), lhs, rhs, SIZES)
    (call,) = kernel_calls(program, [lhs, rhs, SIZES])
    assert (call.shapes, call.values) == (((4,),), {0: [1, 5, 0, 3]})
