"""Multi-head latent attention (DeepSeek V2, V3).

A token leaves behind one vector, its latent and the rotated key that all heads share: that is all a cache holds. For
several queries the latents are expanded to keys and values of every head. A single query is brought to the latents
instead: its heads are multiplied by the key projection, the value projection is applied to the result, and attention
runs on the latents themselves, as one key and value head.
"""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from raggedmoe.models.config import LatentConfig
from raggedmoe.models.matmul import linear, linear_back, linear_per_head
from raggedmoe.models.mixer import AttentionContext, Memory, Mixer, run_attention
from raggedmoe.models.norm import rms_norm
from raggedmoe.models.rope import RopeCosSin, apply_rope
from raggedmoe.params import Params, ParamSpec


def specs(config: LatentConfig, model_dim: int, dtype: Any) -> dict[str, ParamSpec]:
    def weight(contracts: str | tuple[str, ...], **dims: int) -> ParamSpec:
        return ParamSpec(shape=tuple(dims.values()), dtype=dtype, axes=tuple(dims), contracts=contracts)

    def norm(**dims: int) -> ParamSpec:
        return ParamSpec(shape=tuple(dims.values()), dtype=dtype, axes=tuple(dims), init="ones")

    heads, q_rank, kv_rank = config.num_heads, config.q_lora_rank, config.kv_lora_rank
    if q_rank is None:
        query = {"wq": weight("model_dim", head=heads, head_dim=config.head_dim, model_dim=model_dim)}
    else:
        query = {
            "q_a": weight("model_dim", q_latent=q_rank, model_dim=model_dim),
            "q_a_norm": norm(q_latent=q_rank),
            "q_b": weight("q_latent", head=heads, head_dim=config.head_dim, q_latent=q_rank),
        }
    return {
        **query,
        "kv_a": weight("model_dim", kv_latent_and_rope=kv_rank + config.rope_dim, model_dim=model_dim),
        "kv_a_norm": norm(kv_latent=kv_rank),
        "k_b": weight("kv_latent", head=heads, nope_dim=config.nope_dim, kv_latent=kv_rank),
        "v_b": weight("kv_latent", head=heads, value_dim=config.value_dim, kv_latent=kv_rank),
        "wo": weight(("head", "value_dim"), head=heads, value_dim=config.value_dim, model_dim=model_dim),
    }


def project_query(
    x: Float[Array, "B S D"], weights: Params, config: LatentConfig, cos_sin: RopeCosSin
) -> Float[Array, "B S N H"]:
    if config.q_lora_rank is None:
        query = linear(x, weights, "wq")
    else:
        compressed = checkpoint_name(linear(x, weights, "q_a"), "q_a")
        query = linear(rms_norm(compressed, weights["q_a_norm"], config.norm_epsilon), weights, "q_b")
    nope, rope = query[..., : config.nope_dim], query[..., config.nope_dim :]
    rope = apply_rope(rope, cos_sin, config.rope.interleaved)
    return checkpoint_name(jnp.concatenate([nope, rope], axis=-1), "query")


def project_key_value(x: Float[Array, "B S D"], weights: Params, config: LatentConfig, cos_sin: RopeCosSin) -> Memory:
    both = checkpoint_name(linear(x, weights, "kv_a"), "kv_a")
    latent = rms_norm(both[..., : config.kv_lora_rank], weights["kv_a_norm"], config.norm_epsilon)
    rope_key = apply_rope(both[..., None, config.kv_lora_rank :], cos_sin, config.rope.interleaved)[:, :, 0]
    return {"latent": jnp.concatenate([latent, rope_key], axis=-1)}


def attend(
    query: Float[Array, "B S N H"], memory: Memory, weights: Params, config: LatentConfig, context: AttentionContext
) -> Float[Array, "B S D"]:
    latent, rope_key = memory["latent"][..., : config.kv_lora_rank], memory["latent"][..., config.kv_lora_rank :]
    on_latents = context.slots is not None and query.shape[1] == 1
    if on_latents:
        nope = linear_per_head(query[..., : config.nope_dim], weights, "k_b", back=True)
        query = jnp.concatenate([nope, query[..., config.nope_dim :]], axis=-1)
        key, value = memory["latent"][:, :, None], latent[:, :, None]
    else:
        nope = linear(latent, weights, "k_b")
        rope = jnp.broadcast_to(rope_key[:, :, None], (*nope.shape[:3], config.rope_dim))
        key = checkpoint_name(jnp.concatenate([nope, rope], axis=-1), "key")
        value = checkpoint_name(linear(latent, weights, "v_b"), "value")
    out = run_attention(query, key, value, context, scale=config.softmax_scale)
    if on_latents:
        out = linear_per_head(out, weights, "v_b")
    return linear_back(out, weights, "wo")


def memory_shapes(config: LatentConfig) -> dict[str, tuple[int, ...]]:
    return {"latent": (config.kv_lora_rank + config.rope_dim,)}


LATENT = Mixer(
    specs=specs,
    project_query=project_query,
    project_key_value=project_key_value,
    attend=attend,
    memory_shapes=memory_shapes,
)
