"""Adapters of the experts on every strategy: values and gradients in float64 against NumPy on merged weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from raggedmoe import ExpertConfig, KernelChoice, MoE, MoEExecution, Plan
from raggedmoe.kernels.native.library import takes
from raggedmoe.kernels.quantize import quantize
from raggedmoe.lora import LoraConfig, is_adapter
from tests.aot.hlo_collectives import collectives
from tests.moe import numpy_layer
from tests.moe.examples import (
    assert_agrees,
    assert_close,
    layer,
    moe_config,
    oracle_loss,
    random_experts,
    random_params,
    random_tokens,
)
from tests.moe.on_mesh import gradients_on_mesh, mesh_of, placed
from tests.moe.test_mesh import planned

pytestmark = pytest.mark.usefixtures("x64")
NUM_TOKENS, RANK, ALPHA = 8, 2, 3.0
EXPERTS = ExpertConfig(biases=True, num_shared=1)
CONFIG = moe_config(
    {"aux_loss_weight": 0.3},
    num_experts=4,
    model_dim=8,
    expert_dim=4,
    experts=EXPERTS,
    lora=LoraConfig(rank=RANK, alpha=ALPHA, targets=("experts", "mlp"), router="trained"),
)
PLAIN = dataclasses.replace(CONFIG, lora=None)


def merged(params):
    """The weights that the adapters stand for, by loops."""
    params = {name: np.asarray(value) for name, value in params.items()}
    weights = {name: value.copy() for name, value in params.items() if not is_adapter(name)}
    for name in ("wi_0", "wi_1", "wo"):
        first, second = params[f"{name}_lora_a"], params[f"{name}_lora_b"]
        for e in range(CONFIG.num_experts):
            for r in range(RANK):
                hidden, width = (first, second)[name != "wo"][e, r], (first, second)[name == "wo"][e, r]
                weights[name][e] += ALPHA / RANK * np.outer(hidden, width)
        first, second = params[f"shared_{name}_lora_a"], params[f"shared_{name}_lora_b"]
        for r in range(RANK):
            hidden, width = (first, second)[name != "wo"][r], (first, second)[name == "wo"][r]
            weights[f"shared_{name}"] += ALPHA / RANK * np.outer(hidden, width)
    return weights


def routing(name):
    mask = np.ones(NUM_TOKENS, bool)
    if name == "one_token":
        mask[:] = np.arange(NUM_TOKENS) == 5
    experts = random_experts(np.random.default_rng(3), NUM_TOKENS, 2, CONFIG.num_experts)
    if name == "idle":  # nobody goes to the last expert
        experts = np.array([[t % 3, (t + 1) % 3] for t in range(NUM_TOKENS)], np.int32)
    return jnp.asarray(experts), mask


@functools.cache
def case(name):
    """Arrays, the oracle's result, and its loss's differences for every trained parameter."""
    x, params = random_tokens(CONFIG, NUM_TOKENS), random_params(CONFIG)
    experts, mask = routing(name)
    cotangent = np.random.default_rng(2).normal(size=x.shape)
    options = {"mask": mask, "replay": experts}
    expected = numpy_layer.layer(x, merged(params), PLAIN, **options)
    gradients = {}
    for trained, spec in CONFIG.param_specs().items():
        if not spec.trained:
            continue
        gradients[trained] = np.zeros(spec.shape)
        for index in np.ndindex(spec.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = {**params, trained: np.array(params[trained])}
                moved[trained][index] += step
                sides.append(oracle_loss(np.asarray(x), merged(moved), PLAIN, cotangent, **options))
            gradients[trained][index] = (sides[0] - sides[1]) / 2e-6
    return (x, params, jnp.asarray(mask), experts, jnp.asarray(cotangent)), expected, gradients


WAYS = {
    "local": (None, MoEExecution(kernels=KernelChoice(grouped_matmul="xla"))),  # which compiles soon
    "auto": (None, MoEExecution()),
    "local-chunks": (None, MoEExecution(kernels=KernelChoice(grouped_matmul="xla"), width_chunks=2, token_chunks=2)),
    "dense": (None, MoEExecution(moe_backend="dense")),
    "ring": ({"expert": 2}, MoEExecution(strategy="ring")),
    "all_to_all": ({"fsdp": 2, "expert": 2, "tensor": 2}, MoEExecution(strategy="all_to_all")),
    "by-width": (
        {"fsdp": 2, "expert": 2, "tensor": 2},
        MoEExecution(strategy="all_to_all", tensor_split="model_dim", width_chunks=2),
    ),
}
MARKS = dict.fromkeys(("auto", "local-chunks", "ring", "all_to_all"), pytest.mark.slow) | {"by-width": pytest.mark.ci}


@functools.cache
def run(way):
    degrees, execution = WAYS[way]
    mesh = None if degrees is None else mesh_of(**degrees)
    return functools.partial(gradients_on_mesh, config=CONFIG, mesh=mesh, execution=execution)


@pytest.mark.parametrize("name", ["random", "one_token", "idle"])
@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, ())) for way in WAYS])
def test_value_and_gradients_are_those_of_merged_weights(way, name):
    (x, params, mask, experts, cotangent), expected, gradients = case(name)
    out, found = run(way)(x, params, cotangent=cotangent, mask=mask, replay=experts)
    assert_agrees(out, expected)
    for trained, gradient in gradients.items():
        difference = np.abs(np.asarray(found[trained]) - gradient).max()
        assert difference <= 1e-8 * max(1, np.abs(gradient).max()), trained  # that of the central differences
        if name == "idle" and "expert" in CONFIG.param_specs()[trained].axes and is_adapter(trained):
            assert not np.asarray(found[trained])[3].any(), trained


@pytest.mark.ci
def test_adapters_learn_beside_quantised_experts():
    """QLoRA: the frozen base is what the quantised experts stand for, and it is only read."""
    config = dataclasses.replace(
        CONFIG, experts=ExpertConfig(), lora=LoraConfig(rank=RANK, alpha=ALPHA, targets=("experts",))
    )
    params = random_params(config)
    x, cotangent = random_tokens(config, NUM_TOKENS), jnp.asarray(np.random.default_rng(2).normal(size=(NUM_TOKENS, 8)))
    experts, _ = routing("random")
    quantised = {n: quantize(params[n], "int8", (*params[n].shape[:2], 1)) for n in ("wi_0", "wi_1", "wo")}
    stands_for = {n: q.qvalue.astype(jnp.float64) * q.scale for n, q in quantised.items()}
    adapters = {name: value for name, value in params.items() if is_adapter(name)}

    @jax.jit
    def gradients(x, adapters, base):
        def loss(x, adapters):
            out = layer(x, {**params, **base, **adapters}, config, replay=experts)
            return (out.output * cotangent).sum()

        return jax.grad(loss, argnums=(0, 1))(x, adapters)

    found, expected = gradients(x, adapters, quantised), gradients(x, adapters, stands_for)
    assert_close(found[0], expected[0], "x")
    for name, gradient in expected[1].items():
        assert_close(found[1][name], gradient, name)


BUILT = pytest.mark.skipif(not takes(np.dtype(np.float32)), reason="the C++ library is not built here")


@pytest.mark.parametrize("kernel", ["cpu", pytest.param("cpu_native", marks=BUILT)])
def test_no_gradient_of_a_frozen_matrix_is_computed(kernel):
    """Of the two gradients of a grouped matmul the compiler drops that of the matrix, which would be as large as it."""
    lora = LoraConfig(rank=RANK, targets=("experts",))
    config = moe_config(num_experts=8, model_dim=64, expert_dim=1024, lora=lora)
    shapes = {name: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for name, spec in config.param_specs().items()}
    trained = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    x = jax.ShapeDtypeStruct((NUM_TOKENS, 64), jnp.float32)

    def gradients(trained, params, x):
        execution = MoEExecution(kernels=KernelChoice(grouped_matmul=kernel))
        return jax.grad(lambda trained: layer(x, {**params, **trained}, config, execution).output.sum())(trained)

    memory = jax.jit(gradients).lower(trained, shapes, x).compile().memory_analysis()
    matrix = 4 * 8 * 64 * 1024
    assert memory.temp_size_in_bytes < matrix


@pytest.mark.slow
def test_what_is_sent_for_adapters_is_what_the_plan_says():
    """Frozen matrices are gathered, but no gradient of them is summed."""
    plan, execution = Plan(fsdp=2, expert=2, tensor=2), WAYS["all_to_all"][1]
    x, params = random_tokens(CONFIG, NUM_TOKENS, dtype=np.float32), random_params(CONFIG, dtype=np.float32)
    lora = dataclasses.replace(CONFIG.lora, targets=("experts",), router="frozen")
    config = dataclasses.replace(CONFIG, lora=lora, experts=ExpertConfig())
    experts, _ = routing("random")
    params, x, experts = placed(plan, config, {n: params[n] for n in config.param_specs()}, x, experts)
    specs, mesh = config.param_specs(), plan.mesh()

    def gradients(x, trained, frozen):
        def loss(x, trained):
            out = layer(x, {**frozen, **trained}, config, execution, mesh=mesh, replay=experts)
            return (out.output**2).sum()

        return jax.grad(loss, argnums=(0, 1))(x, trained)

    trained = {name: value for name, value in params.items() if specs[name].trained}
    frozen = {name: value for name, value in params.items() if name not in trained}
    hlo = jax.jit(gradients).lower(x, trained, frozen).compile().as_text()
    found, expected = collectives(hlo), planned(config, execution, plan)
    assert {kind: num for kind, num in found.items() if "scatter" in kind[0]} == {
        kind: num for kind, num in expected.items() if "scatter" in kind[0]
    }
    assert {kind: num for kind, num in found.items() if kind[0] == "all-gather"} == {
        kind: num for kind, num in expected.items() if kind[0] == "all-gather"
    }


def test_a_layer_none_of_whose_matrices_is_a_target_is_refused():
    """Every weight would be frozen, and nothing would learn."""
    for targets in (("attention",), ("moe.nothing",)):
        config = dataclasses.replace(CONFIG, lora=LoraConfig(rank=RANK, targets=targets))
        with pytest.raises(ValueError, match=f"lora: expected targets that this layer has.*got {targets[0]}"):
            MoE(config, rngs=nnx.Rngs(0))
    assert MoE(CONFIG, rngs=nnx.Rngs(0)).wo_lora_a.shape == (4, RANK, 4)
