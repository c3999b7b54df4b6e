"""Grouped-query attention: per-head or full-width QK norm, biases, sinks, sliding window."""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from raggedmoe.models.config import GroupedQueryConfig
from raggedmoe.models.matmul import linear, linear_back
from raggedmoe.models.mixer import AttentionContext, Memory, Mixer, run_attention
from raggedmoe.models.norm import rms_norm
from raggedmoe.models.rope import RopeCosSin, apply_rope
from raggedmoe.params import Params, ParamSpec


def specs(config: GroupedQueryConfig, model_dim: int, dtype: Any) -> dict[str, ParamSpec]:
    """Declare the parameters. wq, wk, wv and wo are all (heads, head_dim, D)."""
    heads = {
        "q": ("head", config.num_heads),
        "k": ("kv_head", config.num_kv_heads),
        "v": ("kv_head", config.num_kv_heads),
    }
    param_specs = {
        f"w{name}": ParamSpec(
            shape=(num, config.head_dim, model_dim),
            dtype=dtype,
            axes=(axis, "head_dim", "model_dim"),
            contracts="model_dim",
        )
        for name, (axis, num) in heads.items()
    }
    param_specs["wo"] = ParamSpec(
        shape=(config.num_heads, config.head_dim, model_dim),
        dtype=dtype,
        axes=("head", "head_dim", "model_dim"),
        contracts=("head", "head_dim"),
    )
    for name, (axis, num) in heads.items():
        if config.biases:
            param_specs[f"b{name}"] = ParamSpec(
                shape=(num, config.head_dim), dtype=dtype, axes=(axis, "head_dim"), init="zeros"
            )
        if name != "v" and config.qk_norm != "none":
            full = config.qk_norm == "full"
            param_specs[f"{name}_norm"] = ParamSpec(
                shape=(num, config.head_dim) if full else (config.head_dim,),
                dtype=dtype,
                axes=(axis, "head_dim") if full else ("head_dim",),
                init="ones",
            )
    if config.biases:
        param_specs["bo"] = ParamSpec(shape=(model_dim,), dtype=dtype, axes=("model_dim",), init="zeros")
    if config.sinks:
        param_specs["sinks"] = ParamSpec(shape=(config.num_heads,), dtype=dtype, axes=("head",), init="zeros")
    return param_specs


def _heads(x: Float[Array, "B S D"], name: str, weights: Params, config: GroupedQueryConfig) -> Float[Array, "B S N H"]:
    out = linear(x, weights, f"w{name}")
    if config.biases:
        out = out + weights[f"b{name}"].astype(out.dtype)[None, None]
    if name != "v" and config.qk_norm != "none":
        out = rms_norm(out, weights[f"{name}_norm"], config.norm_epsilon, num_dims=2 if config.qk_norm == "full" else 1)
    return out if config.clip is None else jnp.clip(out, -config.clip, config.clip)


def project_query(
    x: Float[Array, "B S D"], weights: Params, config: GroupedQueryConfig, cos_sin: RopeCosSin
) -> Float[Array, "B S N H"]:
    query = _heads(x, "q", weights, config)
    return checkpoint_name(apply_rope(query, cos_sin, config.rope.interleaved), "query")


def project_key_value(
    x: Float[Array, "B S D"], weights: Params, config: GroupedQueryConfig, cos_sin: RopeCosSin
) -> Memory:
    key = apply_rope(_heads(x, "k", weights, config), cos_sin, config.rope.interleaved)
    value = _heads(x, "v", weights, config)
    return {"key": checkpoint_name(key, "key"), "value": checkpoint_name(value, "value")}


def attend(
    query: Float[Array, "B S N H"],
    memory: Memory,
    weights: Params,
    config: GroupedQueryConfig,
    context: AttentionContext,
) -> Float[Array, "B S D"]:
    sinks = weights["sinks"] if config.sinks else None
    out = run_attention(query, memory["key"], memory["value"], context, scale=config.softmax_scale, sinks=sinks)
    out = linear_back(out, weights, "wo")
    return out + weights["bo"].astype(out.dtype)[None, None] if config.biases else out


def memory_shapes(config: GroupedQueryConfig) -> dict[str, tuple[int, ...]]:
    shape = (config.num_kv_heads, config.head_dim)
    return {"key": shape, "value": shape}


GROUPED_QUERY = Mixer(
    specs=specs,
    project_query=project_query,
    project_key_value=project_key_value,
    attend=attend,
    memory_shapes=memory_shapes,
)
