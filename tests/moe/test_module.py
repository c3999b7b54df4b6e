"""Weights are taken by the names of their axes."""

import jax.numpy as jnp
import pytest
from flax import nnx

from raggedmoe import MoE
from tests.moe.examples import moe_config, random_params
from tests.moe.test_layer import axes_of

pytestmark = pytest.mark.usefixtures("x64")


def test_swapped_axes_are_refused_where_the_sizes_agree():
    config = moe_config(model_dim=6, expert_dim=6)
    axes = {**axes_of(config), "wo": ("expert", "model_dim", "expert_dim")}
    message = r"expected wo \(expert, expert_dim, model_dim\).*got \(expert, model_dim, expert_dim\).*\(0, 2, 1\)"
    with pytest.raises(ValueError, match=message):
        MoE(config, params=random_params(config), axes=axes)


def test_axes_that_are_not_named_are_refused():
    config = moe_config(model_dim=6, expert_dim=6)
    axes = {name: value for name, value in axes_of(config).items() if name != "wi_0"}
    with pytest.raises(ValueError, match=r"expected the axes of wi_0.*got none: sizes alone cannot tell F from D"):
        MoE(config, params=random_params(config), axes=axes)


def test_variable_that_names_other_axes_is_refused_when_used():
    config = moe_config(model_dim=6, expert_dim=6)
    module = MoE(config, params=random_params(config), axes=axes_of(config))
    module.wi_1 = nnx.Param(module.wi_1[...], axes=("expert", "model_dim", "expert_dim"))
    with pytest.raises(ValueError, match=r"expected wi_1 \(expert, expert_dim, model_dim\).*transpose it"):
        module(jnp.ones((2, 6)))
