"""DeepSeek V3 and Kimi-K2: latent attention, sigmoid scores with a selection bias, multi-token prediction."""

from dataclasses import replace

from raggedmoe.models.config import LatentConfig, ModelConfig, RopeConfig, YarnConfig
from raggedmoe.moe.config import ExpertConfig, MoEConfig, RouterConfig

_YARN = YarnConfig(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
_ROPE = RopeConfig(interleaved=True, yarn=_YARN)
_ATTENTION = LatentConfig(
    num_heads=128, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128, rope=_ROPE
)
_V3 = ModelConfig(
    family="deepseek_v3",
    vocab_size=129280,
    num_layers=61,
    model_dim=7168,
    attention=_ATTENTION,
    moe=MoEConfig(
        num_experts=256,
        experts_per_token=8,
        model_dim=7168,
        expert_dim=2048,
        router=RouterConfig(score="sigmoid", selection_bias=True, num_groups=8, groups_per_token=4, scale=2.5),
        experts=ExpertConfig(num_shared=1),
    ),
    mlp_dim=18432,
    dense_layers=(0, 1, 2),
    mtp_layers=1,
    max_length=163840,
)

PRESETS: dict[str, ModelConfig] = {
    "deepseek-v3": _V3,
    "kimi-k2": replace(
        _V3,
        vocab_size=163840,
        attention=replace(
            _ATTENTION,
            num_heads=64,
            rope=RopeConfig(theta=50_000.0, interleaved=True, yarn=replace(_YARN, factor=32.0, beta_fast=1.0)),
        ),
        moe=replace(_V3.moe, num_experts=384, router=RouterConfig(score="sigmoid", selection_bias=True, scale=2.827)),
        dense_layers=(0,),
        mtp_layers=0,
        max_length=131072,
    ),
    # As MaxText's users know it: V3's structure and vocabulary, narrow.
    "deepseek3-tiny": replace(
        _V3,
        model_dim=64,
        attention=replace(_ATTENTION, num_heads=4, q_lora_rank=32, kv_lora_rank=16),
        moe=MoEConfig(
            num_experts=16,
            experts_per_token=8,
            model_dim=64,
            expert_dim=64,
            router=RouterConfig(score="sigmoid", selection_bias=True, scale=2.5),
            experts=ExpertConfig(num_shared=1),
        ),
        mlp_dim=64,
        mtp_layers=0,
    ),
    # What `raggedmoe train` trains without a word: about a million active parameters, every special part of V3 on.
    "demo": replace(
        _V3,
        vocab_size=256,
        num_layers=4,
        model_dim=192,
        attention=LatentConfig(
            num_heads=4,
            q_lora_rank=96,
            kv_lora_rank=64,
            nope_dim=32,
            rope_dim=16,
            value_dim=32,
            rope=RopeConfig(interleaved=True),
        ),
        moe=MoEConfig(
            num_experts=16,
            experts_per_token=2,
            model_dim=192,
            expert_dim=96,
            router=RouterConfig(score="sigmoid", selection_bias=True, scale=2.5),
            experts=ExpertConfig(num_shared=1),
        ),
        mlp_dim=384,
        dense_layers=(0,),
        mtp_layers=0,
        max_length=1024,
    ),
    "deepseek-v3-tiny": replace(
        _V3,
        vocab_size=256,
        num_layers=3,
        model_dim=64,
        attention=LatentConfig(
            num_heads=4, q_lora_rank=32, kv_lora_rank=16, nope_dim=16, rope_dim=8, value_dim=16, rope=_ROPE
        ),
        moe=MoEConfig(
            num_experts=16,
            experts_per_token=4,
            model_dim=64,
            expert_dim=32,
            router=_V3.moe.router,
            experts=ExpertConfig(num_shared=1),
        ),
        mlp_dim=128,
        dense_layers=(0,),
        max_length=512,
    ),
}
