"""`expert_ffn` in C++: activations of huge, tiny, infinite, NaN and tied arguments; one array for two projections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import expert_ffn
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.native.library import why_absent
from tests.kernels import numpy_oracle

pytestmark = pytest.mark.skipif(why_absent() is not None, reason="the C++ kernels are not built here")

POSITIVE = [0.0, 1e-30, 1e-6, 0.5, 1.0, 5.5, 7.0, 7.0625, 12.0, 20.0, 60.0, 88.0, 90.0, 110.0, 1e4, 1e15, 1e18]
HUGE = [1e20, 1e30, 3e38]  # whose squares are infinite in float32
GATES = np.array([*POSITIVE, *HUGE, np.inf, np.nan, *(-x for x in (*POSITIVE[1:], *HUGE, np.inf))], np.float32)
UPS = np.array([1.0, -0.5, 7.0, -7.0], np.float32)  # of the gate's argument

# A vector of 16 lanes, and three more; the sum of their hidden numbers does not overflow where one of them does not.
F, SHARE = 19, 1 / 32


def call(activation, gated, dtype):
    """Every gate's argument in every group, which has an argument of `up` that is a multiple of it."""
    groups = len(UPS) if gated else 1
    rows = np.tile(GATES, groups)[:, None]
    wi_0, wo = np.ones((groups, F, 1), np.float32), np.full((groups, F, 1), SHARE, np.float32)
    wi_1 = np.broadcast_to(UPS[:, None, None], (groups, F, 1)) if gated else None
    arrays = [None if array is None else jnp.asarray(array, dtype) for array in (rows, wi_0, wi_1, wo)]
    group_sizes = jnp.full(groups, len(GATES), jnp.int32)

    def run(implementation):
        def out(rows):
            return expert_ffn(rows, *arrays[1:], group_sizes, activation=activation, implementation=implementation)

        value, pull = jax.vjp(out, arrays[0])
        return np.asarray(value, np.float64)[:, 0], np.asarray(pull(jnp.ones_like(value))[0], np.float64)[:, 0]

    return run, np.asarray(arrays[0], np.float64)[:, 0]


def tied(gates, gated):
    """Where an argument of the clamp is at its bound."""
    ups = gates * np.repeat(UPS, len(GATES)) if gated else gates
    return (np.abs(gates) == 7) | (np.abs(ups) == 7)


@pytest.mark.product
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_arguments(activation, gated, dtype):
    """A slope that JAX's product of factors overflows for, and ours not, must be the true one."""
    run, gates = call(activation, gated, dtype)
    (value, slope), (value_in_jax, slope_in_jax) = run("cpu_native"), run("reference")
    assert gates[np.isfinite(value) != np.isfinite(value_in_jax)].tolist() == []
    assert gates[np.isfinite(slope_in_jax) & ~np.isfinite(slope)].tolist() == []
    with np.errstate(all="ignore"):
        factors = np.repeat(UPS, len(GATES)) if gated else np.zeros_like(gates)
        ups = None if not gated and activation != "clamped_swiglu" else gates * factors if gated else factors
        exact, of_gate, of_up = numpy_oracle.ACTIVATIONS[activation](gates, ups)
        exact_slope = of_gate + of_up * factors if gated else of_gate
    rtol = 32 * float(jnp.finfo(dtype).eps)
    compared = np.isfinite(value) & np.isfinite(exact)
    assert compared.sum() > len(GATES) / 2
    np.testing.assert_allclose(value[compared], exact[compared] * F * SHARE, rtol=rtol, atol=1e-9)
    compared = np.isfinite(slope) & np.isfinite(exact_slope) & ~tied(gates, gated)
    assert compared.sum() > len(GATES) / 2
    np.testing.assert_allclose(slope[compared], exact_slope[compared] * F * SHARE, rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ties_of_the_clamp_have_the_slope_of_the_reference(dtype):
    """At a tie, JAX gives each argument of `minimum` half of the gradient."""
    run, gates = call("clamped_swiglu", True, dtype)
    ties = tied(gates, True)
    assert ties.sum() > 2 * len(UPS)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        run("cpu_native")[1][ties], run("reference")[1][ties], rtol=16 * eps, atol=max(eps, 1e-5)
    )


def test_both_projections_may_be_the_same_array():
    """XLA gives the kernel one address for both, at once or after it has found two computations to be the same."""
    rng = np.random.default_rng(0)
    rows, wi, wo = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((24, 8), (2, 12, 8), (2, 12, 8)))
    group_sizes = jnp.array([14, 10], jnp.int32)

    def out(implementation, rows, wi, wo):
        return expert_ffn(rows, wi, wi, wo, group_sizes, implementation=implementation)

    for gradients in (out, jax.grad(lambda *arguments: out(*arguments).sum(), argnums=(1, 2, 3))):
        native, expected = (jax.jit(gradients, static_argnums=0)(name, rows, wi, wo) for name in ("cpu_native", "cpu"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), native, expected)
