"""Translation of MaxText's settings into ours, as tables.

A translator says which of our settings a value becomes. A setting without a counterpart either changes nothing or is
refused, both with the reason, and never at its default (`raggedmoe.interop.maxtext_defaults`). A few settings mean
something only together, as `remat_policy=custom` and the names of what it saves: those are groups.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raggedmoe.interop.maxtext_defaults import COUNTERPARTS, NO_EFFECT, REFUSED, is_same, pairs
from raggedmoe.interop.maxtext_quantization import NAMES as QUANTIZATION_NAMES
from raggedmoe.interop.maxtext_quantization import translate_quantization
from raggedmoe.interop.maxtext_remat import NAMES as REMAT_NAMES
from raggedmoe.interop.maxtext_remat import translate_remat
from raggedmoe.sharding.axes import AXES

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True, kw_only=True)
class Translation:
    """What a setting of MaxText becomes: settings of ours, as text to parse, and a note for the user."""

    settings: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None


Translator = Callable[
    [str], Translation
]  # takes the value as typed; raises ValueError with the reason if it is refused


def _is_true(name: str, text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise ValueError(f"{name}: expected true or false, got {text!r}")
    return text.lower() in TRUE


def _rename(to: str) -> Translator:
    """Make the translator of a setting that is ours under another name."""
    return lambda text: Translation(settings={to: text})


def _unless(name: str, off: str, otherwise: str | None) -> Translator:
    """Make the translator of a setting whose value for "off" is another one here, or our default (None)."""

    def translate_value(text: str) -> Translation:
        if not is_same(text, off):
            return Translation(settings={name: text})
        return Translation(settings={} if otherwise is None else {name: otherwise})

    return translate_value


def _switch(name: str, *, on: dict[str, str], off: dict[str, str] | None = None, note: str | None = None) -> Translator:
    """Make the translator of a boolean; the note is shown to those who switch it on."""

    def translate_value(text: str) -> Translation:
        if not _is_true(name, text):
            return Translation(settings=off or {})
        return Translation(settings=on, note=note)

    return translate_value


def _one_of(name: str, known: Mapping[str, dict[str, str]], reasons: Mapping[str, str] | None = None) -> Translator:
    """Make the translator of a setting with a few known values; ``reasons`` says why others are refused."""

    def translate_value(text: str) -> Translation:
        if text.lower() in (reasons or {}):
            raise ValueError(f"{name}={text}: {(reasons or {})[text.lower()]}")
        if text.lower() not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {text!r}")
        return Translation(settings=known[text.lower()])

    return translate_value


def _ignore(reason: str, default: str) -> Translator:
    """Make the translator of a setting that has no effect here."""
    return lambda text: Translation(note=None if is_same(text, default) else f"ignored: {reason}")


def _refuse(name: str, reason: str, default: str) -> Translator:
    """Make the translator of a setting that is refused, unless it has its default."""

    def translate_value(text: str) -> Translation:
        if not is_same(text, default):
            raise ValueError(f"{name}={text}: {reason}")
        return Translation()

    return translate_value


def _positive_or_none(name: str) -> Translator:
    """Make the translator of a number that is off in MaxText unless it is above 0, and off here if it is none."""

    def translate_value(text: str) -> Translation:
        try:
            off = float(text) <= 0
        except ValueError:
            off = False
        return Translation(settings={name: "none" if off else text})

    return translate_value


def _keep_last(text: str) -> Translation:
    """Translate the number of checkpoints to keep, all of which MaxText keeps by default."""
    return Translation(settings={} if is_same(text, "none") else {"keep_last": text})


def _evaluation_steps(text: str) -> Translation:
    """Translate the number of batches of an evaluation."""
    if is_same(text, "-1"):
        return Translation(note="the default here, some batches; MaxText evaluates all that there are")
    return Translation(settings={"eval_steps": text})


def _activations(text: str) -> Translation:
    """Accept the activations that all models here have, and refuse others."""
    names = [part.strip(" []\"'") for part in text.lower().split(",")]
    if names != ["silu", "linear"]:
        raise ValueError(f"mlp_activations={text}: the models' own are built; expected silu,linear, or leave it out")
    return Translation()


def _decoder_block(text: str) -> Translation:
    """Translate a kind of decoder block into a model that has it."""
    if text.lower() not in DECODER_BLOCKS:
        raise ValueError(
            f"decoder_block={text}: expected one of {', '.join(DECODER_BLOCKS)}; others are dense, or are not built"
        )
    return Translation(settings={"model_name": DECODER_BLOCKS[text.lower()]})


# In MaxText a decoder block comes with sizes that are all set. Here those that are not set are of this model.
DECODER_BLOCKS = {
    "deepseek": "deepseek-v3",
    "mixtral": "mixtral-8x7b",
    "qwen3_moe": "qwen3-30b-a3b",
    "gpt_oss": "gpt-oss-20b",
    "olmoe": "olmoe-1b-7b",
}

# A flag of MaxText replaces a kernel wherever it runs, and each of these two kernels is the other's backward pass: so
# it sets one direction of both operations.
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


def _eval_files(text: str) -> Translation:
    """Translate the files to evaluate on, which are one set here, called eval."""
    files = [part.strip(" []\"'") for part in text.split(",")]
    return Translation(settings={"eval_paths": ",".join(f"eval={file}" for file in files)} if text else {})


def _data_columns(text: str) -> Translation:
    """Translate the columns of a dataset: one of text or messages, or prompt and completion, which are found here."""
    names = [part.strip(" []\"'") for part in text.split(",")]
    if names == ["prompt", "completion"]:
        return Translation()
    if len(names) > 1:
        raise ValueError(f"train_data_columns={text}: expected one column, or prompt,completion")
    return Translation(settings={"dataset_column": names[0]})


def _full_state(text: str) -> Translation:
    return Translation(settings={} if text == "" else {"init_from": text, "init_state": "all"})


TRANSLATED: dict[str, Translator] = {
    # the model
    "model_name": _unless("model_name", "default", None),
    "decoder_block": _decoder_block,
    "base_num_decoder_layers": _rename("num_layers"),
    "mlp_activations": _activations,
    "global_parameter_scale": _one_of("global_parameter_scale", {"1": {}}),
    "mtp_num_layers": _rename("mtp_layers"),
    "mtp_loss_scaling_factor": _rename("mtp_loss_weight"),
    **{name: _rename(name) for name in SHAPE_KEYS},
    **{name: _rename(name) for name in ("dtype", "weight_dtype", "scan_layers", "sparse_matmul")},
    **{name: _unless(name, "", None) for name in ("load_parameters_path", "tokenizer_path")},
    "load_full_state_path": _full_state,
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
    "ragged_buffer_factor": _positive_or_none("ragged_buffer_factor"),
    "capacity_factor": _positive_or_none("capacity_factor"),
    "num_moe_token_chunks": _rename("token_chunks"),
    "num_moe_emb_chunks": _unless("width_chunks", "0", "1"),
    "load_balance_loss_weight": _rename("load_balance_loss_weight"),
    "routed_bias_update_rate": _rename("bias_update_rate"),
    # data and learning
    "dataset_type": _one_of(
        "dataset_type",
        {name: {"dataset_type": name} for name in ("stdlib", "text", "chat", "hf", "tokens", "synthetic")},
        dict.fromkeys(
            ("tfds", "grain", "c4_mlperf", "olmo_grain"),
            "that pipeline is not built; use dataset_type=text, chat or hf with dataset_path, or synthetic",
        ),
    ),
    "dataset_path": _unless("dataset_path", "", None),
    "hf_eval_files": _eval_files,
    "train_split": _rename("dataset_split"),
    "train_data_columns": _data_columns,
    "eval_interval": _unless("eval_interval", "-1", "0"),
    "eval_steps": _evaluation_steps,
    "warmup_steps_fraction": lambda text: Translation(settings={"warmup_fraction": text, "warmup_from": "zero"}),
    "learning_rate_schedule_steps": _unless("schedule_steps", "-1", "none"),
    "data_shuffle_seed": _rename("data_seed"),
    "init_weights_seed": _rename("seed"),
    "adam_weight_decay": lambda text: Translation(settings={"weight_decay": text, "weight_decay_of": "all"}),
    "cosine_learning_rate_final_fraction": _rename("final_fraction"),
    "learning_rate_final_fraction": _rename("final_fraction"),
    "lr_schedule_type": _one_of("lr_schedule_type", {"cosine": {"schedule": "cosine"}, "wsd": {"schedule": "wsd"}}),
    "wsd_decay_steps_fraction": _rename("decay_fraction"),
    "wsd_decay_style": _rename("decay_style"),
    "mu_dtype": _unless("mu_dtype", "", None),
    "grad_dtype": _rename("grad_dtype"),
    "opt_type": _one_of(
        "opt_type",
        {name: {"opt_type": name} for name in ("adamw", "muon")},
        dict.fromkeys(("sgd", "adam_pax"), "only AdamW and Muon are built; use opt_type=adamw or muon"),
    ),
    **{
        name: _rename(name)
        for name in (
            *(
                "steps",
                "learning_rate",
                "adam_b1",
                "adam_b2",
                "adam_eps",
                "adam_eps_root",
                *("muon_beta", "muon_weight_decay", "muon_consistent_rms"),
                "gradient_clipping_threshold",
            ),
            *("gradient_accumulation_steps", "per_device_batch_size", "max_target_length", "packing", "add_eos"),
        )
    },
    # the run
    "run_name": _unless("run_name", "", None),
    "base_output_directory": _unless("base_output_directory", "", None),
    "profiler": lambda text: Translation(settings={"profiler": text or "none"}),
    "max_num_checkpoints_to_keep": _keep_last,
    "enable_tensorboard": _rename("tensorboard"),
    **{
        name: _rename(name)
        for name in (
            *("enable_checkpointing", "async_checkpointing", "checkpoint_period", "profiler_steps"),
            "skip_first_n_steps_for_profiler",
        )
    },
    # parallelism: theirs within a slice (ici) and between slices (dcn)
    "dcn_data_parallelism": _rename("dcn_data_parallelism"),
    **{f"ici_{axis}_parallelism": _rename(f"{axis}_parallelism") for axis in AXES},
    # words of jax-gpt
    "moe_use_kernel_agent_ffn": _switch("moe_use_kernel_agent_ffn", on={"moe_backend": "expert_ffn"}),
    "moe_fp8_weights": _switch(
        "moe_fp8_weights",
        on={"quantization": "fp8_weights"},
        note="with a scale for each expert and output channel, where a bare cast has none",
    ),
    "moe_use_gmm_v2": _switch("moe_use_gmm_v2", on={"moe_backend": "gmm_v2"}),
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings of MaxText that mean something only together."""

    names: tuple[str, ...]
    translate: Callable[[Mapping[str, str]], Translation]  # takes the values of those that were typed


def _grouped_matmul(typed: Mapping[str, str]) -> Translation:
    """Translate the kernel of the grouped matmul: gmm_v2 goes before tokamax's, and that before megablox.

    Where the kernel cannot run, on a CPU for example, the next in the list does, and the run says so.
    """
    on = {name: _is_true(name, text) for name, text in typed.items()}
    if on.get("use_gmm_v2"):
        return Translation(settings={"grouped_matmul": "gmm_v2,tokamax,cpu,xla"})
    if on.get("use_tokamax_gmm"):
        return Translation(settings={"grouped_matmul": "tokamax,cpu,xla"})
    if "megablox" not in on:
        return Translation()
    return Translation(settings={"grouped_matmul": "megablox,cpu,xla" if on["megablox"] else "xla"})


BUILDERS = ("parquet", "arrow")  # values of hf_path that say how files are read, and not where they are


def _hf_dataset(typed: Mapping[str, str]) -> Translation:
    """Translate where a dataset of Hugging Face is. Nothing is downloaded: it has to be a file or folder here."""
    path, folder, files = (typed.get(name, "") for name in ("hf_path", "hf_data_dir", "hf_train_files"))
    if "*" in files:
        raise ValueError(f"hf_train_files={files}: patterns are not expanded; name the files, or the folder with them")
    if files:
        return Translation(settings={"dataset_path": ",".join(part.strip(" []\"'") for part in files.split(","))})
    if path in ("json", "csv", "text"):
        raise ValueError(f"hf_path={path}: parquet and arrow files are read; use dataset_type=chat or text for others")
    place = "/".join(part for part in ("" if path in BUILDERS else path, folder) if part)
    return Translation(settings={"dataset_path": place} if place else {})


def _attention(typed: Mapping[str, str]) -> Translation:
    """Translate the kernel of attention; in MaxText `flash` is splash attention, JAX's or tokamax's."""
    text = typed.get("attention", "")
    if text.startswith("cudnn"):
        raise ValueError(f"attention={text}: cuDNN's attention is not built; use auto, dot_product or chunked")
    use_tokamax = "use_tokamax_splash" in typed and _is_true("use_tokamax_splash", typed["use_tokamax_splash"])
    if use_tokamax and text in ("", "flash", "autoselected"):
        return Translation(settings={"attention": "tokamax"})
    note = f"ignored: use_tokamax_splash is read with attention=flash, not {text}" if use_tokamax else None
    known = {"autoselected": "auto", "flash": "splash"}
    return Translation(settings={"attention": known.get(text, text)} if text else {}, note=note)


def _quantization(typed: Mapping[str, str]) -> Translation:
    settings, note = translate_quantization(typed)
    return Translation(settings=settings, note=note)


def _remat(typed: Mapping[str, str]) -> Translation:
    settings, note = translate_remat(typed)
    return Translation(settings=settings, note=note)


GROUPS: tuple[Group, ...] = (
    Group(names=("hf_path", "hf_data_dir", "hf_train_files"), translate=_hf_dataset),
    Group(names=("attention", "use_tokamax_splash"), translate=_attention),
    Group(names=("megablox", "use_tokamax_gmm", "use_gmm_v2"), translate=_grouped_matmul),
    Group(names=QUANTIZATION_NAMES, translate=_quantization),
    Group(names=REMAT_NAMES, translate=_remat),
)
GROUP_OF: dict[str, Group] = {name: group for group in GROUPS for name in group.names}


@functools.cache
def defaults() -> dict[str, str]:
    """List the known settings of MaxText with their defaults there."""
    values = pairs(COUNTERPARTS)
    for table in (NO_EFFECT, REFUSED):
        for text in table.values():
            values |= pairs(text)
    return values


@functools.cache
def without_counterpart() -> dict[str, tuple[str, str]]:
    """List the settings of MaxText that have no counterpart: ``no effect`` or ``refused``, and why."""
    reasons: dict[str, tuple[str, str]] = {}
    for status, table in (("no effect", NO_EFFECT), ("refused", REFUSED)):
        for reason, text in table.items():
            reasons |= dict.fromkeys(pairs(text), (status, reason))
    return reasons


def translate(name: str, text: str) -> Translation | None:
    """Translate one setting of MaxText; None if MaxText has no such setting, or it belongs to a group."""
    if name in TRANSLATED:
        return TRANSLATED[name](text)
    if name in without_counterpart():
        status, reason = without_counterpart()[name]
        make = _ignore(reason, defaults()[name]) if status == "no effect" else _refuse(name, reason, defaults()[name])
        return make(text)
    return None


def known_maxtext_names() -> tuple[str, ...]:
    """List every setting of MaxText that is translated, has no effect, or is refused with a reason."""
    return tuple(dict.fromkeys((*TRANSLATED, *GROUP_OF, *without_counterpart())))
