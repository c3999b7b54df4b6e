"""DeepSeek V2 and V2-Lite: latent attention, softmax scores that are not renormalised."""

from dataclasses import replace

from raggedmoe.models.config import LatentConfig, ModelConfig, RopeConfig, YarnConfig
from raggedmoe.moe.config import ExpertConfig, MoEConfig, RouterConfig

_YARN = YarnConfig(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707)
_ROPE = RopeConfig(interleaved=True, yarn=_YARN)
_ATTENTION = LatentConfig(
    num_heads=16, q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128, rope=_ROPE
)
_LITE = ModelConfig(
    family="deepseek_v2",
    vocab_size=102400,
    num_layers=27,
    model_dim=2048,
    attention=_ATTENTION,
    moe=MoEConfig(
        num_experts=64,
        experts_per_token=6,
        model_dim=2048,
        expert_dim=1408,
        router=RouterConfig(normalize="none"),
        experts=ExpertConfig(num_shared=2),
    ),
    mlp_dim=10944,
    dense_layers=(0,),
    max_length=163840,
)

PRESETS: dict[str, ModelConfig] = {
    "deepseek-v2": replace(
        _LITE,
        num_layers=60,
        model_dim=5120,
        # V2's own YaRN differs from V2-Lite's in its two mscales alone.
        attention=replace(
            _ATTENTION,
            num_heads=128,
            q_lora_rank=1536,
            rope=replace(_ROPE, yarn=replace(_YARN, mscale=1.0, mscale_all_dim=1.0)),
        ),
        moe=replace(
            _LITE.moe,
            num_experts=160,
            model_dim=5120,
            expert_dim=1536,
            router=RouterConfig(normalize="none", num_groups=8, groups_per_token=3, group_score="max", scale=16.0),
        ),
        mlp_dim=12288,
    ),
    "deepseek-v2-lite": _LITE,
    "deepseek-v2-tiny": replace(
        _LITE,
        vocab_size=256,
        num_layers=3,
        model_dim=64,
        attention=LatentConfig(
            num_heads=4, q_lora_rank=None, kv_lora_rank=16, nope_dim=16, rope_dim=8, value_dim=16, rope=_ROPE
        ),
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=3,
            model_dim=64,
            expert_dim=32,
            router=RouterConfig(normalize="none"),
            experts=ExpertConfig(num_shared=2),
        ),
        mlp_dim=128,
        max_length=512,
    ),
}
