"""A model with other sizes than its preset's, by the names that a user types."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raggedmoe.models.config import GroupedQueryConfig, LatentConfig, ModelConfig, first_layers
from raggedmoe.names import check_known, unknown
from raggedmoe.params import check_divides

# The name of a size, and the fields that hold it: a part of the configuration, and its field.
FIELDS: dict[str, tuple[tuple[str, str], ...]] = {
    "vocab_size": (("model", "vocab_size"),),
    "base_emb_dim": (("model", "model_dim"), ("moe", "model_dim")),
    "base_mlp_dim": (("model", "mlp_dim"),),
    "normalization_layer_epsilon": (("model", "norm_epsilon"), ("attention", "norm_epsilon")),
    "logits_via_embedding": (("model", "tied_embeddings"),),
    "num_experts": (("moe", "num_experts"),),
    "num_experts_per_tok": (("moe", "experts_per_token"),),
    "base_moe_mlp_dim": (("moe", "expert_dim"),),
    "shared_experts": (("experts", "num_shared"),),
    "mlp_bias": (("experts", "biases"),),
    "routed_scaling_factor": (("router", "scale"),),
    "base_num_query_heads": (("attention", "num_heads"),),
    "base_num_kv_heads": (("attention", "num_kv_heads"),),
    "head_dim": (("attention", "head_dim"),),
    "attention_bias": (("attention", "biases"),),
    "attention_sink": (("attention", "sinks"),),
    "q_lora_rank": (("attention", "q_lora_rank"),),
    "kv_lora_rank": (("attention", "kv_lora_rank"),),
    "qk_nope_head_dim": (("attention", "nope_dim"),),
    "qk_rope_head_dim": (("attention", "rope_dim"),),
    "v_head_dim": (("attention", "value_dim"),),
    "rope_max_timescale": (("rope", "theta"),),
}
# Those that are more than a field: see `resize`.
OTHERS = (
    *("num_layers", "first_num_dense_layers", "interleave_moe_layer_step", "norm_topk_prob", "routed_score_func"),
    *("routed_bias", "n_routing_groups", "topk_routing_group", "sliding_window_size"),
)
SCORE_FUNCTIONS = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}  # routed_score_func
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GROUPED_QUERY_SIZES = ("base_num_kv_heads", "head_dim", "attention_bias", "attention_sink")


def resize(model: ModelConfig, sizes: Mapping[str, Any], name: str = "the model") -> ModelConfig:
    """Give a model other sizes, by their names in `FIELDS` and `OTHERS`, and leave everything else as it was.

    A size that the model has no place for is refused by name. ``name`` is what errors call the model.
    """
    changes: dict[str, dict[str, Any]] = defaultdict(dict)
    for size, value in sizes.items():
        _check_place(model, size, value, name)
        if size == "base_num_kv_heads" and isinstance(model.attention, LatentConfig):
            continue  # every head has its own
        for part, field in FIELDS.get(size, ()):
            changes[part][field] = _config_value(size, value)
    changes["router"] |= _router_changes(model, sizes)
    _check_together(model, sizes, changes)
    attention, moe = model.attention, model.moe
    rope = replace(attention.rope, **changes["rope"])
    model = replace(
        model,
        attention=replace(attention, rope=rope, **changes["attention"]),
        moe=replace(
            moe,
            router=replace(moe.router, **changes["router"]),
            experts=replace(moe.experts, **changes["experts"]),
            **changes["moe"],
        ),
        **changes["model"],
    )
    return _with_layers(model, sizes, name)


def _check_together(model: ModelConfig, sizes: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse sizes that do not go together by the names that a user types; a configuration has others for them."""
    experts = changes["moe"].get("num_experts", model.moe.num_experts)
    per_token = changes["moe"].get("experts_per_token", model.moe.experts_per_token)
    if per_token > experts:
        raise ValueError(
            f"num_experts_per_tok={per_token} is more than num_experts={experts}; a token uses an expert at most once: "
            f"use at most {experts}"
        )
    groups = changes["router"].get("num_groups", model.moe.router.num_groups)
    if groups > 0:
        check_divides("num_experts", experts, "n_routing_groups", groups)
    groups_per_token = changes["router"].get("groups_per_token", model.moe.router.groups_per_token)
    if groups_per_token > groups:
        raise ValueError(f"expected topk_routing_group <= n_routing_groups={groups}, got {groups_per_token}")
    if isinstance(model.attention, GroupedQueryConfig):
        heads, kv_heads = (
            changes["attention"].get(name, getattr(model.attention, name)) for name in ("num_heads", "num_kv_heads")
        )
        check_divides("base_num_query_heads", heads, "base_num_kv_heads", kv_heads)
    for size in ("head_dim", "qk_rope_head_dim"):
        if sizes.get(size, 0) % 2:
            raise ValueError(f"expected an even {size}, as rope turns pairs, got {sizes[size]}")


def _config_value(size: str, value: Any) -> Any:
    """Return the value as the configuration holds it, where MaxText has another one for "none"."""
    if size == "q_lora_rank" and value == 0:
        return None
    return value


def _check_place(model: ModelConfig, size: str, value: Any, name: str) -> None:
    latent = isinstance(model.attention, LatentConfig)
    if size == "base_num_kv_heads" and latent:
        return
    if latent and size in GROUPED_QUERY_SIZES:
        raise ValueError(
            f"{size}={value}: {name} has latent attention, in which every head has its own keys; use "
            f"{', '.join(LATENT_SIZES)}"
        )
    if not latent and size in LATENT_SIZES:
        raise ValueError(f"{size}={value}: {name} has no latent attention; use {', '.join(GROUPED_QUERY_SIZES)}")
    if size not in FIELDS and size not in OTHERS:
        raise unknown("size", size, (*FIELDS, *OTHERS))


def _router_changes(model: ModelConfig, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the router's fields that its words change, as in MaxText, where DeepSeek's models read them differently.

    DeepSeek's weights are the chosen scores, over their sum unless those are a softmax, times a factor; with
    ``norm_topk_prob`` their sum is 1 in the end. All others take a softmax over what ranked the chosen. A model
    normalises its weights as its own do, unless it is told to.
    """
    router, in_deepseek = model.moe.router, model.family.startswith("deepseek")
    changes: dict[str, Any] = {}
    score = sizes.get("routed_score_func")
    if score is not None:
        check_known("routed_score_func", score, SCORE_FUNCTIONS)
        changes["score"] = SCORE_FUNCTIONS[score]
        changes["normalize"] = "softmax" if not in_deepseek else "none" if score == "softmax" else "sum"
    if not in_deepseek:
        changes["scale"] = router.scale
    if sizes.get("norm_topk_prob"):
        changes |= {"normalize": "sum", "scale": 1.0} if in_deepseek else {}
        if changes.get("normalize", router.normalize) == "none":
            changes["normalize"] = "sum"
    if "routed_bias" in sizes:
        changes["selection_bias" if model.family == "deepseek_v3" else "logit_bias"] = sizes["routed_bias"]
        if sizes["routed_bias"] and model.family != "deepseek_v3" and (score is not None or in_deepseek):
            raise ValueError(
                "routed_bias=true: a bias on scores that is part of the weights is not built; use a DeepSeek V3 model, "
                "in which it only decides who is chosen, or leave out routed_score_func"
            )
    if model.family == "deepseek_v3" and ("n_routing_groups" in sizes or "topk_routing_group" in sizes):
        groups = sizes.get("n_routing_groups", router.num_groups)
        per_token = sizes.get("topk_routing_group", min(router.groups_per_token, max(groups, 1)))
        changes["num_groups"] = 1 if groups == -1 else groups
        changes["groups_per_token"] = changes["num_groups"] if -1 in (groups, per_token) else per_token
    return changes


def _with_layers(model: ModelConfig, sizes: Mapping[str, Any], name: str) -> ModelConfig:
    """Set the number of layers, and which of them are dense or have a window."""
    num_layers = sizes.get("num_layers", model.num_layers)
    if num_layers < 1:
        raise ValueError(f"num_layers: expected at least 1 of {name}, got {num_layers}")
    model = first_layers(model, num_layers)
    step, first = sizes.get("interleave_moe_layer_step", 1), sizes.get("first_num_dense_layers")
    if step < 1:
        raise ValueError(f"interleave_moe_layer_step: expected at least 1, got {step}")
    if first is not None and not 0 <= first <= num_layers:
        raise ValueError(f"first_num_dense_layers: expected 0 .. {num_layers}, the layers of {name}, got {first}")
    if first is not None:
        _check_has_mlp(model, f"first_num_dense_layers={first}", first > 0, name)
        model = replace(model, dense_layers=tuple(range(first)))
    if step > 1:
        _check_has_mlp(model, f"interleave_moe_layer_step={step}", num_layers > 1, name)
        every = {layer for layer in range(num_layers) if layer % step != step - 1}
        model = replace(model, dense_layers=tuple(sorted({*model.dense_layers, *every})))
    if "sliding_window_size" in sizes:
        model = _with_window(model, sizes["sliding_window_size"], name)
    return model


def _check_has_mlp(model: ModelConfig, size: str, makes_dense: bool, name: str) -> None:
    if makes_dense and model.mlp_dim is None:
        raise ValueError(
            f"{size}: {name} has experts in every layer, and no width for the MLP of others; set it with base_mlp_dim"
        )


def _with_window(model: ModelConfig, size: int, name: str) -> ModelConfig:
    """Give the layers that have a window one of that size; 0 leaves them as they are."""
    if not size:
        return model
    if not any(model.windows) or not isinstance(model.attention, GroupedQueryConfig):
        raise ValueError(f"sliding_window_size={size}: {name} has no layer with a window; leave it out")
    return replace(model, windows=tuple(window and size for window in model.windows))
