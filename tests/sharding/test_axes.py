"""A mesh of the user's own: other names, another order, several axes for one role, and axes that mean nothing to us."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from raggedmoe import Decoder, ExpertConfig, MoE, MoEExecution
from raggedmoe.aot.collectives import StepSizes, layer_collectives
from raggedmoe.models.generate import generate
from raggedmoe.models.parameters import param_specs
from raggedmoe.sharding.axes import AXES, TOKEN_AXES, logical_mesh
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.rules import param_shardings
from tests.aot.hlo_collectives import collectives
from tests.models.drawn import EINSUM, drawn_ids, drawn_params, quick_jit, tiny
from tests.models.test_decoder import EPS, loss_of
from tests.models.test_mesh import assert_same_loss_and_gradients, on_one_device
from tests.moe import numpy_layer
from tests.moe.examples import (
    assert_agrees,
    assert_close,
    assert_gradients_close,
    dense_gradients,
    layer,
    moe_config,
    random_params,
    random_tokens,
    scalar_loss,
)

CONFIG = moe_config(
    {"aux_loss_weight": 0.3, "z_loss_weight": 0.2},
    experts=ExpertConfig(biases=True),
    num_experts=8,
    model_dim=8,
    expert_dim=4,
)
NUM_TOKENS = 16
# name -> the mesh, which of its axes are which, and how the layer runs
OWN = {
    "experts over two axes": (
        {"y": 2, "x": 2},
        {"expert": ("x", "y")},
        MoEExecution(strategy="all_to_all"),
    ),
    "in another order": (
        {"model": 2, "ep": 2, "replica": 2},
        {"tensor": "model", "expert": "ep", "fsdp": "replica"},
        MoEExecution(strategy="ring", tensor_split="model_dim", width_chunks=2),
    ),
    "data alone, beside an axis that is not ours": ({"batch": 2, "rest": 2}, {"data": "batch"}, MoEExecution()),
}
every_own_mesh = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "in another order" else []) for name in OWN]
)


def mesh_of(axes):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return jax.sharding.Mesh(devices.reshape(*axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def placed(mesh, config, execution, params, *per_token):
    specs = config.param_specs()
    places = param_shardings(dataclasses.replace(mesh, tensor_split=execution.tensor_split), specs)
    tokens = mesh.sharding(PartitionSpec(TOKEN_AXES))
    return jax.device_put(params, places), *(jax.device_put(array, tokens) for array in per_token)


@every_own_mesh
def test_the_layer_and_its_gradients_are_those_of_the_oracles_and_it_sends_what_the_plan_says(name):
    axes, mesh_axes, execution = OWN[name]
    mesh = logical_mesh(mesh_of(axes), mesh_axes)
    x, cotangent = (np.asarray(random_tokens(CONFIG, NUM_TOKENS, seed=seed, dtype=np.float32)) for seed in (1, 3))
    params = random_params(CONFIG, dtype=np.float32)
    mask = np.arange(NUM_TOKENS) % 7 != 3
    value = numpy_layer.layer(x, params, CONFIG, mask=mask)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: jnp.asarray(array, np.float64), (x, params, cotangent))
        slopes = dense_gradients(wide[0], wide[1], CONFIG, wide[2], value.experts, jnp.asarray(mask))

    def loss(x, params, cotangent, mask):
        out = layer(x, params, CONFIG, execution, mesh=mesh, mask=mask)
        return scalar_loss(out, cotangent), out

    here, x, cotangent, mask = placed(mesh, CONFIG, execution, params, x, cotangent, mask)
    arguments = (x, here, cotangent, mask)
    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True)).lower(*arguments).compile()
    (dx, gradients), out = run(*arguments)
    assert_agrees(out, value)
    assert_gradients_close({"x": dx, **gradients}, slopes)
    if mesh.size(*AXES) < mesh.mesh.size:
        return  # along the other axes all devices agree on gradients by sums that the plan does not know
    plan, planned = Plan(**{axis: mesh.size(axis) for axis in AXES}, tensor_split=execution.tensor_split), Counter()
    step = StepSizes(num_tokens=NUM_TOKENS // plan.num_token_shards, dtype="float32", ragged=False)
    for each in layer_collectives(CONFIG, execution, plan, step):
        planned[each.kind, each.num_devices] += each.num_bytes
    assert collectives(run.as_text()) == planned


def test_the_module_takes_such_a_mesh_also_where_it_is_the_current_one():
    axes, mesh_axes, execution = OWN["experts over two axes"]
    config, params = CONFIG, random_params(CONFIG, dtype=np.float32)
    names = {name: spec.axes for name, spec in config.param_specs().items()}
    own = mesh_of(axes)
    module = MoE(config, params=params, axes=names, execution=execution, mesh=own, mesh_axes=mesh_axes)
    x = random_tokens(config, NUM_TOKENS, dtype=np.float32)
    with jax.set_mesh(own):
        out = jax.jit(lambda x: module(x))(x)
    assert_agrees(out, numpy_layer.layer(x, params, config))


@pytest.mark.slow  # generation on such a mesh is quick
def test_a_decoder_takes_such_a_mesh():
    axes, mesh_axes = {"model": 2, "ep": 2, "fsdp": 2}, {"tensor": "model", "expert": "ep", "fsdp": "fsdp"}
    config = tiny("deepseek-v3-tiny", num_layers=2, dense_layers=(0,))
    params, ids = drawn_params(config), drawn_ids(config, 4, 12)
    on_one = on_one_device(config, params, ids)
    own = mesh_of(axes)
    mesh = logical_mesh(own, mesh_axes)
    places = param_shardings(mesh, param_specs(config))
    here = jax.device_put(params, places), jax.device_put(ids, mesh.sharding(PartitionSpec(TOKEN_AXES)))
    execution = dataclasses.replace(EINSUM, scan_layers=False)
    loss = quick_jit(jax.value_and_grad(loss_of(config, here[1], execution, mesh=mesh)), out_shardings=(None, places))
    assert_same_loss_and_gradients(*loss(here[0]), *on_one)
    model = Decoder(config, params=here[0], execution=execution, mesh=own, mesh_axes=mesh_axes)
    expected = Decoder(config, params=params, execution=execution)(ids)
    assert_close(jax.jit(lambda ids: model(ids))(here[1]), expected)


@pytest.mark.parametrize(
    ("mesh_axes", "message"),
    [
        (
            None,
            r"a mesh with the axes \('data', 'fsdp', 'expert', 'tensor'\), as raggedmoe.Plan.* got axes \('x', 'y'\)",
        ),
        ({"experts": "x"}, r"mesh_axes that say which .* got axes \('x', 'y'\) and mesh_axes={'experts': 'x'}"),
        ({"expert": "z"}, "got .* and mesh_axes={'expert': 'z'}"),
        ({"expert": "x", "data": ("y", "x")}, r"each once; got .* and mesh_axes={'expert': 'x', 'data': \('y', 'x'\)}"),
    ],
)
def test_axes_that_cannot_be_meant_are_refused(mesh_axes, message):
    with pytest.raises(ValueError, match=message):
        logical_mesh(mesh_of({"x": 2, "y": 2}), mesh_axes)


def test_axes_that_are_not_left_to_the_compiler_are_refused_with_how_to_make_them():
    own = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    message = r"AxisType.Auto, got x Explicit, y Auto; make it with axis_types=\(jax.sharding.AxisType.Auto,\) \* 2"
    with pytest.raises(ValueError, match=message):
        MoE(CONFIG, rngs=nnx.Rngs(0), mesh=own, mesh_axes={"expert": "x"})


def test_axes_without_the_mesh_that_they_are_of_are_refused():
    with pytest.raises(ValueError, match=r"mesh_axes with a jax.sharding.Mesh, got .* with None; leave it out"):
        MoE(CONFIG, rngs=nnx.Rngs(0), mesh_axes={"expert": "x"})
    mesh = logical_mesh(mesh_of({"x": 2}), {"data": "x"})
    with pytest.raises(ValueError, match=r"expected mesh_axes with a jax\.sharding\.Mesh"):
        Decoder(tiny("mixtral-tiny"), rngs=nnx.Rngs(0), mesh=mesh, mesh_axes={"expert": "x"})


def test_new_parameters_are_those_of_one_device_each_drawn_where_it_belongs():
    own, mesh_axes = mesh_of({"x": 2, "y": 2}), {"expert": "x", "fsdp": "y"}
    execution = MoEExecution(strategy="ring")
    layer, alone = (
        MoE(CONFIG, rngs=nnx.Rngs(0), execution=execution, mesh=own, mesh_axes=mesh_axes),
        MoE(CONFIG, rngs=nnx.Rngs(0)),
    )
    assert layer.wi_0[...].sharding.spec == PartitionSpec("x", None, "y")
    for name, array in layer.params.items():
        np.testing.assert_allclose(array, alone.params[name], rtol=4 * EPS, err_msg=name)
    model = Decoder(tiny("mixtral-tiny", num_layers=1), rngs=nnx.Rngs(0), mesh=own, mesh_axes=mesh_axes)
    assert model.params["stacks.0.0.moe.wi_0"].sharding.spec == PartitionSpec(None, "x", None, "y")
    shardings = Plan().shardings(own, param_specs(model.config), mesh_axes)
    assert {name: array.sharding for name, array in model.params.items()} == shardings
    assert Plan().shardings(model.mesh, param_specs(model.config)) == shardings
    by_width = Plan(tensor_split="model_dim").shardings(own, CONFIG.param_specs(), {"tensor": ("x", "y")})
    assert by_width["wi_0"].spec == PartitionSpec(None, None, ("x", "y"))


def test_what_a_mesh_cannot_split_or_a_strategy_needs_is_found_when_a_model_is_made():
    with pytest.raises(ValueError, match=r"wi_0: its expert=6 is not divisible by expert_parallelism=4"):
        MoE(dataclasses.replace(CONFIG, num_experts=6), rngs=nnx.Rngs(0), mesh=Plan(expert=4).mesh())
    ring = dataclasses.replace(EINSUM, moe=MoEExecution(strategy="ring"))
    with pytest.raises(ValueError, match="strategy='ring' needs the mesh that experts are split over, got None"):
        Decoder(tiny("mixtral-tiny"), rngs=nnx.Rngs(0), execution=ring)


def test_a_mesh_of_a_plan_has_our_names():
    mesh = logical_mesh(Plan(fsdp=2, tensor=2).mesh())
    assert {axis: mesh.size(axis) for axis in AXES} == {"data": 1, "fsdp": 2, "expert": 1, "tensor": 2}
    assert mesh.axes(*AXES) == AXES
    assert logical_mesh(mesh) is mesh


@pytest.mark.ci
def test_text_generated_on_a_mesh_is_that_of_one_device():
    config = tiny("qwen3-tiny", num_layers=1)
    params, prompts = drawn_params(config), [[1, 2, 3], [4, 5]]
    mesh = logical_mesh(mesh_of({"batch": 2, "model": 2}), {"data": "batch", "tensor": "model"})
    places = param_shardings(mesh, param_specs(config))
    on_mesh = Decoder(config, params=jax.device_put(params, places), execution=EINSUM, mesh=mesh)
    alone = Decoder(config, params=params, execution=EINSUM)
    texts = [list(generate(model, prompts, max_new_tokens=4)) for model in (on_mesh, alone)]
    assert texts[0] == texts[1]
    with pytest.raises(
        ValueError, match="sequences=3 is not divisible by data_parallelism × fsdp_parallelism × expert_parallelism=2"
    ):
        next(generate(on_mesh, [*prompts, [6]], max_new_tokens=1))
