"""Checkpoints of OLMoE."""

from typing import Any

from raggedmoe.interop.families.grouped_query import attention_to_hf, read_attention, read_model
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.table import FUSED, GROUPED_QUERY, MODEL, NORMS, PER_EXPERT, ROUTER, Family, entry
from raggedmoe.models.config import GroupedQueryConfig, ModelConfig
from raggedmoe.moe.config import MoEConfig, RouterConfig


def read_config(reader: ConfigReader) -> ModelConfig:
    """Make the model's configuration from its config.json."""
    epsilon = reader.number("rms_norm_eps", 1e-5)
    attention = read_attention(
        reader,
        10_000.0,
        qk_norm="full",
        norm_epsilon=epsilon,
        biases=reader.flag("attention_bias", False),
        clip=None if reader.get("clip_qkv") is None else reader.number("clip_qkv"),
    )
    router = RouterConfig(
        normalize="sum" if reader.flag("norm_topk_prob", False) else "none",
        aux_loss_weight=reader.number("router_aux_loss_coef", 0.01),
    )
    return read_model(
        reader,
        family="olmoe",
        attention=attention,
        moe=MoEConfig(
            num_experts=reader.count("num_experts"),
            experts_per_token=reader.size("num_experts_per_tok"),
            model_dim=reader.size("hidden_size"),
            expert_dim=reader.size("intermediate_size"),
            router=router,
        ),
        norm_epsilon=epsilon,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Make the keys of config.json that are particular to this family."""
    attention = config.attention
    assert isinstance(attention, GroupedQueryConfig)
    if attention.head_dim * attention.num_heads != config.model_dim:
        raise ValueError(
            f"OLMoE's checkpoints have no head_dim: it is model_dim / num_heads = {config.model_dim} / "
            f"{attention.num_heads}, got {attention.head_dim}"
        )
    written = {
        **attention_to_hf(config),
        "attention_bias": attention.biases,
        "clip_qkv": attention.clip,
        "num_experts": config.moe.num_experts,
        "intermediate_size": config.moe.expert_dim,
        "norm_topk_prob": config.moe.router.normalize == "sum",
        "router_aux_loss_coef": config.moe.router.aux_loss_weight,
    }
    del written["head_dim"]
    return written


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    layer=(
        *NORMS,
        *GROUPED_QUERY,
        entry("self_attn.q_norm.weight", "attention.q_norm", "(head head_dim)"),
        entry("self_attn.k_norm.weight", "attention.k_norm", "(kv_head head_dim)"),
        *ROUTER,
    ),
    experts={"per_expert": PER_EXPERT, "fused": FUSED},
    model=MODEL,
    read_config=read_config,
    write_config=write_config,
)
