"""The contract of the stages: whatever moves the rows and whatever multiplies them, the layer computes one function.

Every way is compared with the single-device oracles, never with another way: what they share could be wrong in all.
"""

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import ExpertConfig, KernelChoice, MoEExecution
from tests.moe import numpy_layer
from tests.moe.examples import (
    assert_agrees,
    assert_gradients_close,
    dense_gradients,
    finite_differences,
    layer_gradients,
    moe_config,
    random_experts,
    random_params,
    random_tokens,
)
from tests.moe.on_mesh import gradients_on_mesh, mesh_of, run_on_mesh

NUM_TOKENS, NUM_EXPERTS, NUM_RANKS = 8, 4, 2
ROUTER = {
    "logit_bias": True,
    "selection_bias": True,
    "expert_scale": True,
    "scale": 1.5,
    "aux_loss_weight": 0.3,
    "z_loss_weight": 0.2,
}
EXPERTS = ExpertConfig(biases=True, num_shared=1, shared_gate=True)
KERNELS = {"auto": None, "cpu": "cpu", "ragged_dot": "xla"}


@dataclass(frozen=True)
class Way:
    """One way to compute a layer."""

    strategy: str
    width_chunks: int
    kernels: str  # "fused", or the kernels of the split computation

    def __str__(self):
        return f"{self.strategy}-{self.kernels}-chunks{self.width_chunks}"

    @property
    def execution(self):
        if self.kernels == "fused":
            return MoEExecution(strategy=self.strategy, moe_backend="expert_ffn")
        kernel = KERNELS[self.kernels]
        choice = None if kernel is None else KernelChoice(grouped_matmul=kernel)
        return MoEExecution(strategy=self.strategy, kernels=choice, width_chunks=self.width_chunks)


def config_of(per_token):
    return moe_config(ROUTER, num_experts=NUM_EXPERTS, experts_per_token=per_token, model_dim=6, experts=EXPERTS)


# "auto" takes the kernels of "cpu" on this machine: one of the two names is enough.
COMPUTATIONS = [(1, "auto"), (2, "cpu"), (1, "ragged_dot"), (2, "ragged_dot"), (1, "fused")]
WAYS = [Way("local", *computation) for computation in COMPUTATIONS]
WAYS += [
    Way("ring", 1, "auto"),
    Way("ring", 2, "ragged_dot"),
    Way("all_to_all", 1, "fused"),
    Way("all_to_all", 2, "cpu"),
]
ROUTINGS = ("random", "skewed", "one_expert_each", "first_rank", "last_rank", "one_token", "some_masked", "all_masked")


@functools.cache
def compiled(way, per_token):
    """Value and gradients as one compiled function of the arrays, so that all routings share it."""
    config, execution = config_of(per_token), way.execution

    mesh = None if way.strategy == "local" else mesh_of(expert=NUM_RANKS)

    def run(x, params, mask, replay, cotangent):
        return gradients_on_mesh(x, params, config, mesh, cotangent, execution=execution, mask=mask, replay=replay)

    return run


def routing(name, per_token):
    """Experts and mask of a named, mostly unfair, routing."""
    rng = np.random.default_rng(len(name))
    mask = np.ones(NUM_TOKENS, bool)
    experts = random_experts(rng, NUM_TOKENS, per_token, NUM_EXPERTS, skew=3.0 if name == "skewed" else 0.0)
    if name == "one_expert_each":
        experts = np.tile(np.arange(per_token, dtype=np.int32), (NUM_TOKENS, 1))
    elif name in ("first_rank", "last_rank"):
        held = NUM_EXPERTS // NUM_RANKS
        experts = experts % held + (held if name == "last_rank" else 0)
        experts[:, 1:] = (
            experts[:, :1] // held * held + (experts[:, :1] + 1) % held if per_token > 1 else experts[:, 1:]
        )
    elif name == "one_token":
        mask[:] = np.arange(NUM_TOKENS) == 5
    elif name == "some_masked":
        mask[[0, 3, 4]] = False
    elif name == "all_masked":
        mask[:] = False
    return jnp.asarray(experts), jnp.asarray(mask)


@functools.cache
def case(per_token, routing_name):
    """Arrays of one case and what both oracles say; float64 must be on."""
    config = config_of(per_token)
    x, params = random_tokens(config, NUM_TOKENS), random_params(config)
    experts, mask = routing(routing_name, per_token)
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=x.shape))
    expected = numpy_layer.layer(x, params, config, mask=mask, replay=experts)
    gradients = dense_gradients(x, params, config, cotangent, experts, mask)
    return (x, params, mask, experts, cotangent), expected, gradients


CASES = [(way, 2, name) for way in WAYS for name in ROUTINGS]
# Every number of experts per token is another compilation: each strategy and each way of computing once, the rest slow.
OFTEN = [Way("ring", 1, "auto")]
WHOLE = [way for way in WAYS if way.kernels in ("auto", "fused")]
CASES += [(way, 4, name) for way in WHOLE for name in ("random", "some_masked")]
# What another way has in common with these: width chunks are a loop around any kernel and any strategy.
SELDOM = [
    Way("local", 2, "cpu"),
    Way("local", 1, "ragged_dot"),
    Way("ring", 2, "ragged_dot"),
    Way("all_to_all", 1, "fused"),
]


def marks_of(way, per_token):
    if way in SELDOM or (per_token == 4 and way not in OFTEN):
        return [pytest.mark.slow]
    return [pytest.mark.ci] if per_token == 4 else []


every_case = pytest.mark.parametrize(
    ("way", "per_token", "routing_name"),
    [pytest.param(way, k, name, id=f"{way}-K{k}-{name}", marks=marks_of(way, k)) for way, k, name in CASES],
)
pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("quantity", ["value", "gradients"])
@every_case
def test_layer_agrees_with_the_oracles(way, per_token, routing_name, quantity):
    arrays, expected, expected_gradients = case(per_token, routing_name)
    out, gradients = compiled(way, per_token)(*arrays)
    if quantity == "value":
        assert_agrees(out, expected)
    else:
        assert set(gradients) == set(expected_gradients)
        assert_gradients_close(gradients, expected_gradients)


def scaled_tokens(config, num_tokens):
    """Tokens that reach the curved and the clamped parts of the activations."""
    return jnp.asarray(3 * np.asarray(random_tokens(config, num_tokens)))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("activation", "weigh"),
    [
        ("silu", "output"),
        ("silu", "input"),
        *((name, "output") for name in ("gelu", "gelu_tanh", "relu2")),
        ("clamped_swiglu", "input"),
    ],
)
def test_dense_oracle_has_the_slopes_of_the_numpy_oracle(activation, weigh):
    config = moe_config(
        {**ROUTER, "weigh": weigh},
        num_experts=3,
        model_dim=3,
        expert_dim=2,
        experts=ExpertConfig(activation=activation, biases=True, num_shared=1, shared_gate=True),
    )
    x, params = scaled_tokens(config, 4), random_params(config)
    mask, experts = np.array([True, True, False, True]), random_experts(np.random.default_rng(0), 4, 2, 3)
    cotangent = random_tokens(config, 4, seed=3)
    found = dense_gradients(x, params, config, cotangent, jnp.asarray(experts), jnp.asarray(mask))
    expected = finite_differences(x, params, config, cotangent, list(found), mask=mask, replay=experts)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-7, err_msg=name)


# Pairs, not the product: every activation with each backend and either way to weigh in turn, with a gate or without;
# where there is time, with the other as well.
KINDS = [
    pytest.param(
        activation,
        gated,
        ("auto", "dense", "expert_ffn")[(i + gated) % 3],
        ("input", "output")[(i // 2 + gated) % 2],
        marks=[pytest.mark.slow] if (i + gated) % 2 else [],
    )
    for i, activation in enumerate(["silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"])
    for gated in (True, False)
]


@pytest.mark.parametrize(("activation", "gated", "backend", "weigh"), KINDS)
def test_experts_of_every_kind_are_those_of_the_oracle(activation, gated, backend, weigh):
    experts = ExpertConfig(activation=activation, gated=gated, biases=True, num_shared=2, shared_gate=not gated)
    config = moe_config({"weigh": weigh}, experts=experts)
    x, params = scaled_tokens(config, 9), random_params(config)
    cotangent, replay = random_tokens(config, 9, seed=3), random_experts(np.random.default_rng(0), 9, 2, 6)
    execution, given = MoEExecution(moe_backend=backend), jnp.asarray(replay)
    out, gradients = layer_gradients(x, params, config, cotangent, execution=execution, replay=given)
    assert_agrees(out, numpy_layer.layer(x, params, config, replay=replay))
    assert_gradients_close(gradients, dense_gradients(x, params, config, cotangent, jnp.asarray(replay)))


across_ranks = pytest.mark.parametrize("strategy", ["ring", "all_to_all"])


@pytest.mark.ci
@across_ranks
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_routing_is_that_of_one_device_on_any_number_of_ranks(num_ranks, strategy):
    config = moe_config(ROUTER, num_experts=8, experts_per_token=3)
    x, params = random_tokens(config, 16), random_params(config)
    mask = jnp.arange(16) % 5 != 0
    out = run_on_mesh(
        x, params, config, mesh_of(expert=num_ranks), execution=MoEExecution(strategy=strategy), mask=mask
    )
    assert_agrees(out, numpy_layer.layer(x, params, config, mask=mask))


@pytest.mark.parametrize("strategy", ["ring", pytest.param("all_to_all", marks=pytest.mark.ci)])
def test_the_input_is_weighed_where_the_router_says_so(strategy):
    config = moe_config({"weigh": "input", "score": "sigmoid"}, num_experts=4, experts=EXPERTS)
    x, params = random_tokens(config, 8), random_params(config)
    out = run_on_mesh(x, params, config, mesh_of(expert=NUM_RANKS), execution=MoEExecution(strategy=strategy))
    assert_agrees(out, numpy_layer.layer(x, params, config))


@pytest.mark.ci
def test_ring_combines_more_slots_than_are_unrolled():
    config = moe_config(num_experts=18, experts_per_token=17)
    x, params = random_tokens(config, 4), random_params(config)
    out = run_on_mesh(x, params, config, mesh_of(expert=NUM_RANKS), execution=MoEExecution(strategy="ring"))
    assert_agrees(out, numpy_layer.layer(x, params, config))
