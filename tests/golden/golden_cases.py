"""The models of the golden fixtures: sizes as small as they can be with every feature of the family switched on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Overrides = Mapping[str, Any]

# Nothing ends a generation early, and no embedding row is special.
_PLAIN = {"vocab_size": 80, "hidden_size": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}

_MLA = _PLAIN | {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
    "intermediate_size": 28,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 2560,
}


def _yarn(**parameters: Any) -> dict[str, Any]:
    # From 64 positions the ramp lies over the frequencies that turn visibly within 40 positions.
    return {"rope_type": "yarn", "original_max_position_embeddings": 64, "beta_slow": 1.0, **parameters}


_DEEPSEEK_YARN = {"rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0}

_QWEN3 = _PLAIN | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "intermediate_size": 28,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fixture.

    Attributes:
      model_type: the family's name in `transformers`.
      config: what its configuration class is given.
      seed: of the weights. Any seed will do for which no choice of an expert or a token is close.
      without: for each feature, the configuration without it. The logits have to move, or the fixture tests nothing.
      zeroed: endings of tensor names which, set to zero, have to move the logits too.
      shard_size: the largest weight file, as `save_pretrained` takes it; "" for one file.
      gains: by ending of a tensor's name, how much larger than usual it is.
      fused_as: the name of a second fixture with the same weights, all experts of a layer in one tensor.
    """

    model_type: str
    config: Overrides
    seed: int
    without: Mapping[str, Overrides]
    zeroed: tuple[str, ...] = ()
    shard_size: str = ""
    gains: Mapping[str, float] = field(default_factory=dict)
    fused_as: str = ""


CASES: Mapping[str, Case] = {
    "deepseek_v3": Case(
        model_type="deepseek_v3",
        config=_MLA
        | {
            "q_lora_rank": 24,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_interleave": True,
            "num_nextn_predict_layers": 0,
            "rope_parameters": _yarn(**_DEEPSEEK_YARN, mscale=1.0, mscale_all_dim=0.6),
        },
        seed=4,
        without={
            "group limit": {"topk_group": 4},
            "normalised weights": {"norm_topk_prob": False},
            "scaling factor": {"routed_scaling_factor": 1.0},
            "interleaved rope": {"rope_interleave": False},
            "mscale": {"rope_parameters": _yarn(**_DEEPSEEK_YARN, mscale=0.6, mscale_all_dim=0.6)},
            "mscale_all_dim": {"rope_parameters": _yarn(**_DEEPSEEK_YARN, attention_factor=1.0)},
            "yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            "norm epsilon": {"rms_norm_eps": 1e-5},
        },
        zeroed=("e_score_correction_bias", "shared_experts.down_proj.weight"),
    ),
    "deepseek_v2": Case(
        model_type="deepseek_v2",
        config=_MLA
        | {
            "num_hidden_layers": 2,
            "q_lora_rank": 24,
            "moe_intermediate_size": 28,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 16.0,
            "rope_parameters": _yarn(**_DEEPSEEK_YARN, mscale=0.707, mscale_all_dim=0.707),
        },
        seed=5,
        without={
            "group limit": {"topk_method": "greedy"},
            "scaling factor": {"routed_scaling_factor": 1.0},
            "mscale_all_dim": {"rope_parameters": _yarn(**_DEEPSEEK_YARN, attention_factor=1.0)},
            "yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        },
        zeroed=("shared_experts.down_proj.weight",),
        # The routed sum is sixteen times a convex one: without this the other terms would be lost in it.
        gains={"experts.down_proj": 0.125},
    ),
    "deepseek_v2_lite": Case(
        model_type="deepseek_v2",
        config=_MLA
        | {
            "first_k_dense_replace": 2,
            "q_lora_rank": None,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "rope_parameters": _yarn(**_DEEPSEEK_YARN, mscale=0.707, mscale_all_dim=0.707),
        },
        seed=35,
        without={
            "mscale_all_dim": {"rope_parameters": _yarn(**_DEEPSEEK_YARN, attention_factor=1.0)},
            "yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        },
        zeroed=("shared_experts.down_proj.weight", "experts.down_proj"),
    ),
    "mixtral": Case(
        model_type="mixtral",
        config=_PLAIN
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        seed=7,
        without={
            "sliding window": {"sliding_window": None},
            "one key more in the window": {"sliding_window": 10},
            "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            "norm epsilon": {"rms_norm_eps": 1e-6},
        },
        shard_size="120KB",
    ),
    "qwen3_moe": Case(
        model_type="qwen3_moe",
        config=_QWEN3 | {"num_hidden_layers": 3, "mlp_only_layers": [1], "moe_intermediate_size": 24},
        seed=226,
        without={
            "normalised weights": {"norm_topk_prob": False},
            "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            "norm epsilon": {"rms_norm_eps": 1e-5},
        },
        zeroed=("q_norm.weight",),
    ),
    "qwen3_moe_tied": Case(
        model_type="qwen3_moe",
        config=_QWEN3
        | {
            "num_hidden_layers": 2,
            "decoder_sparse_step": 2,
            "moe_intermediate_size": 24,
            "tie_word_embeddings": True,
        },
        seed=25,
        without={"normalised weights": {"norm_topk_prob": False}},
        fused_as="qwen3_moe_fused",
    ),
    "olmoe": Case(
        model_type="olmoe",
        config=_PLAIN
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        seed=345,
        without={"weights as they are": {"norm_topk_prob": True}, "norm epsilon": {"rms_norm_eps": 1e-6}},
        zeroed=("q_norm.weight",),
    ),
    "gpt_oss": Case(
        model_type="gpt_oss",
        config=_PLAIN
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "max_position_embeddings": 2048,
            "rope_parameters": _yarn(rope_theta=150000.0, factor=32.0, beta_fast=4.0, truncate=False),
        },
        seed=0,
        without={
            "sliding window": {"layer_types": ["full_attention"] * 2},
            "alternating layers": {"layer_types": ["full_attention", "sliding_attention"]},
            "one key more in the window": {"sliding_window": 9},
            "clamp at 7": {"swiglu_limit": 1e6},
            "truncate=False": {"rope_parameters": _yarn(rope_theta=150000.0, factor=32.0, beta_fast=4.0)},
            "scaled cos and sin": {
                "rope_parameters": _yarn(
                    rope_theta=150000.0, factor=32.0, beta_fast=4.0, truncate=False, attention_factor=1.0
                )
            },
            "norm epsilon": {"rms_norm_eps": 1e-6},
        },
        zeroed=(
            "self_attn.sinks",
            "q_proj.bias",
            "k_proj.bias",
            "v_proj.bias",
            "o_proj.bias",
            "router.bias",
            "gate_up_proj_bias",
            "down_proj_bias",
        ),
        # Gate and up with a deviation of 3.5, so that the clamp at 7 is reached.
        gains={"experts.gate_up_proj": 3.5, "experts.down_proj": 0.15},
    ),
}
