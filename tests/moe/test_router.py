"""Every router against the NumPy oracle, and its gradients against finite differences.

The experts are plain einsums here (`moe_backend="dense"`), which compile in a third of the time: `test_stages.py` and
`test_layer.py` have the routers' weights and gradients on every other way.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import ExpertConfig, MoEExecution
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.moe.router import route
from tests.moe import numpy_layer
from tests.moe.examples import (
    EINSUM,
    assert_agrees,
    assert_close,
    dense_gradients,
    finite_differences,
    layer_gradients,
    moe_config,
    random_experts,
    random_params,
    random_tokens,
    run_layer,
    stage_settings,
)

pytestmark = pytest.mark.usefixtures("x64")

GROUPS = {"num_groups": 3, "groups_per_token": 2}
ROUTERS = {
    "softmax_renormalised": {},
    "softmax_not_renormalised": {"normalize": "none"},
    "top_k_then_softmax": {"score": "logits", "normalize": "softmax", "logit_bias": True},
    "sigmoid_with_selection_bias": {"score": "sigmoid", "selection_bias": True, "scale": 2.5},
    "sqrt_softplus": {"score": "sqrt_softplus"},
    "groups_by_top2_sum": {"score": "sigmoid", "selection_bias": True, **GROUPS},
    "groups_by_max": {"normalize": "none", "group_score": "max", "scale": 16.0, **GROUPS},
    "top1_on_the_input": {"score": "sigmoid", "normalize": "none", "weigh": "input"},
    "expert_scale": {"expert_scale": True},
    "logit_bias": {"logit_bias": True},
    "hash": {"selection": "hash"},
    "balanced": {"selection": "balanced"},
    "loss_of_what_ranks": {"score": "sigmoid", "selection_bias": True, "aux_loss_probabilities": "softmax"},
}
LOSSES = {"aux_loss_weight": 0.5, "z_loss_weight": 0.25}
TOKEN_IDS = np.random.default_rng(5).integers(0, 2**31 - 1, 16)
by_einsum = functools.partial(run_layer, execution=EINSUM)
einsum_gradients = functools.partial(layer_gradients, execution=EINSUM)
jitted_route = jax.jit(route, static_argnames="settings")
# The mask is an array in both cases, for which the layer is compiled once.
both_masks = pytest.mark.parametrize("masked", [False, True])


def router_case(name, num_tokens=16, **sizes):
    per_token = 1 if name.startswith("top1") else 3
    config = moe_config({**ROUTERS[name], **LOSSES}, experts_per_token=per_token, **sizes)
    ids = jnp.asarray(TOKEN_IDS[:num_tokens]) if name == "hash" else None
    return config, random_tokens(config, num_tokens), random_params(config), ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_router_is_that_of_the_oracle(name):
    config, x, params, ids = router_case(name)
    mask = jnp.arange(16) % 4 != 1
    out = by_einsum(x, params, config, mask=mask, token_ids=ids)
    assert_agrees(out, numpy_layer.layer(x, params, config, mask=mask, token_ids=ids))


@both_masks
@pytest.mark.parametrize(
    ("router", "factor"),
    [
        ({}, 0.5),
        ({"score": "sigmoid", "scale": 2.0, "expert_scale": True}, 1.0),
        ({"weigh": "input", "z_loss_weight": 0.1}, 100.0),
    ],
)
def test_expert_choice_is_that_of_the_oracle(router, factor, masked):
    config = moe_config(
        {"selection": "expert_choice", **router},
        capacity_factor=factor,
        experts=ExpertConfig(biases=True, num_shared=1),
    )
    x, params = random_tokens(config, 11), random_params(config)
    mask = jnp.asarray((not masked) | (np.arange(11) % 3 != 1))
    out = run_layer(x, params, config, mask=mask)
    assert_agrees(out, numpy_layer.layer(x, params, config, mask=mask))


def weights_by_expert(routing, num_experts):
    """Token by token, expert -> weight."""
    return [
        {int(e): w for e, w in zip(experts, weights) if e < num_experts}
        for experts, weights in zip(np.asarray(routing.experts), np.asarray(routing.weights))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_weights_are_those_of_the_oracle(name):
    config, x, params, ids = router_case(name)
    found, _ = jitted_route(x, params, settings=stage_settings(config), token_ids=ids)
    expected = numpy_layer.layer(x, params, config, token_ids=ids).weights
    for one, other in zip(weights_by_expert(found, config.num_experts), expected):
        assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "held_by"),
    [
        *(pytest.param(name, "gap", marks=[pytest.mark.ci] if place % 2 else []) for place, name in enumerate(ROUTERS)),
        pytest.param("sigmoid_with_selection_bias", "replay", marks=pytest.mark.ci),
        ("groups_by_max", "replay"),
    ],
)
def test_gradients_are_the_slopes_of_the_oracle(name, held_by):
    config, x, params, ids = router_case(name, num_tokens=5, model_dim=3, expert_dim=2)
    cotangent = random_tokens(config, 5, seed=4)
    options = {"token_ids": ids, "mask": jnp.arange(5) != 2}
    # Steps of 1e-6 change a ranking only where two scores are about as near: not with this seed, as the equality of
    # the two ways to hold the selection shows.
    expected = numpy_layer.layer(x, params, config, **options)
    if held_by == "replay":
        options["replay"] = jnp.asarray(expected.experts)
    out, gradients = einsum_gradients(x, params, config, cotangent, **options)
    assert_agrees(out, expected)
    names = [name for name in gradients if name == "x" or name.startswith("router")]
    slopes = finite_differences(x, params, config, cotangent, names, **options)
    for which in names:
        np.testing.assert_allclose(gradients[which], slopes[which], atol=1e-7, err_msg=which)


@both_masks
@pytest.mark.parametrize("weigh", ["input", "output"])
def test_gradients_of_expert_choice_are_the_slopes_of_the_oracle(weigh, masked):
    config = moe_config(
        {"selection": "expert_choice", "expert_scale": True, "weigh": weigh},
        capacity_factor=1.0,
        model_dim=3,
        expert_dim=2,
        experts=ExpertConfig(biases=True),
    )
    x, params, cotangent = random_tokens(config, 5), random_params(config), random_tokens(config, 5, seed=4)
    mask = jnp.asarray((not masked) | (np.arange(5) > 2))
    _, gradients = layer_gradients(x, params, config, cotangent, mask=mask)
    slopes = finite_differences(x, params, config, cotangent, list(gradients), mask=mask)
    for which, expected in slopes.items():
        np.testing.assert_allclose(gradients[which], expected, atol=1e-7, err_msg=which)


def far_below_zero(router, dtype):
    """Configuration, tokens, parameters, value and gradients where every logit is about -200."""
    config = moe_config({**router, **LOSSES, "logit_bias": True}, experts_per_token=6)
    params = {**random_params(config, dtype=dtype), "router_logit_bias": jnp.full(6, -200.0, dtype)}
    x = random_tokens(config, 3, dtype=dtype)
    return config, x, params, *einsum_gradients(x, params, config, jnp.ones_like(x))


@pytest.mark.product
@pytest.mark.parametrize("normalize", ["none", "sum"])
@pytest.mark.parametrize("score", ["sqrt_softplus", "sigmoid"])
def test_scores_that_underflow_give_finite_results(score, normalize):
    *_, out, gradients = far_below_zero({"score": score, "normalize": normalize}, jnp.float32)
    assert all(np.isfinite(value).all() for value in jax.tree.leaves((out, gradients)))


@pytest.mark.parametrize("normalize", ["none", "sum"])
def test_sqrt_softplus_keeps_its_slope_far_below_zero(normalize):
    config, x, params, _, gradients = far_below_zero({"score": "sqrt_softplus", "normalize": normalize}, jnp.float64)
    every = jnp.asarray(np.tile(np.arange(6), (3, 1)))
    expected = dense_gradients(x, params, config, jnp.ones_like(x), every)
    assert (np.abs(expected["router_logit_bias"]) > 0).all()
    np.testing.assert_allclose(gradients["router_logit_bias"], expected["router_logit_bias"], rtol=1e-9)


@pytest.mark.parametrize("logit", [-200.0, -20.0, -15.0, -14.9, 0.0, 30.0])
def test_sqrt_softplus_has_no_step_where_its_formula_changes(logit):
    config = moe_config({"score": "sqrt_softplus", "normalize": "none"}, num_experts=1, experts_per_token=1)
    router = {"router_kernel": jnp.ones((1, 1))}
    found = jitted_route(jnp.full((1, 1), logit), router, settings=stage_settings(config))[0].weights[0, 0]
    # Below -15 the library takes softplus(x) for exp(x), which differs by x/2 in exp(x): under 1e-6 in what is a root.
    assert float(found) == pytest.approx(np.sqrt(np.log1p(np.exp(logit))), rel=1e-6)


def test_jitter_multiplies_the_routers_input_alone():
    config = moe_config({"jitter": 0.5})
    x, params = random_tokens(config, 12), random_params(config)
    key = jax.random.key(3)
    keys = [jax.random.fold_in(jax.random.fold_in(key, 1), token) for token in range(12)]
    noise = [jax.random.uniform(own, x.shape[1:], x.dtype, minval=0.5, maxval=1.5) for own in keys]
    out = by_einsum(x, params, config, key=key)
    assert_agrees(out, numpy_layer.layer(x, params, config, noise=np.asarray(noise)))


def test_jitter_is_left_out_without_a_key():
    config = moe_config({"jitter": 0.5})
    x, params = random_tokens(config, 12), random_params(config)
    assert_agrees(by_einsum(x, params, config), numpy_layer.layer(x, params, config))


def random_routing(num_tokens, seed, per_token=3, num_experts=6):
    config = moe_config({"selection": "random"}, experts_per_token=per_token, num_experts=num_experts)
    return by_einsum(random_tokens(config, num_tokens), random_params(config), config, key=jax.random.key(seed)).experts


def test_random_routing_follows_its_seed():
    assert np.array_equal(random_routing(20, seed=1), random_routing(20, seed=1))
    assert not np.array_equal(random_routing(20, seed=1), random_routing(20, seed=2))


def test_random_routing_is_uniform():
    num_tokens = 3000
    counts = np.bincount(np.asarray(random_routing(num_tokens, seed=1)).reshape(-1), minlength=6)
    # Each expert is in a token's three of six with probability 1/2: a binomial, here within five deviations.
    assert np.abs(counts - num_tokens / 2).max() < 5 * np.sqrt(num_tokens / 4)


def test_random_weights_come_from_the_scores():
    config = moe_config({"selection": "random"}, experts_per_token=3)
    x, params = random_tokens(config, 12), random_params(config)
    out = by_einsum(x, params, config, key=jax.random.key(0))
    assert_agrees(out, numpy_layer.layer(x, params, config, replay=np.asarray(out.experts)))


@both_masks
@pytest.mark.parametrize("num_tokens", [1, 7, 50])
def test_balanced_loads_differ_by_one_at_most(num_tokens, masked):
    config = moe_config({"selection": "balanced"}, num_experts=7, experts_per_token=3)
    mask = jnp.asarray((not masked) | (np.random.default_rng(0).random(num_tokens) < 0.6))
    load = by_einsum(random_tokens(config, num_tokens), random_params(config), config, mask=mask).load
    assert int(load.sum()) == 3 * int(np.sum(mask))
    assert int(load.max() - load.min()) <= 1


def test_balanced_routing_begins_with_the_first_expert_and_goes_round_over_tokens_that_count():
    config = moe_config({"selection": "balanced"}, num_experts=7, experts_per_token=3)
    mask = jnp.asarray([True, False, True, True])
    experts = by_einsum(random_tokens(config, 4), random_params(config), config, mask=mask).experts
    np.testing.assert_array_equal(experts, [[0, 1, 2], [7, 7, 7], [3, 4, 5], [6, 0, 1]])


def test_hash_gives_equal_ids_equal_experts():
    config = moe_config({"selection": "hash"}, experts_per_token=3)
    ids = jnp.asarray([3, 9, 3, 2**30, 9])
    experts = np.asarray(by_einsum(random_tokens(config, 5), random_params(config), config, token_ids=ids).experts)
    assert np.array_equal(experts[0], experts[2])
    assert np.array_equal(experts[1], experts[4])
    assert all(len(set(row)) == 3 for row in experts.tolist())


@both_masks
@pytest.mark.parametrize("name", ["softmax_renormalised", "groups_by_top2_sum", "top_k_then_softmax"])
def test_replay_gives_the_recorded_bits(name, masked):
    config, x, params, _ = router_case(name)
    mask = jnp.asarray((not masked) | (np.arange(16) % 4 != 1))
    recorded = by_einsum(x, params, config, mask=mask)
    replayed = by_einsum(x, params, config, mask=mask, replay=recorded.experts)
    for one, other in zip(jax.tree.leaves(recorded), jax.tree.leaves(replayed), strict=True):
        assert np.array_equal(one, other)


def test_replayed_experts_get_gradients_through_their_weights():
    config = moe_config()
    x, params = random_tokens(config, 8), random_params(config)
    replay = jnp.asarray(random_experts(np.random.default_rng(0), 8, 2, 6))
    _, gradients = einsum_gradients(x, params, config, jnp.ones_like(x), replay=replay)
    expected = dense_gradients(x, params, config, jnp.ones_like(x), replay)["router_kernel"]
    assert np.abs(expected).max() > 1e-3
    assert_close(gradients["router_kernel"], expected)


def test_groups_limit_the_choice():
    config = moe_config({"num_groups": 3, "groups_per_token": 1}, experts_per_token=2)
    experts = np.asarray(by_einsum(random_tokens(config, 40), random_params(config), config).experts)
    assert (experts[:, 0] // 2 == experts[:, 1] // 2).all()


def test_normalised_weights_sum_to_the_scale():
    config = moe_config({"score": "sigmoid", "scale": 2.5}, experts_per_token=3)
    params = {"router_kernel": jnp.asarray(np.random.default_rng(0).normal(size=(6, 7)))}
    weights = jitted_route(random_tokens(config, 9), params, settings=stage_settings(config))[0].weights
    np.testing.assert_allclose(weights.sum(1), 2.5, rtol=1e-14)


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ([[-1], [1], [2]], "expected replay between 0 and num_experts=4.*got -1 to 2"),
        ([[0], [9], [2]], "expected replay between 0 and num_experts=4.*got 0 to 9"),
        ([[0, 1], [2, 2], [1, 3]], "expected replay with different experts for each token"),
    ],
)
def test_a_replay_that_is_no_routing_is_refused(replay, message):
    config = moe_config(num_experts=4, experts_per_token=len(replay[0]))
    params = random_params(config)
    with pytest.raises(ValueError, match=message):
        moe_route_and_compute(random_tokens(config, 3), params, config, replay=jnp.asarray(replay))


def test_a_traced_replay_of_no_expert_is_nowhere_and_moves_no_other_token():
    config = moe_config(num_experts=4, experts_per_token=1)
    x, params = random_tokens(config, 3), random_params(config)
    whole = by_einsum(x, params, config, replay=jnp.asarray([[0], [1], [2]]))
    part = jax.jit(lambda replay: vars(by_einsum(x, params, config, replay=replay)))(jnp.asarray([[-1], [1], [2]]))
    np.testing.assert_array_equal(part["load"], [0, 1, 1, 0])
    np.testing.assert_allclose(part["output"][1:], whole.output[1:], rtol=1e-6)


@pytest.mark.parametrize(
    "backend", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "ragged_dot", "expert_ffn"))]
)
def test_router_learns_from_the_task(backend):
    config = moe_config()  # no balance loss: nothing else could give the router a gradient
    x, params, cotangent = random_tokens(config, 8), random_params(config), random_tokens(config, 8, seed=3)
    out, gradients = layer_gradients(x, params, config, cotangent, execution=MoEExecution(moe_backend=backend))
    expected = dense_gradients(x, params, config, cotangent, out.experts)["router_kernel"]
    assert np.abs(expected).max() > 1e-2
    assert_close(gradients["router_kernel"], expected)


def biased(strength):
    config = moe_config({"score": "sigmoid", "selection_bias": True, "aux_loss_weight": 0.1})
    x, params = random_tokens(config, 10), random_params(config)
    bias = strength * jnp.asarray([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    return config, x, {**params, "router_selection_bias": bias}


def test_selection_bias_chooses_but_never_weighs():
    config, x, params = biased(100.0)
    out = run_layer(x, params, config)
    assert set(np.asarray(out.experts).reshape(-1).tolist()) == {0, 1}
    without = {**params, "router_selection_bias": jnp.zeros(6)}
    np.testing.assert_array_equal(out.output, run_layer(x, without, config, replay=out.experts).output)
    assert_close(out.output, numpy_layer.layer(x, params, config).output)


def test_selection_bias_gets_no_gradient():
    config, x, params = biased(0.01)
    _, gradients = layer_gradients(x, params, config, jnp.ones_like(x))
    assert not np.asarray(gradients["router_selection_bias"]).any()


def test_random_routing_never_picks_an_expert_twice():
    config = moe_config({"selection": "random"}, experts_per_token=5)
    experts = by_einsum(random_tokens(config, 500), random_params(config), config, key=jax.random.key(0)).experts
    assert (np.diff(np.sort(np.asarray(experts), axis=1), axis=1) > 0).all()
