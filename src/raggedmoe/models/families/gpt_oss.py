"""gpt-oss: biases everywhere, learned sinks, a sliding window on every other layer, a clamped activation."""

from dataclasses import replace

from raggedmoe.models.config import GroupedQueryConfig, ModelConfig, RopeConfig, YarnConfig
from raggedmoe.moe.config import ExpertConfig, MoEConfig, RouterConfig

_ROPE = RopeConfig(theta=150_000.0, yarn=YarnConfig(factor=32.0, original_length=4096, truncate=False))
_ATTENTION = GroupedQueryConfig(
    num_heads=64, num_kv_heads=8, head_dim=64, biases=True, sinks=True, norm_epsilon=1e-5, rope=_ROPE
)
_20B = ModelConfig(
    family="gpt_oss",
    vocab_size=201088,
    num_layers=24,
    model_dim=2880,
    attention=_ATTENTION,
    moe=MoEConfig(
        num_experts=32,
        experts_per_token=4,
        model_dim=2880,
        expert_dim=2880,
        router=RouterConfig(score="logits", normalize="softmax", logit_bias=True),
        experts=ExpertConfig(activation="clamped_swiglu", biases=True),
    ),
    windows=(128, None),
    norm_epsilon=1e-5,
    max_length=131072,
)

PRESETS: dict[str, ModelConfig] = {
    "gpt-oss-20b": _20B,
    "gpt-oss-120b": replace(_20B, num_layers=36, moe=replace(_20B.moe, num_experts=128)),
    "gpt-oss-tiny": replace(
        _20B,
        vocab_size=256,
        num_layers=4,
        model_dim=64,
        attention=replace(_ATTENTION, num_heads=4, num_kv_heads=2, head_dim=16),
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=2,
            model_dim=64,
            expert_dim=48,
            router=_20B.moe.router,
            experts=_20B.moe.experts,
        ),
        windows=(8, None),
        max_length=512,
    ),
}
