"""Qwen3-MoE: grouped-query attention with a norm on every head's queries and keys."""

from dataclasses import replace

from raggedmoe.models.config import GroupedQueryConfig, ModelConfig, RopeConfig
from raggedmoe.moe.config import MoEConfig

_ROPE = RopeConfig(theta=1e6)
_30B = ModelConfig(
    family="qwen3_moe",
    vocab_size=151936,
    num_layers=48,
    model_dim=2048,
    attention=GroupedQueryConfig(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm="head", rope=_ROPE),
    moe=MoEConfig(num_experts=128, experts_per_token=8, model_dim=2048, expert_dim=768),
    mlp_dim=6144,
    max_length=40960,
)

PRESETS: dict[str, ModelConfig] = {
    "qwen3-30b-a3b": _30B,
    "qwen3-235b-a22b": replace(
        _30B,
        num_layers=94,
        model_dim=4096,
        attention=replace(_30B.attention, num_heads=64),
        moe=MoEConfig(num_experts=128, experts_per_token=8, model_dim=4096, expert_dim=1536),
        mlp_dim=12288,
    ),
    "qwen3-tiny": replace(
        _30B,
        vocab_size=256,
        num_layers=2,
        model_dim=64,
        attention=GroupedQueryConfig(num_heads=4, num_kv_heads=2, head_dim=32, qk_norm="head", rope=_ROPE),
        moe=MoEConfig(num_experts=16, experts_per_token=4, model_dim=64, expert_dim=32),
        mlp_dim=None,
        max_length=512,
    ),
}
