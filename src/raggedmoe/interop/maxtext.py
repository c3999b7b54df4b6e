"""MaxText's settings by their names, and what each one is here: tables, not code.

An entry says which of our settings a value becomes. What has no counterpart either changes nothing, or is refused; both
with the reason, and never at its default (`raggedmoe.interop.maxtext_defaults`). A few words mean something only
together, as `remat_policy=custom` and what it keeps: those are groups.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from raggedmoe.interop.maxtext_defaults import COUNTERPARTS, NO_EFFECT, REFUSED, is_same, pairs
from raggedmoe.mesh import AXES

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What settings of theirs are here: other settings, as words to parse, and a note for the user."""

    settings: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None


Entry = Callable[[str], Meaning]  # from the value as typed; ValueError: refused, with the reason


def _is_true(name: str, text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise ValueError(f"{name}: expected true or false, got {text!r}")
    return text.lower() in TRUE


def _renamed(to: str) -> Entry:
    return lambda text: Meaning(settings={to: text})


def _unless(name: str, off: str, otherwise: str | None) -> Entry:
    """A setting of ours, where theirs has a value for "off", which is another one here, or the default (None)."""

    def entry(text: str) -> Meaning:
        if not is_same(text, off):
            return Meaning(settings={name: text})
        return Meaning(settings={} if otherwise is None else {name: otherwise})

    return entry


def _switch(name: str, *, on: dict[str, str], off: dict[str, str] | None = None, note: str | None = None) -> Entry:
    """A boolean; the note is for who switches it on."""

    def entry(text: str) -> Meaning:
        if not _is_true(name, text):
            return Meaning(settings=off or {})
        return Meaning(settings=on, note=note)

    return entry


def _words(name: str, known: Mapping[str, dict[str, str]], reasons: Mapping[str, str] | None = None) -> Entry:
    """One of some words; of others there may be a reason why they are refused."""

    def entry(text: str) -> Meaning:
        if text.lower() in (reasons or {}):
            raise ValueError(f"{name}={text}: {(reasons or {})[text.lower()]}")
        if text.lower() not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {text!r}")
        return Meaning(settings=known[text.lower()])

    return entry


def _no_effect(reason: str, default: str) -> Entry:
    return lambda text: Meaning(note=None if is_same(text, default) else f"ignored: {reason}")


def _refused(name: str, reason: str, default: str) -> Entry:
    def entry(text: str) -> Meaning:
        if not is_same(text, default):
            raise ValueError(f"{name}={text}: {reason}")
        return Meaning()

    return entry


def _unless_off(name: str) -> Entry:
    """Theirs is off unless it is above 0; ours is None."""

    def entry(text: str) -> Meaning:
        try:
            off = float(text) <= 0
        except ValueError:
            off = False
        return Meaning(settings={name: "none" if off else text})

    return entry


def _number_or_all(text: str) -> Meaning:
    """MaxText keeps all checkpoints unless a number says how many."""
    return Meaning(settings={} if is_same(text, "none") else {"keep_last": text})


def _evaluation_steps(text: str) -> Meaning:
    if is_same(text, "-1"):
        return Meaning(note="the default here, some batches; MaxText evaluates all that there are")
    return Meaning(settings={"eval_steps": text})


def _activations(text: str) -> Meaning:
    names = [part.strip(" []\"'") for part in text.lower().split(",")]
    if names != ["silu", "linear"]:
        raise ValueError(f"mlp_activations={text}: the models' own are built; expected silu,linear, or leave it out")
    return Meaning()


def _block(text: str) -> Meaning:
    if text.lower() not in DECODER_BLOCKS:
        raise ValueError(
            f"decoder_block={text}: expected one of {', '.join(DECODER_BLOCKS)}; others are dense, or are not built"
        )
    return Meaning(settings={"model_name": DECODER_BLOCKS[text.lower()]})


# A decoder block is a model whose sizes are all said: those of one that has such layers, where nothing else is.
DECODER_BLOCKS = {
    "deepseek": "deepseek-v3",
    "mixtral": "mixtral-8x7b",
    "qwen3_moe": "qwen3-30b-a3b",
    "gpt_oss": "gpt-oss-20b",
    "olmoe": "olmoe-1b-7b",
}

# Kernels of one direction of an operation. There a flag replaces a kernel wherever it runs, and each kernel is the
# other's backward pass.
_GATHER_KERNEL = {"ragged_gather.forward": "xla", "ragged_gather_reduce.backward": "xla"}
_REDUCE_KERNEL = {"ragged_gather_reduce.forward": "xla", "ragged_gather.backward": "xla"}
_SPARSECORE = {"ragged_gather": "sparsecore,xla", "ragged_gather_reduce": "sparsecore,xla"}

SHAPE_KEYS = (
    *("vocab_size", "base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim", "base_mlp_dim"),
    *("num_experts", "num_experts_per_tok", "base_moe_mlp_dim", "shared_experts", "first_num_dense_layers"),
    *("interleave_moe_layer_step", "norm_topk_prob", "routed_scaling_factor", "routed_score_func", "routed_bias"),
    *("n_routing_groups", "topk_routing_group", "mlp_bias", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "rope_max_timescale", "normalization_layer_epsilon", "logits_via_embedding"),
    *("attention_bias", "attention_sink", "sliding_window_size"),
)
NAMES_OF_A_SHAPE = (*SHAPE_KEYS, "base_num_decoder_layers", "mtp_num_layers", "global_parameter_scale")

TRANSLATED: dict[str, Entry] = {
    # the model
    "model_name": _unless("model_name", "default", None),
    "decoder_block": _block,
    "base_num_decoder_layers": _renamed("num_layers"),
    "mlp_activations": _activations,
    "global_parameter_scale": _words("global_parameter_scale", {"1": {}}),
    "mtp_num_layers": _renamed("mtp_layers"),
    "mtp_loss_scaling_factor": _renamed("mtp_loss_weight"),
    **{name: _renamed(name) for name in SHAPE_KEYS},
    **{name: _renamed(name) for name in ("dtype", "weight_dtype", "scan_layers", "sparse_matmul")},
    **{name: _unless(name, "", None) for name in ("load_parameters_path", "tokenizer_path")},
    # the experts
    "use_random_routing": _switch(
        "use_random_routing",
        on={"routing": "random"},
        note="a token's experts are drawn without replacement and weighted by their scores; in MaxText with "
        "replacement, weighted by the raw logits",
    ),
    "use_ring_of_experts": _switch(
        "use_ring_of_experts", on={"expert_strategy": "ring"}, off={"expert_strategy": "auto"}
    ),
    "use_ragged_sort": _switch("use_ragged_sort", on=_SPARSECORE),
    "ragged_gather_fallback": _switch("ragged_gather_fallback", on=_GATHER_KERNEL),
    "ragged_gather_reduce_fallback": _switch("ragged_gather_reduce_fallback", on=_REDUCE_KERNEL),
    "ragged_buffer_factor": _unless_off("ragged_buffer_factor"),
    "capacity_factor": _unless_off("capacity_factor"),
    "num_moe_token_chunks": _renamed("token_chunks"),
    "num_moe_emb_chunks": _unless("width_chunks", "0", "1"),
    "load_balance_loss_weight": _renamed("load_balance_loss_weight"),
    "routed_bias_update_rate": _renamed("bias_update_rate"),
    # data and learning
    "dataset_type": _words(
        "dataset_type",
        {name: {"dataset_type": name} for name in ("stdlib", "text", "synthetic")},
        dict.fromkeys(
            ("tfds", "hf", "grain", "c4_mlperf", "olmo_grain"),
            "that pipeline is not built; use dataset_type=text with dataset_path, or synthetic",
        ),
    ),
    "dataset_path": _unless("dataset_path", "", None),
    "eval_interval": _unless("eval_interval", "-1", "0"),
    "eval_steps": _evaluation_steps,
    "warmup_steps_fraction": lambda text: Meaning(settings={"warmup_fraction": text, "warmup_from": "zero"}),
    "learning_rate_schedule_steps": _unless("schedule_steps", "-1", "none"),
    "data_shuffle_seed": _renamed("data_seed"),
    "init_weights_seed": _renamed("seed"),
    "adam_weight_decay": lambda text: Meaning(settings={"weight_decay": text, "weight_decay_of": "all"}),
    "cosine_learning_rate_final_fraction": _renamed("final_fraction"),
    "learning_rate_final_fraction": _renamed("final_fraction"),
    "lr_schedule_type": _words("lr_schedule_type", {"cosine": {"schedule": "cosine"}, "wsd": {"schedule": "wsd"}}),
    "wsd_decay_steps_fraction": _renamed("decay_fraction"),
    "wsd_decay_style": _renamed("decay_style"),
    "mu_dtype": _unless("mu_dtype", "", None),
    "grad_dtype": _renamed("grad_dtype"),
    "opt_type": _words(
        "opt_type", {"adamw": {}}, dict.fromkeys(("muon", "sgd", "adam_pax"), "only AdamW is built; use opt_type=adamw")
    ),
    **{
        name: _renamed(name)
        for name in (
            *(
                "steps",
                "learning_rate",
                "adam_b1",
                "adam_b2",
                "adam_eps",
                "adam_eps_root",
                "gradient_clipping_threshold",
            ),
            *("gradient_accumulation_steps", "per_device_batch_size", "max_target_length", "packing"),
        )
    },
    # the run
    "run_name": _unless("run_name", "", None),
    "base_output_directory": _unless("base_output_directory", "", None),
    "profiler": lambda text: Meaning(settings={"profiler": text or "none"}),
    "max_num_checkpoints_to_keep": _number_or_all,
    "enable_tensorboard": _renamed("tensorboard"),
    **{
        name: _renamed(name)
        for name in (
            *("enable_checkpointing", "async_checkpointing", "checkpoint_period", "profiler_steps"),
            "skip_first_n_steps_for_profiler",
        )
    },
    # parallelism: theirs within a slice (ici) and between slices (dcn)
    **{f"ici_{axis}_parallelism": _renamed(f"{axis}_parallelism") for axis in AXES},
    # words of jax-gpt
    "moe_use_kernel_agent_ffn": _switch("moe_use_kernel_agent_ffn", on={"moe_backend": "expert_ffn"}),
    "moe_use_gmm_v2": _switch("moe_use_gmm_v2", on={"moe_backend": "gmm_v2"}),
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Words that mean something only together."""

    names: tuple[str, ...]
    meaning: Callable[[Mapping[str, str]], Meaning]  # from the values of those that were typed


def _matmul(typed: Mapping[str, str]) -> Meaning:
    """The grouped matmul's kernel: tokamax's before megablox, and its second one before its first.

    Where that cannot run, on a CPU for example, the next does, and the run says so.
    """
    on = {name: _is_true(name, text) for name, text in typed.items()}
    if on.get("use_gmm_v2"):
        return Meaning(settings={"grouped_matmul": "gmm_v2,tokamax,cpu,xla"})
    if on.get("use_tokamax_gmm"):
        return Meaning(settings={"grouped_matmul": "tokamax,cpu,xla"})
    if "megablox" not in on:
        return Meaning()
    return Meaning(settings={"grouped_matmul": "megablox,cpu,xla" if on["megablox"] else "xla"})


def _attention(typed: Mapping[str, str]) -> Meaning:
    """Attention's kernel: there `flash` is splash attention, JAX's or tokamax's."""
    text = typed.get("attention", "")
    if text.startswith("cudnn"):
        raise ValueError(f"attention={text}: cuDNN's attention is not built; use auto, dot_product or chunked")
    tokamax = "use_tokamax_splash" in typed and _is_true("use_tokamax_splash", typed["use_tokamax_splash"])
    if tokamax and text in ("", "flash", "autoselected"):
        return Meaning(settings={"attention": "tokamax"})
    note = f"ignored: use_tokamax_splash is read with attention=flash, not {text}" if tokamax else None
    known = {"autoselected": "auto", "flash": "splash"}
    return Meaning(settings={"attention": known.get(text, text)} if text else {}, note=note)


# What a policy keeps, by their names, and what those are here.
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
KEPT_NAMES: dict[str, tuple[str, ...]] = {
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
OFFLOADED = "keeping arrays in the host's memory is not built; remat_policy=full keeps the least on a device"


def _remat(typed: Mapping[str, str]) -> Meaning:
    """What is kept for the backward pass: a policy, or with ``remat_policy=custom`` each name by itself."""
    policy = typed.get("remat_policy", "full").lower()
    places = {name: text.lower() for name, text in typed.items() if name != "remat_policy"}
    for name, place in places.items():
        if place not in ("remat", "device", "offload"):
            raise ValueError(f"{name}: expected remat, device or offload, got {place!r}")
        if name == "decoder_layer_input" and place == "remat":
            raise ValueError("decoder_layer_input=remat: a layer's input is what the rest is computed from; use device")
    if policy != "custom":
        named = [name for name, place in places.items() if not is_same(place, pairs(COUNTERPARTS)[name])]
        note = f"ignored: {', '.join(named)} is read with remat_policy=custom alone" if named else None
        if policy in ("full", "none"):
            return Meaning(settings={"remat": policy} if "remat_policy" in typed else {}, note=note)
        if policy.endswith("offloaded"):
            raise ValueError(f"remat_policy={policy}: {OFFLOADED}")
        if policy not in POLICIES:
            raise ValueError(f"remat_policy: expected one of full, none, custom, {', '.join(POLICIES)}, got {policy!r}")
        return Meaning(settings={"remat": _kept(POLICIES[policy])}, note=note)
    for name, place in places.items():
        if place == "offload":
            raise ValueError(f"{name}=offload: {OFFLOADED}")
    kept = [name for name, place in places.items() if place == "device" and name != "decoder_layer_input"]
    return Meaning(settings={"remat": _kept(kept) or "full"})


def _kept(names: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(ours for name in names for ours in KEPT_NAMES[name]))


GROUPS: tuple[Group, ...] = (
    Group(names=("attention", "use_tokamax_splash"), meaning=_attention),
    Group(names=("megablox", "use_tokamax_gmm", "use_gmm_v2"), meaning=_matmul),
    Group(names=("remat_policy", "decoder_layer_input", *KEPT_NAMES), meaning=_remat),
)
GROUP_OF: dict[str, Group] = {name: group for group in GROUPS for name in group.names}


@functools.cache
def defaults() -> dict[str, str]:
    """Every name of theirs that is known here, and its default there."""
    found = pairs(COUNTERPARTS)
    for table in (NO_EFFECT, REFUSED):
        for text in table.values():
            found |= pairs(text)
    return found


@functools.cache
def without_counterpart() -> dict[str, tuple[str, str]]:
    """What changes nothing here, and what is refused: ``no effect`` or ``refused``, and why."""
    found: dict[str, tuple[str, str]] = {}
    for status, table in (("no effect", NO_EFFECT), ("refused", REFUSED)):
        for reason, text in table.items():
            found |= dict.fromkeys(pairs(text), (status, reason))
    return found


def meaning_of(name: str, text: str) -> Meaning | None:
    """What a word of theirs that stands for itself means; None: it is none of theirs, or one of a group."""
    if name in TRANSLATED:
        return TRANSLATED[name](text)
    if name in without_counterpart():
        status, reason = without_counterpart()[name]
        make = (
            _no_effect(reason, defaults()[name]) if status == "no effect" else _refused(name, reason, defaults()[name])
        )
        return make(text)
    return None


def known_names() -> tuple[str, ...]:
    """Every name of MaxText's that means something here, has no effect, or is refused with a reason."""
    return tuple(dict.fromkeys((*TRANSLATED, *GROUP_OF, *without_counterpart())))
