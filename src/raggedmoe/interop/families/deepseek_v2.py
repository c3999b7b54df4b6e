"""Checkpoints of DeepSeek V2 and V2-Lite, and what those of V3 share with them."""

from typing import Any

from raggedmoe.interop.hf_config import ConfigReader, read_rope, rope_to_hf
from raggedmoe.interop.table import FUSED, LATENT, MLP, MODEL, NORMS, PER_EXPERT, ROUTER, SHARED_EXPERTS, Family
from raggedmoe.models.config import LatentConfig, ModelConfig
from raggedmoe.moe.config import ExpertConfig, MoEConfig, RouterConfig

SELECTIONS = {"greedy": 1, "group_limited_greedy": None}  # topk_method -> the number of groups, None: n_group


def read_config(reader: ConfigReader) -> ModelConfig:
    """Make the model's configuration from its config.json."""
    reader.expect("scoring_func", "softmax", default="softmax")
    reader.expect("topk_method", *SELECTIONS, default="greedy")
    # The published code renormalises instead of scaling; transformers reads neither. No published model asks for it.
    reader.expect("norm_topk_prob", False, default=False)
    group_limited = reader.get("topk_method", "greedy") == "group_limited_greedy"
    router = RouterConfig(
        normalize="none",
        num_groups=reader.non_negative_int("n_group", 1) if group_limited else 1,
        groups_per_token=reader.non_negative_int("topk_group", 1) if group_limited else 1,
        group_score="max" if group_limited else "top2_sum",
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    reader.read |= {"n_group", "topk_group"}
    return read_latent_model(reader, family="deepseek_v2", router=router, interleaved=True, mtp_layers=0)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Make the keys of config.json that are particular to this family."""
    limited = config.moe.router.num_groups > 1
    return {
        **latent_model_to_hf(config),
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "norm_topk_prob": False,
    }


def read_latent_model(
    reader: ConfigReader, *, family: str, router: RouterConfig, interleaved: bool, mtp_layers: int
) -> ModelConfig:
    """Read the keys of config.json that V2 and V3 have in common."""
    reader.expect("hidden_act", "silu", default="silu")
    reader.expect("attention_bias", False, default=False)
    reader.expect("mlp_bias", False, default=False)
    reader.expect("moe_layer_freq", 1, default=1)
    reader.require_keys("q_lora_rank", "n_shared_experts")
    width, num_layers = reader.size("hidden_size"), reader.count("num_hidden_layers")
    return ModelConfig(
        family=family,
        vocab_size=reader.size("vocab_size"),
        num_layers=num_layers,
        model_dim=width,
        attention=LatentConfig(
            num_heads=reader.size("num_attention_heads"),
            q_lora_rank=reader.optional_size("q_lora_rank"),
            kv_lora_rank=reader.size("kv_lora_rank"),
            nope_dim=reader.size("qk_nope_head_dim"),
            rope_dim=reader.size("qk_rope_head_dim"),
            value_dim=reader.size("v_head_dim"),
            rope=read_rope(reader, 10_000.0, interleaved=interleaved),
        ),
        moe=MoEConfig(
            num_experts=reader.count("n_routed_experts"),
            experts_per_token=reader.size("num_experts_per_tok"),
            model_dim=width,
            expert_dim=reader.size("moe_intermediate_size"),
            router=router,
            experts=ExpertConfig(num_shared=reader.non_negative_int("n_shared_experts", 0)),
        ),
        mlp_dim=reader.size("intermediate_size"),
        dense_layers=tuple(range(min(reader.non_negative_int("first_k_dense_replace", 0), num_layers))),
        norm_epsilon=reader.number("rms_norm_eps", 1e-6),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        mtp_layers=mtp_layers,
        max_length=reader.size("max_position_embeddings"),
    )


def latent_model_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Make the keys of config.json that V2 and V3 have in common."""
    attention, router = config.attention, config.moe.router
    assert isinstance(attention, LatentConfig)
    if config.dense_layers != tuple(range(len(config.dense_layers))):
        raise ValueError(f"expected dense layers before all MoE layers in this family, got {config.dense_layers}")
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "attention_bias": False,
        **rope_to_hf(attention.rope),
        "n_routed_experts": config.moe.num_experts,
        "n_shared_experts": config.moe.experts.num_shared,
        "moe_intermediate_size": config.moe.expert_dim,
        "n_group": router.num_groups,
        "topk_group": router.groups_per_token,
        "routed_scaling_factor": router.scale,
        "moe_layer_freq": 1,
        "intermediate_size": config.mlp_dim,
        "first_k_dense_replace": len(config.dense_layers),
    }


FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    layer=(*NORMS, *LATENT, *MLP, *ROUTER, *SHARED_EXPERTS),
    experts={"per_expert": PER_EXPERT, "fused": FUSED},
    model=MODEL,
    read_config=read_config,
    write_config=write_config,
)
