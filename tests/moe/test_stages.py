"""The contract of the stages: whatever moves the rows and whatever multiplies them, the layer computes one function.

Every way is compared with the single-device oracles, never with another way: what they share could be wrong in all.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from raggedmoe import ExpertConfig, KernelChoice, MoEOutput
from raggedmoe.moe.dispatch import make_strategy, ring
from raggedmoe.moe.dispatch.strategy import StrategySettings

from . import numpy_layer
from .examples import (
    assert_agrees,
    assert_gradients_close,
    dense_gradients,
    finite_differences,
    layer,
    layer_gradients,
    moe_config,
    random_experts,
    random_params,
    random_tokens,
    scalar_loss,
)

NUM_TOKENS, NUM_EXPERTS, NUM_RANKS, AXIS = 8, 4, 2, "expert"
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

    def config(self, **options):
        sizes = {"num_experts": NUM_EXPERTS, "model_dim": 6, "experts": EXPERTS, "router": ROUTER, **options}
        if self.kernels == "fused":
            return moe_config(moe_backend="expert_ffn", **sizes)
        kernel = KERNELS[self.kernels]
        choice = None if kernel is None else KernelChoice(grouped_matmul=kernel)
        return moe_config(strategy=self.strategy, kernels=choice, width_chunks=self.width_chunks, **sizes)


# "auto" takes the kernels of "cpu" on this machine: one of the two names is enough.
COMPUTATIONS = [(1, "auto"), (2, "cpu"), (1, "ragged_dot"), (2, "ragged_dot"), (1, "fused")]
WAYS = [Way(strategy, *computation) for strategy in ("local", "ring") for computation in COMPUTATIONS]
ROUTINGS = ("random", "skewed", "one_expert_each", "first_rank", "last_rank", "one_token", "some_masked", "all_masked")


def param_specs(params):
    """How a layer's parameters lie on the mesh of experts."""
    sharded = ("wi_0", "wi_1", "wo", "bias_wi_0", "bias_wi_1", "bias_wo")
    return {name: P(AXIS) if name in sharded else P() for name in params}


def on_ring(function, params, *, num_ranks=NUM_RANKS, out):
    """`function(x, params, mask, replay)` with tokens and experts split over the ranks."""
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), (AXIS,))
    specs = (P(AXIS), param_specs(params), P(AXIS), P(AXIS))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)


def ring_strategy(config, num_tokens):
    """The ring, also where the configuration's backend is the fused one, which names a strategy of its own."""
    if config.strategy_name == "ring":
        return make_strategy(config, num_tokens, axis=AXIS)
    settings = StrategySettings(
        num_experts=config.num_experts,
        capacity=None,
        weigh_input=config.router.weigh == "input",
        kernels=config.kernel_choice,
        hardware=None,
        axis=AXIS,
    )
    return ring.make(settings)


def layer_on_ring(config, params, num_ranks=NUM_RANKS):
    """The layer as a function of global arrays, computed by the ring."""

    def body(x, params, mask, replay):
        strategy = ring_strategy(config, x.shape[0])
        return vars(layer(x, params, config, strategy=strategy, mask=mask, replay=replay, axis=AXIS))

    # The tokens' results are split; the losses and statistics are the same on every rank.
    specs = {name: P(AXIS) if name in ("output", "experts") else P() for name in MoEOutput.__dataclass_fields__}
    ringed = on_ring(body, params, num_ranks=num_ranks, out=specs)
    return lambda *arrays: MoEOutput(**ringed(*arrays))


@functools.cache
def compiled(way, per_token):
    """Value and gradients as one compiled function of the arrays, so that all routings share it."""
    config = way.config(experts_per_token=per_token)

    @jax.jit
    def run(x, params, mask, replay, cotangent):
        if way.strategy == "local":
            return layer_gradients(x, params, config, cotangent, mask=mask, replay=replay)
        ringed = layer_on_ring(config, params)

        def loss(x, params):
            out = ringed(x, params, mask, replay)
            return scalar_loss(out, cotangent), out

        (_, out), (dx, gradients) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, params)
        return out, {"x": dx, **gradients}

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
    config = Way("local", 1, "auto").config(experts_per_token=per_token)
    x, params = random_tokens(config, NUM_TOKENS), random_params(config)
    experts, mask = routing(routing_name, per_token)
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=x.shape))
    expected = numpy_layer.layer(x, params, config, mask=mask, replay=experts)
    gradients = dense_gradients(x, params, config, cotangent, experts, mask)
    return (x, params, mask, experts, cotangent), expected, gradients


CASES = [(way, 2, name) for way in WAYS for name in ROUTINGS]
# Every number of experts per token is another compilation: each strategy and each way of computing once, the rest slow.
OFTEN = [Way("local", 1, "fused"), Way("ring", 1, "auto")]
WHOLE = [way for way in WAYS if way.kernels in ("auto", "fused")]
CASES += [(way, 4, name) for way in WHOLE for name in ("random", "some_masked")]
every_case = pytest.mark.parametrize(
    ("way", "per_token", "routing_name"),
    [
        pytest.param(
            way, k, name, id=f"{way}-K{k}-{name}", marks=[pytest.mark.slow] if k == 4 and way not in OFTEN else []
        )
        for way, k, name in CASES
    ],
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


# Pairs, not the product: every activation with and without a gate, with each backend and either way to weigh in turn.
KINDS = [
    (activation, gated, ("auto", "jax", "expert_ffn")[(i + gated) % 3], ("input", "output")[(i // 2 + gated) % 2])
    for i, activation in enumerate(["silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"])
    for gated in (True, False)
]


@pytest.mark.parametrize(("activation", "gated", "backend", "weigh"), KINDS)
def test_experts_of_every_kind_are_those_of_the_oracle(activation, gated, backend, weigh):
    experts = ExpertConfig(activation=activation, gated=gated, biases=True, num_shared=2, shared_gate=not gated)
    config = moe_config({"weigh": weigh}, experts=experts, moe_backend=backend)
    x, params = scaled_tokens(config, 9), random_params(config)
    cotangent, replay = random_tokens(config, 9, seed=3), random_experts(np.random.default_rng(0), 9, 2, 6)
    out, gradients = layer_gradients(x, params, config, cotangent, replay=jnp.asarray(replay))
    assert_agrees(out, numpy_layer.layer(x, params, config, replay=replay))
    assert_gradients_close(gradients, dense_gradients(x, params, config, cotangent, jnp.asarray(replay)))


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_ring_routes_as_one_device_does_on_any_number_of_ranks(num_ranks):
    config = moe_config(ROUTER, num_experts=8, experts_per_token=3, strategy="ring")
    x, params = random_tokens(config, 16), random_params(config)
    mask = jnp.arange(16) % 5 != 0
    ringed = layer_on_ring(config, params, num_ranks)
    assert_agrees(jax.jit(ringed)(x, params, mask, None), numpy_layer.layer(x, params, config, mask=mask))


def test_ring_weighs_the_input_where_the_router_says_so():
    config = moe_config({"weigh": "input", "score": "sigmoid"}, num_experts=4, strategy="ring", experts=EXPERTS)
    x, params = random_tokens(config, 8), random_params(config)
    ringed = layer_on_ring(config, params)
    assert_agrees(jax.jit(ringed)(x, params, None, None), numpy_layer.layer(x, params, config))


def test_ring_combines_more_slots_than_are_unrolled():
    config = moe_config(num_experts=18, experts_per_token=17, strategy="ring")
    x, params = random_tokens(config, 4), random_params(config)
    ringed = layer_on_ring(config, params)
    assert_agrees(jax.jit(ringed)(x, params, None, None), numpy_layer.layer(x, params, config))


def test_ring_refuses_experts_that_do_not_divide():
    config = moe_config(num_experts=5, strategy="ring")
    x, params = random_tokens(config, 8), random_params(config)
    refused = jax.shard_map(
        lambda x, params: layer(x, params, config, strategy=ring_strategy(config, 4), axis=AXIS).output,
        mesh=Mesh(np.array(jax.devices()[:2]), (AXIS,)),
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(
        ValueError, match=r"num_experts=5 is not divisible by the 2 ranks.*use a number of ranks in \[1, 5\]"
    ):
        jax.eval_shape(refused, x, params)
