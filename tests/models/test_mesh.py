"""A decoder on a mesh computes what it computes on one device, and moves no more than it must."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.models.decoder import decode
from raggedmoe.models.specs import param_specs
from raggedmoe.parallel.degrees import Degrees
from raggedmoe.parallel.plan import Plan

from .drawn import drawn_ids, drawn_params, quick_jit, tiny, with_einsum_experts
from .test_decoder import EPS, assert_same_gradients, loss_of

MESHES = {
    "data": Degrees(data=2),
    "fsdp": Degrees(fsdp=2),
    "tensor": Degrees(tensor=2),
    "expert": Degrees(expert=2),
    "mixed": Degrees(fsdp=2, expert=2, tensor=2),
}
ROWS, LENGTH = 4, 24


def with_strategy(config, degrees):
    """The same model with a way to experts on other devices, if there are any."""
    strategy = "all_to_all" if degrees.expert > 1 else None
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, strategy=strategy))


def with_ragged_dot(config):
    """The same model with XLA's own grouped matmul, which compiles in half the time of the CPU's tile loops."""
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, moe_backend="ragged_dot"))


def on_mesh(config, degrees, params, ids):
    """The arrays in their places, and the mesh."""
    plan = Plan(degrees=degrees, tensor_split=config.moe.tensor_split)
    mesh = plan.mesh()
    places = plan.shardings(mesh, param_specs(config))
    return jax.device_put(params, places), jax.device_put(ids, plan.tokens(mesh)), mesh, places


@pytest.fixture(scope="module")
def single():
    """A model with its loss and gradients on one device: latent attention, a dense layer, further predictions."""
    config = with_ragged_dot(tiny("deepseek-v3-tiny", num_layers=2, dense_layers=(0,), scan_layers=False))
    params, ids = drawn_params(config), drawn_ids(config, ROWS, LENGTH)
    return config, params, ids, *on_one_device(config, params, ids)


def on_one_device(config, params, ids):
    """The loss and gradients that a mesh must have, with experts by einsums: neither kernels nor a mesh."""
    return quick_jit(jax.value_and_grad(loss_of(with_einsum_experts(config), ids)))(params)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "mixed" else pytest.mark.slow) for n in MESHES])
def test_loss_and_all_gradients_do_not_depend_on_the_mesh(single, name):
    assert_same_on(MESHES[name], *single)


@pytest.mark.slow  # the layer's own test has the fault's mesh too
def test_experts_split_over_the_width_beside_shared_ones_have_the_same_gradients(single):
    """On a mesh where XLA, without a word about shared experts' tokens, exchanged two devices' gradients."""
    config, *rest = single
    assert config.moe.experts.num_shared
    by_width = dataclasses.replace(config, moe=dataclasses.replace(config.moe, tensor_split="model_dim"))
    assert_same_on(Degrees(data=2, expert=2, tensor=2), by_width, *rest)


def assert_same_on(degrees, config, params, ids, value, gradients):
    placed, placed_ids, mesh, places = on_mesh(config, degrees, params, ids)
    config = with_strategy(config, degrees)
    loss = quick_jit(jax.value_and_grad(loss_of(config, placed_ids, mesh=mesh)), out_shardings=(None, places))
    found_value, found = loss(placed)
    np.testing.assert_allclose(found_value, value, rtol=8 * EPS)
    assert_same_gradients(found, gradients, 64)


# Sinks, windows and biases; two key heads that four ranks cannot split; tied embeddings. The trainer's ten steps on a
# mesh are of scanned layers too.
@pytest.mark.parametrize(
    ("model", "degrees", "changes"),
    [
        pytest.param("gpt-oss-tiny", MESHES["mixed"], {}, id="sinks", marks=pytest.mark.slow),
        pytest.param(
            "mixtral-tiny",
            Degrees(data=2, tensor=4),
            {"remat": ("attn_out",)},
            id="whole-heads",
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3-tiny", MESHES["mixed"], {"tied_embeddings": True}, id="tied", marks=pytest.mark.slow),
    ],
)
def test_scanned_layers_on_a_mesh_are_the_same(model, degrees, changes):
    config = with_ragged_dot(tiny(model, num_layers=2, **changes))
    params, ids = drawn_params(config), drawn_ids(config, ROWS, LENGTH)
    assert_same_on(degrees, config, params, ids, *on_one_device(config, params, ids))


# The strategies keep the same arrays: they gather weights in one place.
@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy", ["all_to_all", *(pytest.param(s, marks=pytest.mark.slow) for s in ("local", "ring"))]
)
def test_gathered_weights_are_not_kept_for_the_backward_pass(strategy):
    """A scan's results beside its carry are what is kept of every layer; in `shard_map` with all devices' in front."""
    config = with_ragged_dot(tiny("deepseek-v3-tiny", num_layers=2, dense_layers=(), mtp_layers=0))
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, strategy=strategy))
    params, ids = jax.eval_shape(lambda: drawn_params(config)), jnp.zeros((12, 10), jnp.int32)
    mesh = Plan(degrees=Degrees(fsdp=2, expert=1 if strategy == "local" else 2)).mesh()

    def kept(**changes):
        changed = dataclasses.replace(config, **changes)

        def loss(params):
            return decode(params, ids, changed, mesh=mesh).hidden.sum()

        forward = next(e for e in jax.make_jaxpr(jax.grad(loss))(params).eqns if e.primitive.name == "scan")
        return [v.aval.size for v in forward.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)]

    sizes = {spec.num_elements for spec in param_specs(config).values() if spec.contracts is not None}
    gathered = {size * copies for size in sizes for copies in (1, 2, 4)}
    usually = kept()
    assert not gathered & set(usually)
    assert len(kept(remat="full")) < len(usually)


def test_sequences_that_the_mesh_cannot_split_are_refused():
    config = tiny("mixtral-tiny")
    mesh = Plan(degrees=Degrees(fsdp=2, expert=4)).mesh()
    with pytest.raises(ValueError, match=r"6 sequences .*expert_parallelism=4 = 8 parts.*multiple of 8"):
        decode({}, jnp.zeros((6, 8), jnp.int32), config, mesh=mesh)
