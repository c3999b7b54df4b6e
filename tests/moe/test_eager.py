"""A layer that is called outside of jit is compiled once, as the README's first example needs it."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from raggedmoe import MoE, MoEConfig, MoEExecution
from raggedmoe.kernels.registry import record_selections
from tests.moe.on_mesh import mesh_of


@pytest.mark.product
@pytest.mark.parametrize("degrees", [None, pytest.param({"expert": 2}, marks=pytest.mark.ci)])
def test_from_the_second_call_on_nothing_is_compiled(degrees, compilations):
    mesh = None if degrees is None else mesh_of(**degrees)
    config = MoEConfig(num_experts=4, experts_per_token=2, model_dim=4, expert_dim=4)
    execution = MoEExecution(strategy=None if mesh is None else "ring")
    layer, x = MoE(config, rngs=nnx.Rngs(0), execution=execution, mesh=mesh), jnp.ones((2, 4, 4))

    def loss(layer):
        out = layer(x)
        return (out.output**2).mean() + out.aux_loss + out.z_loss

    first = layer(x), nnx.grad(loss)(layer)
    assert 0 < len(compilations) < 80  # 119 and 70 without, and hundreds on a mesh
    compilations.clear()
    second = layer(x), nnx.grad(loss)(layer)
    jax.block_until_ready(second)
    assert compilations == []
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (one == other).all()


@pytest.mark.ci
def test_selections_are_recorded_though_the_layer_was_compiled():
    sizes = {"num_experts": 4, "experts_per_token": 2, "model_dim": 4, "expert_dim": 4}
    layer = MoE(MoEConfig(**sizes, capacity_factor=2.0), rngs=nnx.Rngs(0))
    x = jnp.ones((8, 4))
    for _ in range(2):
        layer(x)
        with record_selections() as selections:
            layer(x)
        assert {selection.call.operation for selection in selections} == {"ragged_gather", "ragged_gather_reduce"}
