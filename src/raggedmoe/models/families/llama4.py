"""Llama 4's MoE layers, which `explain` and `compile` take; there is no decoder for the rest of it here."""

from raggedmoe.moe.config import ExpertConfig, MoEConfig, RouterConfig

LAYERS: dict[str, MoEConfig] = {
    name: MoEConfig(
        num_experts=num_experts,
        experts_per_token=1,
        model_dim=5120,
        expert_dim=8192,
        router=RouterConfig(score="sigmoid", normalize="none", weigh="input"),
        experts=ExpertConfig(num_shared=1),
    )
    for name, num_experts in {"llama4-scout": 16, "llama4-maverick": 128}.items()
}
