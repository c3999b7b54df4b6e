"""Layers that quantise the operands of their experts' matmuls: gradients, meshes, chunks, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from raggedmoe import KernelChoice, MoE, MoEExecution, QArray
from raggedmoe.kernels.quant_config import QUANTIZATIONS
from raggedmoe.kernels.quantize import quantize
from tests.moe.examples import layer, layer_gradients, moe_config, random_params, random_tokens
from tests.moe.on_mesh import gradients_on_mesh, mesh_of, placed, plan_of

CONFIG = moe_config({"aux_loss_weight": 0.1}, num_experts=8, experts_per_token=2, model_dim=32, expert_dim=16)
KERNELS = KernelChoice(grouped_matmul="xla")
NUM_TOKENS = 32


def execution_of(name, **options):
    kernels = options.pop("kernels", KERNELS)
    quantization = replace(QUANTIZATIONS[name], **options.pop("config", {}))
    return MoEExecution(kernels=kernels, quantization=quantization, **options)


def arrays(config=CONFIG):
    params = random_params(config, dtype=np.float32)
    x, cotangent = (random_tokens(config, NUM_TOKENS, seed=seed, dtype=np.float32) for seed in (1, 3))
    return x, params, cotangent


def rms(array):
    return np.sqrt(np.mean(np.square(np.asarray(array, np.float64))))


@pytest.mark.parametrize(("name", "error"), [("fp8", 0.06), ("int8", 0.02), ("fp8_weights", 0.05)])
def test_the_layer_is_near_the_one_that_quantises_nothing(name, error):
    x, params, cotangent = arrays()
    plain, want = layer_gradients(x, params, CONFIG, cotangent, execution=MoEExecution(kernels=KERNELS))
    out, found = layer_gradients(x, params, CONFIG, cotangent, execution=execution_of(name))
    assert 1e-4 < rms(out.output - plain.output) / rms(plain.output) < error
    np.testing.assert_array_equal(out.load, plain.load)
    for quantity in ("wi_0", "wi_1", "wo", "x", "router_kernel"):
        assert 1e-4 < rms(found[quantity] - want[quantity]) / rms(want[quantity]) < 2 * error, quantity


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_the_router_gets_the_gradient_of_what_the_quantised_experts_give(name):
    """Rows do not depend on the router, so the quantised layer is smooth in it, and differences tell its slope."""
    x, params, cotangent = arrays()
    execution = execution_of(name)
    _, gradients = layer_gradients(x, params, CONFIG, cotangent, execution=execution)
    direction = np.random.default_rng(5).standard_normal(params["router_kernel"].shape).astype(np.float32)

    @jax.jit
    def loss(step):
        moved = {**params, "router_kernel": params["router_kernel"] + step * direction}
        out = layer(x, moved, CONFIG, execution)
        return (out.output * cotangent).sum() + out.aux_loss, out.experts

    step = 2.0**-10
    (above, experts), (below, same) = loss(step), loss(-step)
    np.testing.assert_array_equal(np.sort(experts, 1), np.sort(same, 1))  # no token has other experts
    slope = float((gradients["router_kernel"] * direction).sum())
    assert abs(slope) > 0.1
    assert float(above - below) / (2 * step) == pytest.approx(slope, rel=0.01)


def test_what_a_masked_token_and_an_idle_expert_hold_reaches_nothing():
    x, params, cotangent = arrays()
    used = np.arange(NUM_TOKENS) % 5 != 2
    replay = np.stack([np.arange(NUM_TOKENS) % 6, (np.arange(NUM_TOKENS) + 1) % 6], 1).astype(np.int32)
    options = {"execution": execution_of("fp8"), "mask": jnp.asarray(used), "replay": jnp.asarray(replay)}
    out, gradients = layer_gradients(x, params, CONFIG, cotangent, **options)
    idle = {name: params[name].at[6:].set(jnp.nan) for name in ("wi_0", "wi_1", "wo")}
    spoilt, others = layer_gradients(
        jnp.where(used[:, None], x, jnp.nan), {**params, **idle}, CONFIG, cotangent, **options
    )
    np.testing.assert_array_equal(spoilt.output, out.output)
    for name in ("wi_0", "wi_1", "wo"):
        np.testing.assert_array_equal(gradients[name][6:], 0)
        np.testing.assert_array_equal(others[name], gradients[name])


@pytest.mark.parametrize("options", [{"recompute_dispatch": True}, {"token_chunks": 2}], ids=str)
def test_rows_that_are_gathered_again_or_come_in_chunks_are_rounded_the_same(options):
    x, params, cotangent = arrays()
    out, want = layer_gradients(x, params, CONFIG, cotangent, execution=execution_of("int8"))
    again, found = layer_gradients(x, params, CONFIG, cotangent, execution=execution_of("int8", **options))
    np.testing.assert_allclose(again.output, out.output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["x"], want["x"], rtol=1e-5, atol=1e-5)
    # A chunk's scales of the weights' gradients are its own.
    error = 1e-6 if "recompute_dispatch" in options else 0.02
    assert rms(found["wo"] - want["wo"]) <= error * rms(want["wo"])


@pytest.mark.ci
@pytest.mark.both_ends
@pytest.mark.parametrize("degrees", [{"expert": 4, "fsdp": 2}, {"data": 4, "fsdp": 2}], ids=str)
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_eight_devices_compute_what_one_does(name, degrees):
    x, params, cotangent = arrays()
    out, want = layer_gradients(x, params, CONFIG, cotangent, execution=execution_of(name))
    plan = plan_of(**degrees)
    strategies = {"strategy": "all_to_all"} if "expert" in degrees else {}
    placed_params, on_x, on_cotangent = placed(plan, CONFIG, params, x, cotangent)
    execution = execution_of(name, **strategies)
    found, gradients = gradients_on_mesh(
        on_x, placed_params, CONFIG, plan.mesh(), cotangent=on_cotangent, execution=execution
    )
    # Scales of rows and of output channels do not depend on the mesh.
    np.testing.assert_allclose(found.output, out.output, rtol=1e-5, atol=1e-5)
    for quantity in ("x", "router_kernel"):
        np.testing.assert_allclose(gradients[quantity], want[quantity], rtol=1e-4, atol=1e-4)
    # Those of the weights' gradients are of the rows that a device has, so these differ by roundings.
    unit = {"fp8": 2.0**-3, "int8": 0.02}[name]
    for quantity in ("wi_0", "wi_1", "wo"):
        assert rms(np.asarray(gradients[quantity]) - want[quantity]) <= unit * rms(want[quantity])


@pytest.mark.ci
def test_devices_round_by_chance_each_by_its_own():
    x, params, cotangent = arrays()
    x = jnp.tile(x[:4], (8, 1))  # each of eight devices has the same tokens
    cotangent = jnp.tile(cotangent[:4], (8, 1))
    execution = execution_of("int8", config={"stochastic_rounding": True})
    plan = plan_of(data=8)
    placed_params, on_x, on_cotangent = placed(plan, CONFIG, params, x, cotangent)
    options = {"cotangent": on_cotangent, "execution": execution, "key": jax.random.key(0)}
    _, gradients = gradients_on_mesh(on_x, placed_params, CONFIG, plan.mesh(), **options)
    of_device = np.asarray(gradients["x"]).reshape(8, 4, -1)
    assert (of_device[0] != of_device[1]).any()
    _, again = gradients_on_mesh(on_x, placed_params, CONFIG, plan.mesh(), **options)
    np.testing.assert_array_equal(gradients["wo"], again["wo"])


def test_a_mesh_that_cuts_what_shares_a_scale_is_refused():
    x, params, _ = arrays()
    with pytest.raises(ValueError, match="mesh of tensor_parallelism=2: what shares a scale would be cut"):
        layer(x, params, CONFIG, execution_of("fp8"), mesh=mesh_of(data=4, tensor=2))


def test_weights_that_are_quantised_already_are_refused():
    x, params, _ = arrays()
    stored = quantize(params["wo"], "int8", (8, 1, 32))
    params["wo"] = QArray(stored.qvalue, stored.scale)
    with pytest.raises(ValueError, match="quantised wo cannot be used with quantization: it quantises arrays"):
        layer(x, params, CONFIG, execution_of("int8"))


REFUSED = {
    "fused": ({"moe_backend": "expert_ffn"}, "moe_backend='expert_ffn': its fused kernel"),
    "dense": ({"moe_backend": "dense"}, "strategy='dense': it is one batched matmul"),
    "width": ({"width_chunks": 2}, "width_chunks=2: what shares a scale would be cut"),
    "kernel": (
        {"moe_backend": "gmm_v2"},
        r"moe_backend='gmm_v2': its kernels of grouped_matmul: gmm_v2 \(forward\)",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused_when_the_layer_is_made(options, message):
    with pytest.raises(ValueError, match=f"quantization cannot be used with {message}"):
        MoE(CONFIG, rngs=nnx.Rngs(0), execution=MoEExecution(quantization=QUANTIZATIONS["fp8"], **options))


def test_a_capacity_of_the_layer_is_refused_before_anything_is_traced():
    x, params, _ = arrays()
    with pytest.raises(ValueError, match="quantization cannot be used with strategy='capacity': it is one batched"):
        layer(x, params, replace(CONFIG, capacity_factor=2.0), MoEExecution(quantization=QUANTIZATIONS["int8"]))


def test_blocks_that_do_not_divide_the_layer_are_refused():
    x, params, _ = arrays()
    with pytest.raises(ValueError, match="expert_dim=16 is not divisible by quantization_block=32"):
        layer(x, params, CONFIG, execution_of("fp8", config={"block": 32}))
