"""Translation of MaxText's settings of rematerialisation into ours."""

from collections.abc import Iterable, Mapping

from raggedmoe.interop.maxtext_defaults import COUNTERPARTS, is_same, pairs

# The activations that a remat policy saves, by MaxText's names.
_QKV = ("query_proj", "key_proj", "value_proj")
_DOTS = (*_QKV, "out_proj")
_MLP = ("mlpwi", "mlpwo")
POLICIES: dict[str, tuple[str, ...]] = {
    "minimal": (*_DOTS, *_MLP),
    "minimal_with_context": (*_DOTS, *_MLP, "context"),
    "minimal_flash": (*_DOTS, *_MLP, "context"),
    "save_dot_with_context_except_mlp": (*_DOTS, "context"),
    "save_dot_except_mlpwi": (*_DOTS, "mlpwo"),
    "save_dot_except_mlp": _DOTS,
    "save_qkv_proj": _QKV,
    "save_out_proj": ("out_proj",),
}
# Our names for those.
OURS: dict[str, tuple[str, ...]] = {
    "context": ("attn_out",),
    "attention_out": ("attn_out",),
    "mlpwi": ("mlp_up", "moe_up"),
    "mlpwi_0": ("mlp_up", "moe_up"),
    "mlpwi_1": ("mlp_up", "moe_up"),
    "mlpwo": ("mlp_down", "moe_down"),
    "moe_mlpwi_0": ("moe_up",),
    "moe_mlpwi_1": ("moe_up",),
    "moe_mlpwo": ("moe_down",),
    "query_proj": ("query",),
    "key_proj": ("key",),
    "value_proj": ("value",),
    "kv_proj": ("key", "value"),
    "qkv_proj": ("query", "key", "value"),
    "out_proj": ("attn_proj_out",),
    "query_wa_proj": ("q_a",),
    "kv_wa_proj": ("kv_a",),
    "mla_q": ("query",),
    "mla_kv": ("key", "value"),
}
NAMES = ("remat_policy", "decoder_layer_input", *OURS)
OFFLOADED = "keeping arrays in the host's memory is not built; remat_policy=full keeps the least on a device"


def translate_remat(typed: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Translate what is saved for the backward pass: a policy, or with ``remat_policy=custom`` name by name.

    Settings of ours are returned, and a note for the user.
    """
    policy = typed.get("remat_policy", "full").lower()
    placements = {name: text.lower() for name, text in typed.items() if name != "remat_policy"}
    for name, placement in placements.items():
        if placement not in ("remat", "device", "offload"):
            raise ValueError(f"{name}: expected remat, device or offload, got {placement!r}")
        if name == "decoder_layer_input" and placement == "remat":
            raise ValueError("decoder_layer_input=remat: a layer's input is what the rest is computed from; use device")
    if policy != "custom":
        ignored = [name for name, placement in placements.items() if not is_same(placement, pairs(COUNTERPARTS)[name])]
        note = f"ignored: {', '.join(ignored)} is read with remat_policy=custom alone" if ignored else None
        if policy in ("full", "none"):
            return {"remat": policy} if "remat_policy" in typed else {}, note
        if policy.endswith("offloaded"):
            raise ValueError(f"remat_policy={policy}: {OFFLOADED}")
        if policy not in POLICIES:
            raise ValueError(f"remat_policy: expected one of full, none, custom, {', '.join(POLICIES)}, got {policy!r}")
        return {"remat": _remat_names(POLICIES[policy])}, note
    for name, placement in placements.items():
        if placement == "offload":
            raise ValueError(f"{name}=offload: {OFFLOADED}")
    saved = [name for name, placement in placements.items() if placement == "device" and name != "decoder_layer_input"]
    return {"remat": _remat_names(saved) or "full"}, None


def _remat_names(names: Iterable[str]) -> str:
    """Translate the names of saved activations, each once."""
    return ",".join(dict.fromkeys(ours for name in names for ours in OURS[name]))
