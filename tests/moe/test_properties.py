"""The layer on shapes and routings that nobody thought of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raggedmoe import ExpertConfig, MoEExecution
from tests.moe import numpy_layer
from tests.moe.examples import (
    assert_agrees,
    assert_gradients_close,
    dense_gradients,
    layer_gradients,
    moe_config,
    random_experts,
    random_params,
    random_tokens,
)

SHAPES = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(1, 200),
        "num_experts": st.integers(1, 40),
        "per_token": st.integers(1, 40),  # cut to the number of experts, so that K = E is not rare
        "model_dim": st.sampled_from(range(1, 18, 2)),
        "expert_dim": st.sampled_from(range(1, 18, 2)),
        "score": st.sampled_from(["softmax", "sigmoid"]),
        "gated": st.booleans(),
        "biases": st.booleans(),
        "backend": st.sampled_from(["auto", "expert_ffn"]),
        "skew": st.sampled_from([0.0, 3.0]),
        "all_alike": st.booleans(),  # all tokens to the same experts; to one expert where K is 1
        "share_present": st.sampled_from([1.0, 0.5, 0.0]),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def build(shape):
    """Configuration, routing and mask of a drawn case."""
    per_token = min(shape["per_token"], shape["num_experts"])
    config = moe_config(
        {"aux_loss_weight": 0.5, "z_loss_weight": 0.5, "score": shape["score"]},
        num_experts=shape["num_experts"],
        experts_per_token=per_token,
        model_dim=shape["model_dim"],
        expert_dim=shape["expert_dim"],
        experts=ExpertConfig(gated=shape["gated"], biases=shape["biases"]),
    )
    rng = np.random.default_rng(shape["seed"])
    experts = random_experts(rng, shape["num_tokens"], per_token, shape["num_experts"], skew=shape["skew"])
    if shape["all_alike"]:
        experts[:] = experts[0]
    return (
        config,
        MoEExecution(moe_backend=shape["backend"]),
        experts,
        rng.random(shape["num_tokens"]) < shape["share_present"],
    )


@pytest.mark.slow  # each drawn shape is two compilations; the stages' routings and the kernels' drawn shapes are quick
@settings(max_examples=6)
@given(shape=SHAPES)
def test_layer_agrees_with_the_oracles(shape):
    config, execution, experts, mask = build(shape)
    with jax.enable_x64(True):
        x, params = random_tokens(config, len(mask)), random_params(config)
        cotangent = random_tokens(config, len(mask), seed=3)
        options = {"mask": jnp.asarray(mask), "replay": jnp.asarray(experts)}
        out, gradients = layer_gradients(x, params, config, cotangent, execution=execution, **options)
        assert_agrees(out, numpy_layer.layer(x, params, config, mask=mask, replay=experts))
        expected = dense_gradients(x, params, config, cotangent, options["replay"], options["mask"])
        assert_gradients_close(gradients, expected)
