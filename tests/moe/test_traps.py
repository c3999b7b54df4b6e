"""One test for each bug that shipped elsewhere and that this layer could have: the traps of docs/architecture.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from raggedmoe import ExpertConfig, MoE, update_selection_bias
from raggedmoe.moe.dispatch import ring, strategy_settings
from raggedmoe.moe.records import RouteOutput
from raggedmoe.sharding.stage import TOKENS, OnMesh

from . import numpy_layer
from .examples import (
    assert_close,
    dense_gradients,
    einsum_config,
    layer_gradients,
    moe_config,
    random_experts,
    random_params,
    random_tokens,
    run_layer,
)
from .on_mesh import mesh_of, run_on_mesh
from .test_layer import axes_of

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    "backend", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "ragged_dot", "expert_ffn"))]
)
def test_trap_01_router_learns_from_the_task(backend):
    config = moe_config(moe_backend=backend)  # no balance loss: nothing else could give the router a gradient
    x, params, cotangent = random_tokens(config, 8), random_params(config), random_tokens(config, 8, seed=3)
    out, gradients = layer_gradients(x, params, config, cotangent)
    expected = dense_gradients(x, params, config, cotangent, out.experts)["router_kernel"]
    assert np.abs(expected).max() > 1e-2
    assert_close(gradients["router_kernel"], expected)


NUM_TOKENS, PER_TOKEN, NUM_EXPERTS, NUM_RANKS = 12, 3, 8, 4


def two_hundred_routings():
    rng = np.random.default_rng(0)
    return [random_experts(rng, NUM_TOKENS, PER_TOKEN, NUM_EXPERTS, skew=rng.choice([0, 1, 4])) for _ in range(200)]


@pytest.mark.parametrize("strategy", [pytest.param("ring", marks=pytest.mark.ci), "all_to_all"])
def test_trap_04_no_row_is_lost_or_misassigned(strategy):
    config = moe_config(
        num_experts=NUM_EXPERTS, experts_per_token=PER_TOKEN, strategy=strategy, model_dim=3, expert_dim=2
    )
    x, params, mesh = random_tokens(config, NUM_TOKENS), random_params(config), mesh_of(expert=NUM_RANKS)
    for experts in two_hundred_routings():
        expected = numpy_layer.layer(x, params, config, replay=experts)
        out = run_on_mesh(x, params, config, mesh, replay=jnp.asarray(experts))
        assert_close(out.output, expected.output)


def test_trap_04_ring_buffer_holds_the_worst_case_and_no_more():
    config = moe_config(num_experts=NUM_EXPERTS, experts_per_token=PER_TOKEN, strategy="ring")
    held, run = NUM_EXPERTS // NUM_RANKS, OnMesh(mesh=mesh_of(expert=NUM_RANKS))
    settings = strategy_settings(config, NUM_TOKENS // NUM_RANKS, run)
    none = jnp.zeros(())

    @jax.jit
    def prepared(experts):
        def stage(experts):
            weights, mask = jnp.ones(experts.shape), jnp.ones(experts.shape[0], bool)
            given = {"experts": experts, "tokens": None, "mask": mask, "weights": weights}
            losses = dict.fromkeys(("aux_loss", "z_loss", "entropy", "max_violation"), none)
            metadata = ring.prepare(RouteOutput(**given, **losses, load=jnp.zeros(NUM_EXPERTS, jnp.int32)), settings)
            return metadata.slot_of_row[None], metadata.group_sizes[None]

        return run.run(stage, experts, arguments=(TOKENS,), result=TOKENS)

    for experts in two_hundred_routings():
        rows, group_sizes = map(np.asarray, prepared(jnp.asarray(experts)))
        assert rows.shape == (NUM_RANKS, NUM_TOKENS * min(PER_TOKEN, held))
        for rank in range(NUM_RANKS):
            valid = rows[rank][: group_sizes[rank].sum()]
            of_expert = [np.flatnonzero(experts.reshape(-1) == rank * held + g) for g in range(held)]
            assert np.array_equal(valid, np.concatenate(of_expert))
            assert (rows[rank][len(valid) :] < 0).all()


def biased(strength):
    config = moe_config({"score": "sigmoid", "selection_bias": True, "aux_loss_weight": 0.1})
    x, params = random_tokens(config, 10), random_params(config)
    bias = strength * jnp.asarray([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    return config, x, {**params, "router_selection_bias": bias}


def test_trap_08_selection_bias_chooses_but_never_weighs():
    config, x, params = biased(100.0)
    out = run_layer(x, params, config)
    assert set(np.asarray(out.experts).reshape(-1).tolist()) == {0, 1}
    without = {**params, "router_selection_bias": jnp.zeros(6)}
    np.testing.assert_array_equal(out.output, run_layer(x, without, config, replay=out.experts).output)
    assert_close(out.output, numpy_layer.layer(x, params, config).output)


def test_trap_08_selection_bias_gets_no_gradient():
    config, x, params = biased(0.01)
    _, gradients = layer_gradients(x, params, config, jnp.ones_like(x))
    assert not np.asarray(gradients["router_selection_bias"]).any()


@pytest.mark.parametrize("aux_loss", ["batch", "sequence"])
def test_trap_09_losses_on_a_mesh_are_those_of_the_global_batch(aux_loss):
    losses = {"aux_loss": aux_loss, "aux_loss_weight": 1.0, "z_loss_weight": 1.0}
    config = moe_config(losses, num_experts=4, strategy="ring")
    x, params = random_tokens(config, 16), random_params(config)
    # The ranks see unequal numbers of tokens that count and different experts: the mean of their own losses is wrong.
    mask = jnp.arange(16) > 5
    x = jnp.where(jnp.arange(16)[:, None] < 8, x, jnp.abs(x))
    out = run_on_mesh(x, params, config, mesh_of(expert=2), mask=mask, num_sequences=2)
    expected = numpy_layer.layer(x, params, config, mask=mask, num_sequences=2)
    for name in ("aux_loss", "z_loss", "load", "entropy", "max_violation"):
        np.testing.assert_allclose(getattr(out, name), getattr(expected, name), rtol=1e-12, err_msg=name)


def test_trap_09_bias_moves_by_the_sign_of_the_sum_not_the_sum_of_signs():
    shards = jnp.asarray([[9, 1, 2], [1, 2, 3], [1, 2, 3]])
    bias = jnp.zeros(3)
    whole = update_selection_bias(bias, shards.sum(0), rate=1.0)
    assert whole.tolist() == [-1.0, 1.0, 0.0]
    averaged = jnp.mean(jnp.stack([update_selection_bias(bias, load, rate=1.0) for load in shards]), axis=0)
    assert np.sign(averaged).tolist() != whole.tolist()


@pytest.mark.product
@pytest.mark.parametrize("selection", ["learned", "expert_choice"])
@pytest.mark.parametrize("factor", [0.2, 0.5, 6.0])
def test_trap_10_every_dropped_token_is_counted(factor, selection):
    config = moe_config(
        {"selection": selection}, strategy="capacity", capacity_factor=factor, experts=ExpertConfig(biases=True)
    )
    # Every expert says 1 to everything: what is missing from a token's sum is what was dropped.
    params = {name: jnp.full(v.shape, float(name == "bias_wo")) for name, v in random_params(config).items()}
    params["router_kernel"] = random_params(config)["router_kernel"]
    x = random_tokens(config, 20)
    mask = jnp.arange(20) % 7 != 3
    out = run_layer(x, params, config, mask=mask)
    if selection == "expert_choice":
        missing = int(((np.asarray(out.output)[:, 0] == 0) & np.asarray(mask)).sum())
    else:
        scores = np.asarray(jax.nn.softmax(x @ params["router_kernel"].T, axis=-1))
        missing = 0
        for t in np.flatnonzero(mask):
            weights = np.sort(scores[t])[-2:] / np.sort(scores[t])[-2:].sum()
            sums = {0: [1.0], 1: list(weights), 2: [0.0]}
            missing += min(sums, key=lambda n: min(abs(float(out.output[t, 0]) - s) for s in sums[n]))
    assert int(out.dropped) == missing
    assert (missing > 0) == (factor < 1.0)


def test_trap_11_swapped_axes_are_refused_where_the_sizes_agree():
    config = moe_config(model_dim=6, expert_dim=6)
    axes = {**axes_of(config), "wo": ("expert", "model_dim", "expert_dim")}
    message = r"expected wo \(expert, expert_dim, model_dim\).*got \(expert, model_dim, expert_dim\).*\(0, 2, 1\)"
    with pytest.raises(ValueError, match=message):
        MoE.from_arrays(config, random_params(config), axes)


def test_trap_11_axes_that_are_not_named_are_refused():
    config = moe_config(model_dim=6, expert_dim=6)
    axes = {name: value for name, value in axes_of(config).items() if name != "wi_0"}
    with pytest.raises(ValueError, match=r"expected the axes of wi_0.*got none: sizes alone cannot tell F from D"):
        MoE.from_arrays(config, random_params(config), axes)


def test_trap_11_variable_that_names_other_axes_is_refused_when_used():
    config = moe_config(model_dim=6, expert_dim=6)
    module = MoE.from_arrays(config, random_params(config), axes_of(config))
    module.wi_1 = nnx.Param(module.wi_1[...], axes=("expert", "model_dim", "expert_dim"))
    with pytest.raises(ValueError, match=r"expected wi_1 \(expert, expert_dim, model_dim\).*transpose it"):
        module(jnp.ones((2, 6)))


def test_trap_11_each_weight_is_contracted_over_its_own_axis_where_f_equals_d():
    config = moe_config(model_dim=6, expert_dim=6)
    x, params = random_tokens(config, 5), random_params(config)
    assert_close(run_layer(x, params, config).output, numpy_layer.layer(x, params, config).output)


def test_trap_17_random_routing_never_picks_an_expert_twice():
    config = einsum_config({"selection": "random"}, experts_per_token=5)
    experts = run_layer(random_tokens(config, 500), random_params(config), config, key=jax.random.key(0)).experts
    assert (np.diff(np.sort(np.asarray(experts), axis=1), axis=1) > 0).all()
