"""Checkpoints of DeepSeek V3 and Kimi-K2."""

from typing import Any

from raggedmoe.interop.families import deepseek_v2
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.table import (
    FUSED,
    LATENT,
    MLP,
    MODEL,
    NORMS,
    PER_EXPERT,
    ROUTER,
    SHARED_EXPERTS,
    Family,
    entry,
)
from raggedmoe.models.config import LatentConfig, ModelConfig
from raggedmoe.moe.config import RouterConfig


def read_config(reader: ConfigReader) -> ModelConfig:
    """Make the model's configuration from its config.json."""
    reader.expect("scoring_func", "sigmoid", default="sigmoid")
    reader.expect("topk_method", "noaux_tc", default="noaux_tc")
    reader.require_keys("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace")
    router = RouterConfig(
        score="sigmoid",
        selection_bias=True,
        normalize="sum" if reader.flag("norm_topk_prob", True) else "none",
        num_groups=reader.non_negative_int("n_group", 1),
        groups_per_token=reader.non_negative_int("topk_group", 1),
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    return deepseek_v2.read_latent_model(
        reader,
        family="deepseek_v3",
        router=router,
        interleaved=reader.flag("rope_interleave", True),
        mtp_layers=reader.non_negative_int("num_nextn_predict_layers", 0),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Make the keys of config.json that are particular to this family."""
    router, attention = config.moe.router, config.attention
    assert isinstance(attention, LatentConfig)
    return {
        **deepseek_v2.latent_model_to_hf(config),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": router.normalize == "sum",
        "rope_interleave": attention.rope.interleaved,
        "num_nextn_predict_layers": config.mtp_layers,
    }


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    layer=(
        *NORMS,
        *LATENT,
        *MLP,
        *ROUTER,
        entry("mlp.gate.e_score_correction_bias", "moe.router_selection_bias", "expert"),
        *SHARED_EXPERTS,
    ),
    experts={"per_expert": PER_EXPERT, "fused": FUSED},
    model=MODEL,
    mtp=(
        entry("enorm.weight", "embedding_norm", "model_dim"),
        entry("hnorm.weight", "hidden_norm", "model_dim"),
        entry("eh_proj.weight", "projection", "model_dim embedding_and_hidden"),
        entry("shared_head.norm.weight", "final_norm", "model_dim"),
    ),
    mtp_copies=(
        entry("embed_tokens.weight", "embedding", "vocab model_dim"),
        entry("shared_head.head.weight", "head", "vocab model_dim"),
    ),
    read_config=read_config,
    write_config=write_config,
)
