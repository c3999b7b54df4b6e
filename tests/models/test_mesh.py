"""A decoder on a mesh computes what it computes on one device, and moves no more than it must."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from raggedmoe.models.decoder import decode
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.parameters import param_specs
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.stage import TOKENS
from tests.models.drawn import EINSUM, drawn_ids, drawn_params, quick_jit, tiny
from tests.models.test_decoder import EPS, loss_of

MESHES = {
    "data": Plan(data=2),
    "fsdp": Plan(fsdp=2),
    "tensor": Plan(tensor=2),
    "expert": Plan(expert=2),
    "mixed": Plan(fsdp=2, expert=2, tensor=2),
}
ROWS, LENGTH = 4, 24


# XLA's own grouped matmul, which compiles in half the time of the CPU's tile loops.
RAGGED_DOT = ModelExecution(moe=MoEExecution(moe_backend="ragged_dot"))


def with_moe(execution, **changes):
    return dataclasses.replace(execution, moe=dataclasses.replace(execution.moe, **changes))


def on_mesh(config, execution, plan, params, ids):
    """The arrays in their places, and the mesh."""
    plan = dataclasses.replace(plan, tensor_split=execution.moe.tensor_split)
    mesh = plan.mesh()
    places = plan.shardings(mesh, param_specs(config))
    return jax.device_put(params, places), jax.device_put(ids, NamedSharding(mesh, TOKENS)), mesh, places


@pytest.fixture(scope="module")
def single():
    """A model with its loss and gradients on one device: latent attention, a dense layer, further predictions."""
    config = tiny("deepseek-v3-tiny", num_layers=2, dense_layers=(0,))
    params, ids = drawn_params(config), drawn_ids(config, ROWS, LENGTH)
    return config, params, ids, *on_one_device(config, params, ids)


def on_one_device(config, params, ids):
    """The loss and gradients that a mesh must have, with experts by einsums: neither kernels nor a mesh.

    And of each gradient, what one rounding of every parameter changes in it at most: sums of terms that cancel, as a
    norm's gradient over all tokens is, are that uncertain in float32, in whatever order a mesh adds them.
    """
    function = quick_jit(jax.value_and_grad(loss_of(config, ids, EINSUM)))
    value, gradients = function(params)
    rng = np.random.default_rng(0)
    signs = {name: rng.choice([-1, 1], array.shape) for name, array in params.items()}
    rounded = {name: (array * (1 + EPS * signs[name])).astype(array.dtype) for name, array in params.items()}
    changes = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), function(rounded)[1], gradients)
    return value, gradients, changes


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "mixed" else pytest.mark.slow) for n in MESHES])
def test_loss_and_all_gradients_do_not_depend_on_the_mesh(single, name):
    assert_same_on(MESHES[name], dataclasses.replace(RAGGED_DOT, scan_layers=False), *single)


@pytest.mark.slow  # the layer's own test has the fault's mesh too
def test_experts_split_over_the_width_beside_shared_ones_have_the_same_gradients(single):
    """On a mesh where XLA, without a word about shared experts' tokens, exchanged two devices' gradients."""
    assert single[0].moe.experts.num_shared
    by_width = with_moe(dataclasses.replace(RAGGED_DOT, scan_layers=False), tensor_split="model_dim")
    assert_same_on(Plan(data=2, expert=2, tensor=2), by_width, *single)


def assert_same_on(plan, execution, config, params, ids, *on_one):
    placed, placed_ids, mesh, places = on_mesh(config, execution, plan, params, ids)
    if plan.expert > 1:
        execution = with_moe(execution, strategy="all_to_all")
    loss = loss_of(config, placed_ids, execution, mesh=mesh)
    loss = quick_jit(jax.value_and_grad(loss), out_shardings=(None, places))
    assert_same_loss_and_gradients(*loss(placed), *on_one)


def assert_same_loss_and_gradients(found_value, found, value, gradients, changes):
    """Each gradient within 4 times what one rounding of every parameter changes in it, and 8 of its own roundings."""
    np.testing.assert_allclose(found_value, value, rtol=8 * EPS)
    assert found.keys() == gradients.keys()
    for name, gradient in jax.device_get(gradients).items():
        bound = 4 * changes[name] + 8 * EPS * float(np.abs(gradient).max())
        difference = float(np.abs(jax.device_get(found[name]) - gradient).max())
        assert difference <= bound, (name, difference, bound)


# Sinks, windows and biases; two key heads that four ranks cannot split; tied embeddings. The trainer's ten steps on a
# mesh are of scanned layers too.
@pytest.mark.parametrize(
    ("model", "plan", "remat", "changes"),
    [
        pytest.param("gpt-oss-tiny", MESHES["mixed"], "none", {}, id="sinks", marks=pytest.mark.slow),
        pytest.param(
            "mixtral-tiny",
            Plan(data=2, tensor=4),
            ("attn_out",),
            {},
            id="whole-heads",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3-tiny", MESHES["mixed"], "none", {"tied_embeddings": True}, id="tied", marks=pytest.mark.slow
        ),
    ],
)
def test_scanned_layers_on_a_mesh_are_the_same(model, plan, remat, changes):
    config, execution = tiny(model, num_layers=2, **changes), dataclasses.replace(RAGGED_DOT, remat=remat)
    params, ids = drawn_params(config), drawn_ids(config, ROWS, LENGTH)
    assert_same_on(plan, execution, config, params, ids, *on_one_device(config, params, ids))


# The strategies keep the same arrays: they gather weights in one place.
@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy", ["all_to_all", *(pytest.param(s, marks=pytest.mark.slow) for s in ("local", "ring"))]
)
def test_gathered_weights_are_not_kept_for_the_backward_pass(strategy):
    """A scan's results beside its carry are what is kept of every layer; in `shard_map` with all devices' in front."""
    config = tiny("deepseek-v3-tiny", num_layers=2, dense_layers=(), mtp_layers=0)
    execution = with_moe(RAGGED_DOT, strategy=strategy)
    params, ids = jax.eval_shape(lambda: drawn_params(config)), jnp.zeros((12, 10), jnp.int32)
    mesh = Plan(fsdp=2, expert=1 if strategy == "local" else 2).mesh()

    def kept(**changes):
        changed = dataclasses.replace(execution, **changes)

        def loss(params):
            return decode(params, ids, config, changed, mesh=mesh).hidden.sum()

        forward = next(e for e in jax.make_jaxpr(jax.grad(loss))(params).eqns if e.primitive.name == "scan")
        return [v.aval.size for v in forward.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)]

    sizes = {spec.num_elements for spec in param_specs(config).values() if spec.contracts is not None}
    gathered = {size * copies for size in sizes for copies in (1, 2, 4)}
    usually = kept()
    assert not gathered & set(usually)
    assert len(kept(remat="full")) < len(usually)


def test_sequences_that_the_mesh_cannot_split_are_refused():
    config = tiny("mixtral-tiny")
    mesh = Plan(fsdp=2, expert=4).mesh()
    with pytest.raises(ValueError, match=r"sequences=6 is not divisible by .*=8; .* or pad with sequences=8"):
        decode({}, jnp.zeros((6, 8), jnp.int32), config, mesh=mesh)
