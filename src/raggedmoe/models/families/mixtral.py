"""Mixtral: grouped-query attention, softmax over the chosen experts."""

from dataclasses import replace

from raggedmoe.models.config import GroupedQueryConfig, ModelConfig, RopeConfig
from raggedmoe.moe.config import MoEConfig

_ROPE = RopeConfig(theta=1e6)
_8X7B = ModelConfig(
    family="mixtral",
    vocab_size=32000,
    num_layers=32,
    model_dim=4096,
    attention=GroupedQueryConfig(num_heads=32, num_kv_heads=8, head_dim=128, rope=_ROPE),
    moe=MoEConfig(num_experts=8, experts_per_token=2, model_dim=4096, expert_dim=14336),
    norm_epsilon=1e-5,
    max_length=32768,
)

PRESETS: dict[str, ModelConfig] = {
    "mixtral-8x7b": _8X7B,
    "mixtral-8x22b": replace(
        _8X7B,
        vocab_size=32768,
        num_layers=56,
        model_dim=6144,
        attention=GroupedQueryConfig(num_heads=48, num_kv_heads=8, head_dim=128, rope=_ROPE),
        moe=MoEConfig(num_experts=8, experts_per_token=2, model_dim=6144, expert_dim=16384),
        max_length=65536,
    ),
    "mixtral-tiny": replace(
        _8X7B,
        vocab_size=256,
        num_layers=2,
        model_dim=64,
        attention=GroupedQueryConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=_ROPE),
        moe=MoEConfig(num_experts=8, experts_per_token=2, model_dim=64, expert_dim=96),
        max_length=512,
    ),
}
