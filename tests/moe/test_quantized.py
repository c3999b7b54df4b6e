"""Layers on quantised expert weights: what they compute, and what they refuse."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import MoE, MoEConfig, MoEExecution, QArray
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.params import init_params

CONFIG = MoEConfig(num_experts=4, experts_per_token=2, model_dim=16, expert_dim=32)
MATRICES = ("wi_0", "wi_1", "wo")


def stored_params(qtype):
    """A layer's parameters with the experts stored, and the same with what they stand for."""
    params = init_params(CONFIG.param_specs(), jax.random.key(0))
    stored, meant = dict(params), dict(params)
    for name in MATRICES:
        values = jnp.round(params[name] * 64) if qtype == "int8" else params[name]
        values = values.astype(qtype)
        scale = jnp.exp2(jnp.arange(4.0) - 7).reshape(4, 1, 1)
        stored[name] = QArray(values, scale)
        meant[name] = values.astype(jnp.float32) * scale
    return stored, meant


@pytest.mark.parametrize("backend", ["auto", "cpu", "expert_ffn", "ragged_dot"])
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_a_layer_computes_with_what_its_experts_stand_for(backend, qtype):
    stored, meant = stored_params(qtype)
    x = jax.random.normal(jax.random.key(1), (12, 16))
    execution = MoEExecution(moe_backend=backend)
    found = moe_route_and_compute(x, stored, CONFIG, execution)
    want = moe_route_and_compute(x, meant, CONFIG, execution)
    assert np.abs(want.output).max() > 0
    np.testing.assert_allclose(found.output, want.output, rtol=1e-5, atol=1e-6 * np.abs(want.output).max())
    np.testing.assert_array_equal(found.load, want.load)


def test_the_module_keeps_them_as_they_are():
    stored, _ = stored_params("int8")
    layer = MoE(CONFIG, params=stored)
    assert all(isinstance(layer.params[name], QArray) for name in MATRICES)
    out = layer(jnp.ones((2, 3, 16))).output
    want = moe_route_and_compute(jnp.ones((6, 16)), stored, CONFIG).output
    np.testing.assert_array_equal(out.reshape(6, 16), want)


@pytest.mark.parametrize(
    ("config", "execution", "message"),
    [
        (
            CONFIG,
            MoEExecution(width_chunks=2),
            "wo cannot be used with width_chunks=2: what shares a scale would be cut",
        ),
        (CONFIG, MoEExecution(strategy="dense"), "strategy='dense': it is one batched matmul of all experts"),
        (replace(CONFIG, capacity_factor=2.0), MoEExecution(), "strategy='capacity': it is one batched matmul"),
    ],
)
def test_a_layer_that_needs_arrays_says_why(config, execution, message):
    stored, _ = stored_params("int8")
    with pytest.raises(ValueError, match=message):
        moe_route_and_compute(jnp.ones((4, 16)), stored, config, execution)


@pytest.mark.parametrize("backend", ["auto", "ragged_dot", "dense"])
def test_shared_experts_may_be_quantised_beside_any_experts(backend):
    """Values, and gradients of the tokens, are those of what they stand for; the routed experts are arrays."""
    config = replace(CONFIG, experts=replace(CONFIG.experts, num_shared=2, shared_gate=True))
    meant, execution = init_params(config.param_specs(), jax.random.key(0)), MoEExecution(moe_backend=backend)
    stored = dict(meant)
    for name in ("shared_wi_0", "shared_wi_1", "shared_wo"):
        values, scale = meant[name].astype(jnp.float8_e4m3fn), jnp.exp2(jnp.arange(16.0) % 3 - 2).reshape(8, 2)
        stored[name] = QArray(values, scale)  # of 64 × 16
        meant[name] = values.astype(jnp.float32) * scale.repeat(8, 0).repeat(8, 1)
    x = jax.random.normal(jax.random.key(1), (2, 6, 16))

    def loss(x, params):
        out = MoE(config, params=params, execution=execution)(x).output
        return jnp.sum(jnp.sin(out)), out

    (found, by_x), (want, of_meant) = ([*jax.grad(loss, has_aux=True)(x, params)][::-1] for params in (stored, meant))
    assert np.abs(of_meant).max() > 0
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(by_x, of_meant, rtol=0, atol=1e-5 * np.abs(of_meant).max())


def test_the_router_may_not_be_quantised():
    stored, _ = stored_params("int8")
    stored["router_kernel"] = QArray(jnp.ones((4, 16), jnp.int8), jnp.ones((4, 1)))
    with pytest.raises(ValueError, match="expected arrays as router_kernel, got quantised ones; dequantise them"):
        moe_route_and_compute(jnp.ones((4, 16)), stored, CONFIG)


def test_kernels_that_take_no_quantised_operands_are_passed_over():
    stored, meant = stored_params("int8")
    execution = MoEExecution(kernels=KernelChoice(grouped_matmul=("megablox", "cpu")))
    found = moe_route_and_compute(jnp.ones((4, 16)), stored, CONFIG, execution).output
    want = moe_route_and_compute(jnp.ones((4, 16)), meant, CONFIG, execution).output
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
