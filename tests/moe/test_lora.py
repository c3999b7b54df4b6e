"""Adapters of the experts on every strategy: values and gradients in float64 against NumPy on merged weights."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from raggedmoe import ExpertConfig, KernelChoice, MoE, MoEExecution, Plan
from raggedmoe.aot.collectives import StepSizes, layer_collectives
from raggedmoe.kernels.native.library import takes
from raggedmoe.kernels.qarray import QArray, QuantizedForm
from raggedmoe.lora import LoraConfig, is_adapter
from raggedmoe.sharding.axes import LogicalMesh
from raggedmoe.sharding.rules import stored_partition
from tests.aot.hlo_collectives import collectives
from tests.moe import numpy_layer
from tests.moe.examples import (
    assert_agrees,
    layer,
    moe_config,
    oracle_loss,
    random_experts,
    random_params,
    random_tokens,
    scalar_loss,
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
        if f"shared_{name}" not in params:
            continue
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


QLORA = dataclasses.replace(
    CONFIG,
    experts=ExpertConfig(biases=True),
    lora=LoraConfig(rank=RANK, alpha=ALPHA, targets=("experts",), router="frozen"),
)
FORMATS = {"int8": (1, 8), "float8_e4m3fn": (2, 4), "mxfp4": (1, 4)}  # rows and columns of [4, 8] that share a scale


def stored(qtype):
    """The experts' matrices as values and scales, and what they stand for, exactly."""
    rng, base, meant = np.random.default_rng(4), {}, {}
    for name in ("wi_0", "wi_1", "wo"):
        scales = (4, 4 // FORMATS[qtype][0], 8 // FORMATS[qtype][1])
        if qtype == "mxfp4":
            exponents, codes = rng.integers(124, 127, scales, np.uint8), rng.integers(0, 256, (4, 4, 4), np.uint8)
            table = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            values = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(4, 4, 8)
            factors, stored_scales = np.exp2(exponents.astype(np.float64) - 127), exponents
        else:
            largest = 127 if qtype == "int8" else 448
            values = (rng.uniform(-1, 1, (4, 4, 8)) * largest).astype(jnp.dtype(qtype))
            factors = stored_scales = rng.uniform(0.5, 1, scales) / largest
            codes = values if qtype == "int8" else values.view(np.uint8)
        base[name] = QArray(jnp.asarray(codes), jnp.asarray(stored_scales), None, qtype)
        repeated = factors.repeat(FORMATS[qtype][0], 1).repeat(FORMATS[qtype][1], 2)
        meant[name] = values.astype(np.float64) * repeated
    return base, meant


@functools.cache
def quantised_case(qtype):
    """Arrays, and the oracle's value and differences of its loss beside experts in float64."""
    params, (base, meant) = random_params(QLORA), stored(qtype)
    x, (experts, mask) = random_tokens(QLORA, NUM_TOKENS), routing("random")
    cotangent = np.random.default_rng(2).normal(size=x.shape)
    plain, options = dataclasses.replace(QLORA, lora=None), {"mask": mask, "replay": experts}
    arrays, gradients = {**params, **meant, "x": x}, {}

    def value(arrays):
        arrays = dict(arrays)
        return oracle_loss(np.asarray(arrays.pop("x")), merged(arrays), plain, cotangent, **options)

    for name in ("x", *filter(is_adapter, params)):
        gradients[name] = np.zeros(arrays[name].shape)
        for index in np.ndindex(arrays[name].shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = {**arrays, name: np.array(arrays[name])}
                moved[name][index] += step
                sides.append(value(moved))
            gradients[name][index] = (sides[0] - sides[1]) / 2e-6
    expected = numpy_layer.layer(x, merged({**params, **meant}), plain, **options)
    return (x, params, base, jnp.asarray(mask), experts, jnp.asarray(cotangent)), expected, gradients


QUANTISED_WAYS = {
    "local": WAYS["local"],
    "ring": WAYS["ring"],
    "all_to_all": WAYS["all_to_all"],
    "by-width": ({"tensor": 2}, MoEExecution(tensor_split="model_dim", kernels=KernelChoice(grouped_matmul="xla"))),
    "fsdp": ({"fsdp": 8}, MoEExecution(kernels=KernelChoice(grouped_matmul="xla"))),  # of more parts than of blocks
}


@functools.cache
def quantised_gradients(way):
    degrees, execution = QUANTISED_WAYS[way]
    mesh = None if degrees is None else mesh_of(**degrees)

    @jax.jit
    def gradients(x, params, base, mask, experts, cotangent):
        def loss(x, adapters):
            out = layer(x, {**params, **base, **adapters}, QLORA, execution, mesh=mesh, mask=mask, replay=experts)
            return scalar_loss(out, cotangent), out

        adapters = {name: value for name, value in params.items() if is_adapter(name)}
        (_, out), (dx, found) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, adapters)
        return out, {"x": dx, **found}

    return gradients


@pytest.mark.parametrize(
    ("way", "qtype"),
    [
        ("local", "float8_e4m3fn"),
        pytest.param("local", "int8", marks=pytest.mark.slow),
        pytest.param("local", "mxfp4", marks=pytest.mark.ci),
        pytest.param("ring", "mxfp4", marks=pytest.mark.slow),
        pytest.param("all_to_all", "float8_e4m3fn", marks=pytest.mark.ci),
        pytest.param("by-width", "mxfp4", marks=pytest.mark.slow),
        pytest.param("fsdp", "float8_e4m3fn", marks=pytest.mark.slow),
        pytest.param("all_to_all", "int8", marks=pytest.mark.slow),
    ],
)
def test_adapters_learn_beside_quantised_experts(way, qtype):
    """QLoRA: the frozen base is what the values and scales stand for, it is only read, and x has its gradient too."""
    arrays, expected, gradients = quantised_case(qtype)
    out, found = quantised_gradients(way)(*arrays)
    assert_agrees(out, expected)
    assert len(gradients) == 7
    for name, gradient in gradients.items():
        difference = np.abs(np.asarray(found[name]) - gradient).max()
        assert difference <= 1e-8 * max(1, np.abs(gradient).max()), name


@pytest.mark.ci
def test_what_is_sent_of_quantised_experts_is_what_the_plan_says():
    """Their values and scales, as they are stored."""
    qtype = "float8_e4m3fn"
    plan, execution = Plan(fsdp=2, expert=2, tensor=2), WAYS["all_to_all"][1]
    config = dataclasses.replace(QLORA, experts=ExpertConfig())
    x, params = random_tokens(config, NUM_TOKENS, dtype=np.float32), random_params(config, dtype=np.float32)
    params, x, experts = placed(plan, config, params, x, routing("random")[0])
    mesh, specs = plan.mesh(), config.param_specs()
    logical = LogicalMesh(mesh)
    form = QuantizedForm(qtype=qtype, block=FORMATS[qtype], scale_dtype="float32")
    base = {}
    for name, array in stored(qtype)[0].items():
        array = QArray(array.qvalue, array.scale.astype(form.scale_dtype), None, qtype)
        places = stored_partition(name, specs[name], array, logical)
        base[name] = jax.tree.map(lambda part, place: jax.device_put(part, logical.sharding(place)), array, places)
        on_device = sum(part.addressable_shards[0].data.nbytes for part in jax.tree.leaves(base[name]))
        assert on_device == plan.device_bytes(name, specs[name], form)

    def loss(x, adapters, frozen):
        out = layer(x, {**frozen, **adapters}, config, execution, mesh=mesh, replay=experts)
        return (out.output**2).sum()

    adapters = {name: value for name, value in params.items() if is_adapter(name)}
    frozen = {**{name: value for name, value in params.items() if name not in adapters}, **base}
    hlo = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, adapters, frozen).compile().as_text()
    found = collectives(hlo)
    step = StepSizes(num_tokens=2, dtype="float32", ragged=False, kept=dict.fromkeys(base, form))
    expected = Counter()
    for each in layer_collectives(config, execution, plan, step):
        expected[each.kind, each.num_devices] += each.num_bytes
    gathers = {kind: num for kind, num in found.items() if kind[0] == "all-gather"}
    assert gathers == {kind: num for kind, num in expected.items() if kind[0] == "all-gather"}


def test_a_split_that_cuts_what_shares_a_scale_is_refused():
    base = stored("float8_e4m3fn")[0]["wi_0"]
    specs = QLORA.param_specs()
    with pytest.raises(ValueError, match="scales of wi_0: its expert_dim=2 is not divisible by tensor_parallelism=4"):
        stored_partition("wi_0", specs["wi_0"], base, LogicalMesh(mesh_of(tensor=4)))
    with pytest.raises(ValueError, match="bytes of wi_0: its model_dim=4 is not divisible by fsdp_parallelism=8"):
        stored_partition("wi_0", specs["wi_0"], stored("mxfp4")[0]["wi_0"], LogicalMesh(mesh_of(fsdp=8)))


BUILT = pytest.mark.skipif(not takes(np.dtype(np.float32)), reason="the C++ library is not built here")


@pytest.mark.parametrize("form", [None, QuantizedForm(qtype="int8", block=(1, 64), scale_dtype="float32")])
@pytest.mark.parametrize("kernel", ["cpu", pytest.param("cpu_native", marks=BUILT)])
def test_no_gradient_of_a_frozen_matrix_is_computed(kernel, form):
    """Of the two gradients of a grouped matmul the compiler drops that of the matrix, which would be as large as it."""
    lora = LoraConfig(rank=RANK, targets=("experts",))
    config = moe_config(num_experts=8, model_dim=64, expert_dim=1024, lora=lora)
    shapes = {name: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for name, spec in config.param_specs().items()}
    trained = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    if form is not None:
        shapes |= {name: form.struct(shapes[name].shape) for name in ("wi_0", "wi_1", "wo")}
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
