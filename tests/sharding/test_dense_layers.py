"""Dense weights and attention on a mesh: which heads are split, and what is kept for the backward pass."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.sharding.axes import EXPERT, FSDP, LogicalMesh
from raggedmoe.sharding.dense_layers import save_all_but_gathered_weights, sharded_attention
from raggedmoe.sharding.plan import Plan

MESH = LogicalMesh(Plan(fsdp=2, tensor=2).mesh())


def attention(query: jax.Array, key: jax.Array, value: jax.Array, **_: None) -> jax.Array:
    """Attend in plain JAX: query heads share the heads of keys and values by turns."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(array, repeats, axis=2) for array in (key, value))
    weights = jax.nn.softmax(jnp.einsum("bsnh,blnh->bnsl", query, key))
    return jnp.einsum("bnsl,blnw->bsnw", weights, value)


@pytest.mark.parametrize(("query_heads", "key_heads"), [(3, 1), (3, 3), (4, 2), (4, 1), (6, 3)])
def test_attention_on_a_mesh_is_that_of_one_device_whatever_divides_the_heads(query_heads, key_heads):
    random = np.random.default_rng(0)
    arrays = [
        jnp.asarray(random.normal(size=(2, 5, heads, width)), jnp.float32)
        for heads, width in ((query_heads, 4), (key_heads, 4), (key_heads, 2))
    ]

    def on_mesh(*arrays: jax.Array) -> jax.Array:
        return sharded_attention(attention, MESH, *arrays, {"positions": None, "segments": None, "sinks": None})

    def gradients(function: object) -> list[jax.Array]:
        return jax.jit(jax.grad(lambda arrays: jnp.sin(function(*arrays)).sum()))(arrays)

    np.testing.assert_allclose(jax.jit(on_mesh)(*arrays), attention(*arrays), rtol=0, atol=1e-6)
    for found, expected in zip(gradients(on_mesh), gradients(attention), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_only_what_is_gathered_over_fsdp_is_not_kept_for_the_backward_pass():
    is_saved = save_all_but_gathered_weights(MESH)
    (fsdp,), (expert,) = MESH.axes(FSDP), (EXPERT,)
    gather = SimpleNamespace(name="all_gather")
    assert not is_saved(gather, axis_name=(fsdp,))
    assert not is_saved(gather, axis_name=(expert, fsdp))
    assert is_saved(gather, axis_name=(expert,))
    assert is_saved(SimpleNamespace(name="dot_general"))
    assert not is_saved(SimpleNamespace(name="reshape"))
