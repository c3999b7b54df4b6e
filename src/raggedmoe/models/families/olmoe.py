"""OLMoE: attention with one norm over all heads' queries and one over their keys; weights are not renormalised."""

from dataclasses import replace

from raggedmoe.models.config import GroupedQueryConfig, ModelConfig
from raggedmoe.moe.config import MoEConfig, RouterConfig

_ROUTER = RouterConfig(normalize="none", aux_loss_weight=0.01)
_1B_7B = ModelConfig(
    family="olmoe",
    vocab_size=50304,
    num_layers=16,
    model_dim=2048,
    attention=GroupedQueryConfig(num_heads=16, num_kv_heads=16, head_dim=128, qk_norm="full", norm_epsilon=1e-5),
    moe=MoEConfig(num_experts=64, experts_per_token=8, model_dim=2048, expert_dim=1024, router=_ROUTER),
    norm_epsilon=1e-5,
    max_length=4096,
)

PRESETS: dict[str, ModelConfig] = {
    "olmoe-1b-7b": _1B_7B,
    "olmoe-tiny": replace(
        _1B_7B,
        vocab_size=256,
        num_layers=2,
        model_dim=64,
        attention=GroupedQueryConfig(num_heads=4, num_kv_heads=4, head_dim=16, qk_norm="full", norm_epsilon=1e-5),
        moe=MoEConfig(num_experts=16, experts_per_token=4, model_dim=64, expert_dim=32, router=_ROUTER),
        max_length=512,
    ),
}
