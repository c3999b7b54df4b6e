"""Checkpoints of Qwen3-MoE."""

from typing import Any

from raggedmoe.interop.families.grouped_query import attention_to_hf, common_window, read_attention, read_model
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.table import FUSED, GROUPED_QUERY, MLP, MODEL, NORMS, PER_EXPERT, ROUTER, Family, entry
from raggedmoe.models.config import ModelConfig
from raggedmoe.moe.config import MoEConfig, RouterConfig


def read_config(reader: ConfigReader) -> ModelConfig:
    """Make the model's configuration from its config.json."""
    reader.require_keys("num_key_value_heads")
    epsilon = reader.number("rms_norm_eps", 1e-6)
    biases = reader.flag("attention_bias", False)
    step, listed = reader.optional_size("decoder_sparse_step") or 1, reader.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ValueError(f"{reader.path}: expected 'mlp_only_layers' to be a list of layers, got {listed!r}")
    window = reader.optional_size("sliding_window")
    without_experts = set(listed)
    dense = [n for n in range(reader.count("num_hidden_layers")) if n in without_experts or (n + 1) % step]
    return read_model(
        reader,
        family="qwen3_moe",
        attention=read_attention(reader, 10_000.0, qk_norm="head", norm_epsilon=epsilon, biases=biases),
        moe=MoEConfig(
            num_experts=reader.count("num_experts", "num_local_experts"),
            experts_per_token=reader.size("num_experts_per_tok"),
            model_dim=reader.size("hidden_size"),
            expert_dim=reader.size("moe_intermediate_size"),
            router=RouterConfig(normalize="sum" if reader.flag("norm_topk_prob", False) else "none"),
        ),
        mlp_dim=reader.size("intermediate_size"),
        dense_layers=tuple(dense),
        windows=(window if reader.flag("use_sliding_window", False) else None,),
        norm_epsilon=epsilon,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Make the keys of config.json that are particular to this family."""
    window = common_window(config)
    return {
        **attention_to_hf(config),
        "attention_bias": config.attention.biases,  # type: ignore[union-attr]
        "num_experts": config.moe.num_experts,
        "moe_intermediate_size": config.moe.expert_dim,
        "norm_topk_prob": config.moe.router.normalize == "sum",
        "intermediate_size": config.mlp_dim or config.moe.expert_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        **({} if window is None else {"max_window_layers": 0}),
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layer=(
        *NORMS,
        *GROUPED_QUERY,
        entry("self_attn.q_norm.weight", "attention.q_norm", "head_dim"),
        entry("self_attn.k_norm.weight", "attention.k_norm", "head_dim"),
        *MLP,
        *ROUTER,
    ),
    experts={"per_expert": PER_EXPERT, "fused": FUSED},
    model=MODEL,
    read_config=read_config,
    write_config=write_config,
)
