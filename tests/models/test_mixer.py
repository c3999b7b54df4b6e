"""Attention on a mesh: which heads are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.models.mixer import AttentionContext, run_attention
from raggedmoe.sharding.axes import LogicalMesh
from raggedmoe.sharding.plan import Plan

MESH = LogicalMesh(Plan(fsdp=2, tensor=2).mesh())


def attention(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Attend in plain JAX: query heads share the heads of keys and values by turns."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(array, repeats, axis=2) for array in (key, value))
    scores = jnp.einsum("bsnh,blnh->bnsl", query, key)
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores)[..., : key.shape[1]]
    return jnp.einsum("bnsl,blnw->bsnw", weights, value)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("query_heads", "key_heads"), [(3, 1), (3, 3), (4, 2), (4, 1), (6, 3)])
def test_attention_on_a_mesh_is_that_of_one_device_whatever_divides_the_heads(query_heads, key_heads, has_sinks):
    random = np.random.default_rng(0)
    arrays = [
        jnp.asarray(random.normal(size=(2, 5, heads, width)), jnp.float32)
        for heads, width in ((query_heads, 4), (key_heads, 4), (key_heads, 2))
    ]
    if has_sinks:
        arrays.append(jnp.asarray(random.normal(size=query_heads), jnp.float32))
    context = AttentionContext(slots=None, segments=None, window=None, implementation="dot_product", mesh=MESH)

    def on_mesh(query, key, value, sinks=None):
        return run_attention(query, key, value, context, scale=1.0, sinks=sinks)

    def gradients(function: object) -> list[jax.Array]:
        return jax.jit(jax.grad(lambda arrays: jnp.sin(function(*arrays)).sum()))(arrays)

    np.testing.assert_allclose(jax.jit(on_mesh)(*arrays), attention(*arrays), rtol=0, atol=1e-6)
    for found, expected in zip(gradients(on_mesh), gradients(attention), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
