"""The MoE layers of public models, from their published configurations."""

from raggedmoe.moe.config import ExpertConfig, MoEConfig, RouterConfig

_DEEPSEEK_V3_ROUTER = RouterConfig(score="sigmoid", selection_bias=True, num_groups=8, groups_per_token=4, scale=2.5)
_GPT_OSS_ROUTER = RouterConfig(score="logits", normalize="softmax", logit_bias=True)
_GPT_OSS_EXPERTS = ExpertConfig(activation="clamped_swiglu", biases=True)


def _layer(model_dim: int, expert_dim: int, num_experts: int, per_token: int, **rest: object) -> MoEConfig:
    return MoEConfig(
        model_dim=model_dim,
        expert_dim=expert_dim,
        num_experts=num_experts,
        experts_per_token=per_token,
        **rest,  # type: ignore[arg-type]
    )


PRESETS: dict[str, MoEConfig] = {
    "deepseek-v3": _layer(7168, 2048, 256, 8, router=_DEEPSEEK_V3_ROUTER, experts=ExpertConfig(num_shared=1)),
    "deepseek-v2": _layer(
        5120,
        1536,
        160,
        6,
        router=RouterConfig(normalize="none", num_groups=8, groups_per_token=3, group_score="max", scale=16.0),
        experts=ExpertConfig(num_shared=2),
    ),
    "deepseek-v2-lite": _layer(
        2048, 1408, 64, 6, router=RouterConfig(normalize="none"), experts=ExpertConfig(num_shared=2)
    ),
    "kimi-k2": _layer(
        7168,
        2048,
        384,
        8,
        router=RouterConfig(score="sigmoid", selection_bias=True, scale=2.827),
        experts=ExpertConfig(num_shared=1),
    ),
    "mixtral-8x7b": _layer(4096, 14336, 8, 2),
    "mixtral-8x22b": _layer(6144, 16384, 8, 2),
    "qwen3-30b-a3b": _layer(2048, 768, 128, 8),
    "qwen3-235b-a22b": _layer(4096, 1536, 128, 8),
    "olmoe-1b-7b": _layer(2048, 1024, 64, 8, router=RouterConfig(normalize="none", aux_loss_weight=0.01)),
    "gpt-oss-20b": _layer(2880, 2880, 32, 4, router=_GPT_OSS_ROUTER, experts=_GPT_OSS_EXPERTS),
    "gpt-oss-120b": _layer(2880, 2880, 128, 4, router=_GPT_OSS_ROUTER, experts=_GPT_OSS_EXPERTS),
    "llama4-scout": _layer(
        5120,
        8192,
        16,
        1,
        router=RouterConfig(score="sigmoid", normalize="none", weigh="input"),
        experts=ExpertConfig(num_shared=1),
    ),
    "llama4-maverick": _layer(
        5120,
        8192,
        128,
        1,
        router=RouterConfig(score="sigmoid", normalize="none", weigh="input"),
        experts=ExpertConfig(num_shared=1),
    ),
}
