"""A configuration or a call that makes no sense is refused, with what was expected, what came and what to do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from raggedmoe import ExpertConfig, KernelChoice, MoE, MoEExecution, RouterConfig
from raggedmoe.moe.layer import moe_route_and_compute
from tests.moe.examples import layer, moe_config, random_params

# What is wrong -> the configuration, and the expected, the given and the remedy in the message.
BAD_LAYERS = {
    "more_choices_than_experts": (
        {"experts_per_token": 7},
        r"experts_per_token=7 cannot be used with num_experts=6: a token uses an expert at most once",
    ),
    "no_experts": ({"num_experts": 0}, r"expected num_experts to be a positive integer, got 0"),
    "uneven_groups": (
        {"router": {"num_groups": 4, "groups_per_token": 2}},
        r"num_experts=6 is not divisible by num_groups=4; use num_groups in \[1, 2, 3, 6\], or pad with num_experts=8",
    ),
    "groups_of_one_by_two_best": (
        {"router": {"num_groups": 6, "groups_per_token": 2}},
        r"group_score='top2_sum' cannot be used with num_groups=6: there are no two experts in a group",
    ),
    "groups_that_hold_too_few": (
        {"experts_per_token": 3, "router": {"num_groups": 3}},
        r"groups_per_token=1 cannot be used with experts_per_token=3: groups of 2 hold too few experts",
    ),
    "negative_factor": ({"capacity_factor": -1.0}, r"expected capacity_factor > 0, got -1\.0"),
    "unknown_probabilities": (
        {"router": {"aux_loss_probabilities": "softmaxes"}},
        r"unknown aux_loss_probabilities 'softmaxes': expected one of normalized, softmax.*did you mean 'softmax'\?",
    ),
    "expert_choice_without_capacity": (
        {"router": {"selection": "expert_choice"}},
        r"selection='expert_choice' cannot be used with capacity_factor=None: 1\.0 gives each an even share",
    ),
}
BAD_PAIRS = {
    "unread_ffn_choice": (
        {},
        {"kernels": KernelChoice(expert_ffn="reference")},
        r"expert_ffn='reference' cannot be used with strategy='local': with moe_backend='auto' it would never be read",
    ),
    "unread_matmul_choice": (
        {"capacity_factor": 1.0},
        {"moe_backend": "ragged_dot"},
        r"grouped_matmul='xla' cannot be used with strategy='capacity': with moe_backend='ragged_dot' it would never",
    ),
    "factor_without_capacity": (
        {"capacity_factor": 1.0},
        {"strategy": "local"},
        r"capacity_factor=1\.0 cannot be used with strategy='local': it gives the experts fixed slots.*; change one",
    ),
    "factor_of_a_dense_backend": (
        {"capacity_factor": 1.0},
        {"moe_backend": "dense"},
        r"capacity_factor=1\.0 cannot be used with moe_backend='dense': it gives the experts fixed slots",
    ),
    "capacity_without_factor": (
        {},
        {"strategy": "capacity"},
        r"strategy='capacity' cannot be used with capacity_factor=None: 1\.0 gives experts an even share",
    ),
    "chunks_of_slots": (
        {"capacity_factor": 1.0},
        {"token_chunks": 2},
        r"capacity_factor=1\.0 cannot be used with token_chunks=2: it is of slots in whole sequences; change one",
    ),
    "uneven_width_chunks": ({}, {"width_chunks": 2}, r"model_dim=7 is not divisible by width_chunks=2"),
}
BAD_ROUTERS = {
    "unknown_score": ({"score": "softmx"}, r"unknown score 'softmx': expected one of softmax.*mean 'softmax'\?"),
    "unknown_selection": ({"selection": "rand"}, r"unknown selection 'rand'.*did you mean 'random'\?"),
    "unknown_normalization": ({"normalize": "sums"}, r"unknown normalize 'sums'.*did you mean 'sum'\?"),
    "unknown_weigh": ({"weigh": "inputs"}, r"unknown weigh 'inputs'.*did you mean 'input'\?"),
    "unknown_group_score": ({"group_score": "top2"}, r"unknown group_score 'top2'.*did you mean 'top2_sum'\?"),
    "unknown_aux_loss": ({"aux_loss": "seq"}, r"unknown aux_loss 'seq'.*did you mean 'sequence'\?"),
    "sum_of_logits": (
        {"score": "logits"},
        r"score='logits' cannot be used with normalize='sum': logits may be negative.*'softmax'",
    ),
    "jitter_of_one": ({"jitter": 1.0}, r"expected 0 <= jitter < 1, got 1\.0"),
    "more_groups_than_there_are": (
        {"num_groups": 2, "groups_per_token": 3},
        r"groups_per_token=3 cannot be used with num_groups=2: there are not so many",
    ),
    "groups_without_learning": (
        {"selection": "random", "num_groups": 2},
        r"selection='random' cannot be used with num_groups=2: it reads no group limit",
    ),
    "expert_choice_with_a_balance_loss": (
        {"selection": "expert_choice", "aux_loss_weight": 0.1},
        r"'expert_choice' cannot be used with aux_loss_weight=0\.1: it is balanced by construction",
    ),
    "expert_choice_with_a_bias": (
        {"selection": "expert_choice", "selection_bias": True},
        r"'expert_choice' cannot be used with selection_bias=True: it reads no selection bias",
    ),
}
BAD_EXPERTS = {
    "unknown_activation": ({"activation": "swish"}, r"unknown activation 'swish': expected one of silu"),
    "negative_shared": ({"num_shared": -1}, r"expected num_shared >= 0, got -1"),
    "gate_without_shared": ({"shared_gate": True}, r"shared_gate=True needs num_shared >= 1, got 0"),
}


@pytest.mark.parametrize(("options", "message"), BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_layer_config_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        moe_config(**options)


@pytest.mark.parametrize(("options", "execution", "message"), BAD_PAIRS.values(), ids=BAD_PAIRS)
def test_an_execution_that_does_not_fit_the_layer_is_refused(options, execution, message):
    config, execution = moe_config(**options), MoEExecution(**execution)
    with pytest.raises(ValueError, match=message):
        MoE(config, rngs=nnx.Rngs(0), execution=execution)
    with pytest.raises(ValueError, match=message):
        layer(jnp.zeros((2, 7)), random_params(config, dtype=np.float32), config, execution)


@pytest.mark.parametrize("make", [moe_config, lambda **options: dataclasses.replace(moe_config(), **options)])
def test_how_a_layer_runs_is_refused_where_it_says_what_it_is(make):
    message = r"MoEConfig says what a model is and has no strategy, token_chunks; MoEExecution says how it runs: "
    message += r"MoE\(config, execution=MoEExecution\(strategy='ring', token_chunks=2\)\)"
    with pytest.raises(TypeError, match=message):
        make(strategy="ring", token_chunks=2)


@pytest.mark.parametrize(("options", "message"), BAD_ROUTERS.values(), ids=BAD_ROUTERS)
def test_router_config_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**options)


@pytest.mark.parametrize(("options", "message"), BAD_EXPERTS.values(), ids=BAD_EXPERTS)
def test_expert_config_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ExpertConfig(**options)


BAD_CALLS = {
    "replay_of_another_k": (
        {},
        {"replay": jnp.zeros((4, 3), jnp.int32)},
        ValueError,
        r"expected replay \[T K\] = \[4, 2\] of an integer type, got int32\[4, 3\]; give MoEOutput\.experts",
    ),
    "replay_of_floats": (
        {},
        {"replay": jnp.zeros((4, 2))},
        ValueError,
        r"expected replay .* integer type, got float32\[4, 2\]",
    ),
    "mask_of_ints": ({}, {"mask": jnp.ones(4, jnp.int32)}, TypeError, r"expected a mask of bool, got int32; use mask"),
    "mask_of_another_length": ({}, {"mask": jnp.ones(5, bool)}, ValueError, r"expected mask .* \(4,\), got \(5,\)"),
    "random_without_key": ({"selection": "random"}, {}, ValueError, r"'random' needs a key, got None; pass key="),
    "hash_without_ids": (
        {"selection": "hash"},
        {},
        ValueError,
        r"'hash' needs the token ids, got None; pass token_ids",
    ),
    "ids_of_another_length": (
        {"selection": "hash"},
        {"token_ids": jnp.ones(5, int)},
        ValueError,
        r"expected token_ids with the leading dimensions of x, \(4,\), got \(5,\)",
    ),
    "replay_for_expert_choice": (
        {"selection": "expert_choice"},
        {"replay": jnp.zeros((4, 2), jnp.int32)},
        ValueError,
        r"replay gives experts for each token, expert choice picks tokens; use another selection",
    ),
}


@pytest.mark.usefixtures("only_our_checks")
@pytest.mark.parametrize(("router", "call", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_call_is_refused(router, call, error, message):
    by_expert = router.get("selection") == "expert_choice"
    options = {"capacity_factor": 1.0} if by_expert else {}
    layer = MoE(moe_config(router, **options), rngs=nnx.Rngs(0))
    with pytest.raises(error, match=message):
        layer(jnp.ones((4, 7)), **call)


@pytest.mark.parametrize("shape", [(7,), (4, 6)])
def test_tokens_of_another_width_are_refused(shape):
    layer = MoE(moe_config(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"expected x \[..., D\] with D = 7 and at least one more dimension, got"):
        layer(jnp.ones(shape))


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_experts_across_ranks_without_a_mesh_are_refused(strategy):
    with pytest.raises(ValueError, match=f"strategy='{strategy}' needs the mesh that experts are split over, got None"):
        moe_route_and_compute(jnp.ones((4, 7)), {}, moe_config(), MoEExecution(strategy=strategy))


def test_config_can_be_a_static_argument():
    assert hash(moe_config()) == hash(moe_config())
    jax.jit(lambda config: config.num_experts, static_argnums=0)(moe_config())


@pytest.mark.parametrize(
    ("length", "factor", "slots"), [(15, 1.0, 5), (15, 1.5, 7), (16, 0.5, 3), (3, 1.0, 1), (3, 9.0, 3)]
)
def test_slots_are_an_even_share_of_a_sequence_times_the_factor_rounded_down(length, factor, slots):
    assert moe_config(capacity_factor=factor).capacity(length) == slots


def test_a_factor_that_leaves_no_slot_is_refused_with_the_least_that_does():
    config = moe_config(capacity_factor=0.3)
    x = jnp.zeros((12, config.model_dim))
    message = r"capacity_factor=0\.3 cannot be used with sequences of 6 tokens.* at least 1/2 leaves one"
    with pytest.raises(ValueError, match=message):
        layer(x, random_params(config, dtype=np.float32), config, num_sequences=2)
