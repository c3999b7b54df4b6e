"""Checkpoints of gpt-oss."""

from typing import Any

from raggedmoe.interop.families.grouped_query import attention_to_hf, read_attention, read_model
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.table import GROUPED_QUERY, MODEL, NORMS, Family, entry
from raggedmoe.kernels.expert_ffn.activations import CLAMP, CLAMPED_SLOPE
from raggedmoe.models.config import ModelConfig
from raggedmoe.moe.config import ExpertConfig, MoEConfig, RouterConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def read_config(reader: ConfigReader) -> ModelConfig:
    """Make the model's configuration from its config.json."""
    reader.require_keys("num_key_value_heads", "head_dim", "sliding_window")
    if "rope_scaling" not in reader.values:
        reader.require_keys("rope_parameters")
    reader.expect("attention_bias", True, default=True)
    reader.expect("swiglu_limit", CLAMP, default=CLAMP)
    reader.expect("swiglu_alpha", CLAMPED_SLOPE, default=CLAMPED_SLOPE)
    num_layers, window = reader.count("num_hidden_layers"), reader.optional_size("sliding_window")
    types = reader.get("layer_types", [SLIDING if n % 2 == 0 else FULL for n in range(num_layers)])
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (SLIDING, FULL) for kind in types):
        raise ValueError(f"{reader.path}: expected {num_layers} layer_types, {SLIDING} or {FULL} each, got {types}")
    epsilon = reader.number("rms_norm_eps", 1e-5)
    return read_model(
        reader,
        family="gpt_oss",
        attention=read_attention(reader, 150_000.0, biases=True, sinks=True, norm_epsilon=epsilon),
        moe=MoEConfig(
            num_experts=reader.count("num_local_experts"),
            experts_per_token=reader.size("num_experts_per_tok"),
            model_dim=reader.size("hidden_size"),
            expert_dim=reader.size("intermediate_size"),
            router=RouterConfig(score="logits", normalize="softmax", logit_bias=True),
            experts=ExpertConfig(activation="clamped_swiglu", biases=True),
        ),
        windows=tuple(window if kind == SLIDING else None for kind in types),
        norm_epsilon=epsilon,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Make the keys of config.json that are particular to this family."""
    windows = [config.kind(layer).window for layer in range(config.num_layers)]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"expected one size of sliding window in this family, got {sorted(sizes)}")
    return {
        **attention_to_hf(config),
        "attention_bias": True,
        "num_local_experts": config.moe.num_experts,
        "intermediate_size": config.moe.expert_dim,
        "sliding_window": next(iter(sizes), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "swiglu_limit": CLAMP,
    }


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    layer=(
        *NORMS,
        *GROUPED_QUERY,
        entry("self_attn.sinks", "attention.sinks", "head"),
        entry("mlp.router.weight", "moe.router_kernel", "expert model_dim"),
        entry("mlp.router.bias", "moe.router_logit_bias", "expert"),
        entry("mlp.experts.gate_up_proj_bias", "moe.bias_wi_0 moe.bias_wi_1", "expert (expert_dim &)"),
        entry("mlp.experts.down_proj_bias", "moe.bias_wo", "expert model_dim"),
    ),
    experts={
        "fused": (
            entry("mlp.experts.gate_up_proj", "moe.wi_0 moe.wi_1", "expert model_dim (expert_dim &)"),
            entry("mlp.experts.down_proj", "moe.wo", "expert expert_dim model_dim"),
        ),
        # As published, in 4 bits (`quantized.py` decodes them): outputs first, unlike the above.
        "mxfp4": (
            entry("mlp.experts.gate_up_proj_blocks", "moe.wi_0 moe.wi_1", "expert (expert_dim &) model_dim"),
            entry("mlp.experts.down_proj_blocks", "moe.wo", "expert model_dim expert_dim"),
        ),
    },
    import_only=("mxfp4",),
    model=MODEL,
    read_config=read_config,
    write_config=write_config,
)
