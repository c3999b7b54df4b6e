"""Checkpoints of Mixtral."""

from typing import Any

from raggedmoe.interop.families.grouped_query import attention_to_hf, common_window, read_attention, read_model
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.table import FUSED, GROUPED_QUERY, MODEL, NORMS, ROUTER, Family, entry, experts
from raggedmoe.models.config import ModelConfig
from raggedmoe.moe.config import MoEConfig

PREFIX = "block_sparse_moe"


def read_config(reader: ConfigReader) -> ModelConfig:
    """Make the model's configuration from its config.json."""
    reader.require_keys("num_key_value_heads")
    return read_model(
        reader,
        family="mixtral",
        attention=read_attention(reader, 1e6),
        moe=MoEConfig(
            num_experts=reader.count("num_local_experts"),
            experts_per_token=reader.size("num_experts_per_tok"),
            model_dim=reader.size("hidden_size"),
            expert_dim=reader.size("intermediate_size"),
        ),
        windows=(reader.optional_size("sliding_window"),),
        norm_epsilon=reader.number("rms_norm_eps", 1e-5),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Make the keys of config.json that are particular to this family."""
    return {
        **attention_to_hf(config),
        "num_local_experts": config.moe.num_experts,
        "intermediate_size": config.moe.expert_dim,
        "sliding_window": common_window(config),
    }


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    layer=(*NORMS, *GROUPED_QUERY),
    experts={
        "per_expert": (
            entry(f"{PREFIX}.gate.weight", "moe.router_kernel", "expert model_dim"),
            *experts(f"{PREFIX}.experts", "w1", "w3", "w2"),
        ),
        "fused": (*ROUTER, *FUSED),
    },
    model=MODEL,
    read_config=read_config,
    write_config=write_config,
)
