"""Every setting of `raggedmoe train`, once: its name, type, default and what it does. Help, docs and parsing read this.

Names are those that MaxText's users know where both mean the same; `raggedmoe.interop.maxtext` has the rest of theirs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raggedmoe.interop.maxtext import FALSE, TRUE
from raggedmoe.kernels.registry import BACKWARD, FORWARD
from raggedmoe.models.config import SAVED_NAMES
from raggedmoe.moe.backends import BACKENDS
from raggedmoe.partition import SPLITS

SCHEDULES = ("cosine", "wsd", "constant")
WARMUP_STARTS = ("first", "zero")
DECAY_STYLES = ("linear", "cosine")
DECAYING = ("matrices", "all")
BOOLS = {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}


def _bool(text: str) -> bool:
    return BOOLS[text.lower()]


def _names(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise ValueError(text)
    return parts


def _integer(text: str) -> int:
    number = float(text.replace("_", ""))
    if not number.is_integer():
        raise ValueError(text)
    return int(text.replace("_", "")) if "." not in text and "e" not in text.lower() else int(number)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _word(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A type of value: how it is read, and how an error describes it."""

    read: Callable[[str], Any]
    expected: str


KINDS: dict[str, Kind] = {
    "int": Kind(read=_integer, expected="a whole number"),
    "float": Kind(read=_number, expected="a finite number"),
    "bool": Kind(read=_bool, expected="true or false"),
    "str": Kind(read=_word, expected="a word"),
    "names": Kind(read=_names, expected="names separated by commas"),
}


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting."""

    name: str
    section: str
    kind: str  # of KINDS
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    may_change: bool = False  # a run can be resumed with another value: what was computed so far stays as it is

    def parse(self, text: str) -> Any:
        """The value that a user typed."""
        kind = KINDS[self.kind]
        if text.lower() in ("none", "null") and self.default is None:
            return None
        try:
            value = kind.read(text)
        except (ValueError, KeyError):
            raise ValueError(f"{self.name}: expected {kind.expected}, got {text!r}; {self.help}") from None
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name}: expected one of {', '.join(self.choices)}, got {text!r}")
        return value


def _section(name: str, *keys: tuple) -> list[Key]:
    made = []
    for key_name, kind, default, text, *more in keys:
        options = more[0] if more else {}
        made.append(Key(name=key_name, section=name, kind=kind, default=default, help=text, **options))
    return made


_FREE: dict[str, Any] = {"may_change": True}
KERNEL_KEYS = ("ragged_gather", "ragged_gather_reduce", "grouped_matmul", "expert_ffn")


def _kernel_keys() -> list[tuple]:
    """For every operation of a layer its implementation, in both directions or in one."""
    found: list[tuple] = []
    for operation in KERNEL_KEYS:
        found.append((operation, "names", ("auto",), "implementation, or several in order of preference", _FREE))
        for direction in (FORWARD, BACKWARD):
            found.append((f"{operation}.{direction}", "names", (), f"that of the {direction} pass alone", _FREE))
    return found


_LEFT = "; -1: all devices that are left"

KEYS: dict[str, Key] = {
    key.name: key
    for key in [
        *_section(
            "model",
            ("model_name", "str", "demo", "a model of `raggedmoe models`, or demo"),
            ("num_layers", "int", None, "the model with so many layers: its first ones, or more of its last kind"),
            ("load_parameters_path", "str", None, "start from a checkpoint: a Hugging Face folder or one of ours"),
            ("attention", "str", "auto", "implementation of attention: auto, dot_product, chunked, …", _FREE),
            (
                "remat",
                "names",
                ("none",),
                f"kept for the backward pass: none (all), full (nothing), or names out of {', '.join(SAVED_NAMES)}",
                _FREE,
            ),
            ("scan_layers", "bool", True, "like layers by one scan; false: compiles longer, runs faster", _FREE),
            (
                "dtype",
                "str",
                "auto",
                "of activations; auto: float32 on a CPU, bfloat16 elsewhere",
                {"choices": ("auto", "float32", "bfloat16")},
            ),
            (
                "weight_dtype",
                "str",
                "float32",
                "of the master weights",
                {"choices": ("float32", "bfloat16")},
            ),
            ("mtp_layers", "int", None, "modules of multi-token prediction; none: as the model has"),
            ("mtp_loss_weight", "float", 0.3, "of their loss; 0 does not train them"),
        ),
        *_section(
            "sizes",
            ("vocab_size", "int", None, "tokens that the model knows; none, here and below: as the model has"),
            ("base_emb_dim", "int", None, "the model's width D"),
            ("base_num_query_heads", "int", None, "heads of attention"),
            ("base_num_kv_heads", "int", None, "heads of keys and values"),
            ("head_dim", "int", None, "width of a head"),
            ("base_mlp_dim", "int", None, "width of a dense MLP"),
            ("num_experts", "int", None, "experts of a layer, E"),
            ("num_experts_per_tok", "int", None, "experts of a token, K"),
            ("base_moe_mlp_dim", "int", None, "width of an expert, F"),
            ("shared_experts", "int", None, "experts that see every token"),
            ("first_num_dense_layers", "int", None, "first layers that have a dense MLP instead of experts"),
            ("interleave_moe_layer_step", "int", None, "every so many layers one has experts, the others a dense MLP"),
            ("mlp_bias", "bool", None, "experts have biases"),
            ("routed_score_func", "str", None, "from logits to scores: softmax, sigmoid, sqrtsoftplus"),
            (
                "routed_bias",
                "bool",
                None,
                "DeepSeek V3: a bias decides who is chosen, and enters no weight; others: one of the logits",
            ),
            ("routed_scaling_factor", "float", None, "of a token's weights, in DeepSeek's models"),
            ("norm_topk_prob", "bool", None, "true: a token's weights sum to one, scaled or not"),
            ("n_routing_groups", "int", None, "DeepSeek V3: groups of experts; -1: none"),
            ("topk_routing_group", "int", None, "DeepSeek V3: groups that a token may use; -1: all"),
            ("q_lora_rank", "int", None, "latent attention: width of compressed queries; 0: not compressed"),
            ("kv_lora_rank", "int", None, "latent attention: width of compressed keys and values"),
            ("qk_nope_head_dim", "int", None, "latent attention: of a head, what has no position"),
            ("qk_rope_head_dim", "int", None, "latent attention: of a head, what has one"),
            ("v_head_dim", "int", None, "latent attention: width of a head's values"),
            ("attention_bias", "bool", None, "the projections of attention have biases"),
            ("attention_sink", "bool", None, "a learned logit of each head takes a share of the softmax"),
            ("sliding_window_size", "int", None, "keys that a query sees, in layers that have a window"),
            ("rope_max_timescale", "float", None, "the rotation's slowest period, theta"),
            ("normalization_layer_epsilon", "float", None, "of the norms"),
            ("logits_via_embedding", "bool", None, "the head is the embedding"),
        ),
        *_section(
            "experts",
            ("moe_backend", "str", "auto", f"bundle of strategy and kernels: {', '.join(BACKENDS)}", _FREE),
            (
                "sparse_matmul",
                "bool",
                None,
                "false: every expert on every token, as moe_backend=jax; with a capacity factor, fixed slots",
                _FREE,
            ),
            *_kernel_keys(),
            ("width_chunks", "int", 1, "the model width in so many parts, moved while others are multiplied", _FREE),
            ("routing", "str", None, "learned, random, balanced, hash; none: as the model has"),
            (
                "capacity_factor",
                "float",
                None,
                "slots of each expert in each sequence, as a multiple of an even share; tokens beyond are dropped "
                "and counted; none: nothing is dropped",
            ),
            (
                "load_balance_loss_weight",
                "float",
                None,
                "of MaxText's balance loss: of each sequence, K times ours, the mean over the layers; sets aux_loss "
                "and its weight",
            ),
            ("aux_loss_weight", "float", None, "of the load-balancing loss; none: as the model has"),
            (
                "aux_loss",
                "str",
                None,
                "balance over the whole batch or over each sequence; none: as the model has",
                {"choices": ("batch", "sequence")},
            ),
            ("z_loss_weight", "float", None, "of the router's z-loss; none: as the model has"),
            ("bias_update_rate", "float", 1e-3, "of the loss-free rule, for models with a selection bias; 0: never"),
        ),
        *_section(
            "data",
            (
                "dataset_type",
                "str",
                "stdlib",
                "stdlib (Python's own sources, as bytes), text or synthetic",
                {"choices": ("stdlib", "text", "synthetic")},
            ),
            ("dataset_path", "names", (), "of text: files or folders, separated by commas"),
            ("dataset_suffixes", "names", (), "of text: endings of the files in folders; none: the usual ones"),
            ("tokenizer_path", "str", None, "of text: a tokenizer.json; none: bytes"),
            ("max_target_length", "int", 256, "tokens of a sequence"),
            ("per_device_batch_size", "int", 16, "sequences of a micro-batch for each device of the mesh", _FREE),
            ("gradient_accumulation_steps", "int", 1, "micro-batches of a step, whose gradients are added up"),
            ("packing", "bool", True, "documents one after the other in a row; false: one a row, padded"),
            ("held_out", "float", 0.05, "share of the documents that is never trained on"),
            ("data_seed", "int", 0, "of the split and the order"),
        ),
        *_section(
            "learning",
            ("steps", "int", 1000, "of the run, over which the schedule goes", _FREE),
            ("learning_rate", "float", 3e-3, "Peak learning rate"),
            ("schedule", "str", "cosine", "after the warm-up", {"choices": SCHEDULES}),
            ("warmup_steps", "int", None, "linear rise; none: by warmup_fraction"),
            ("warmup_fraction", "float", 0.02, "of the steps that the rise takes, where warmup_steps does not say"),
            (
                "warmup_from",
                "str",
                "first",
                "step i of n, from 0, has (i + 1)/n of the peak; zero: i/n, so that the first step changes nothing",
                {"choices": WARMUP_STARTS},
            ),
            ("schedule_steps", "int", None, "that the schedule spans, after which the rate is 0; none: all steps"),
            ("decay_fraction", "float", 0.2, "of the steps that schedule=wsd decays over"),
            ("decay_style", "str", "linear", "of schedule=wsd", {"choices": DECAY_STYLES}),
            ("final_fraction", "float", 0.1, "of the learning rate that is left at the end"),
            ("adam_b1", "float", 0.9, "decay of the mean of gradients"),
            ("adam_b2", "float", 0.95, "decay of the mean of their squares"),
            ("adam_eps", "float", 1e-8, "added to the root of that"),
            ("adam_eps_root", "float", 0.0, "added under that root"),
            ("weight_decay", "float", 0.1, "of matrices; norms and biases do not decay"),
            ("weight_decay_of", "str", "matrices", "what decays: matrices, or all", {"choices": DECAYING}),
            (
                "grad_dtype",
                "str",
                "float32",
                "to which gradients are rounded before they are clipped and used",
                {"choices": ("float32", "bfloat16")},
            ),
            (
                "mu_dtype",
                "str",
                "float32",
                "of Adam's mean of gradients; that of their squares is float32 in any case",
                {"choices": ("float32", "bfloat16")},
            ),
            ("gradient_clipping_threshold", "float", 1.0, "longest gradient; 0: not clipped"),
            (
                "max_skipped_steps",
                "int",
                10,
                "steps in a row with a loss or gradient that is not finite, each skipped, after which the run stops",
                _FREE,
            ),
            ("seed", "int", 0, "of the parameters and of all that is random in a step"),
        ),
        *_section(
            "run",
            ("base_output_directory", "str", "out", "where runs are written", _FREE),
            ("run_name", "str", None, "folder of the run in there; none: the model's name", _FREE),
            (
                "line_period",
                "int",
                None,
                "steps between lines where the output is not a terminal; none: 10, or 1 in a run of 20 steps or fewer",
                _FREE,
            ),
            ("load_period", "int", 10, "steps between lines of load.jsonl, the loads of every expert", _FREE),
            ("eval_interval", "int", 100, "steps between held-out losses; 0: at the start and the end only", _FREE),
            ("eval_steps", "int", 16, "batches of the held-out loss", _FREE),
            ("tensorboard", "bool", True, "write TensorBoard events too", _FREE),
            (
                "profiler",
                "str",
                "none",
                "xplane: record a trace that xprof opens",
                {"choices": ("none", "xplane"), **_FREE},
            ),
            ("profiler_steps", "int", 3, "steps in the trace", _FREE),
            ("skip_first_n_steps_for_profiler", "int", 1, "steps before it", _FREE),
        ),
        *_section(
            "checkpoints",
            ("enable_checkpointing", "bool", True, "save, and resume where the run was left", _FREE),
            ("checkpoint_period", "int", 100, "steps between them", _FREE),
            ("keep_last", "int", 2, "newest ones to keep", _FREE),
            (
                "keep_best",
                "bool",
                True,
                "and the one with the lowest held-out loss of those evaluated",
                _FREE,
            ),
            ("async_checkpointing", "bool", True, "write while training goes on", _FREE),
        ),
        *_section(
            "parallel",
            ("data_parallelism", "int", 1, f"devices that split the batch, each with the whole state{_LEFT}", _FREE),
            ("fsdp_parallelism", "int", 1, f"that split the batch and the state, gathered when used{_LEFT}", _FREE),
            ("expert_parallelism", "int", 1, f"that split the batch and hold E/n experts each{_LEFT}", _FREE),
            (
                "tensor_parallelism",
                "int",
                1,
                f"that share the same tokens, and split heads, vocabulary and the experts' width{_LEFT}",
                _FREE,
            ),
            (
                "expert_strategy",
                "str",
                "auto",
                "how rows reach experts on other devices; auto: all_to_all where there are such",
                {"choices": ("auto", "all_to_all", "ring"), **_FREE},
            ),
            ("token_chunks", "int", 1, "a device's tokens in so many parts, moved while others are multiplied", _FREE),
            (
                "ragged_buffer_factor",
                "float",
                None,
                "rows that a device has room for, as a multiple of an even share; those beyond are dropped and "
                "counted; none: as many as can come",
                _FREE,
            ),
            ("rerun_on_overflow", "bool", False, "a step that drops rows is run again with twice the room", _FREE),
            (
                "tensor_split",
                "str",
                "expert_dim",
                "what tensor parallelism splits of the experts: their width F, or the model's D",
                {"choices": SPLITS, **_FREE},
            ),
        ),
    ]
}
SECTIONS = tuple(dict.fromkeys(key.section for key in KEYS.values()))

# What a model brings along, where the user says nothing else. The demo: about two minutes on two cores, in which a bias
# that moves by the published 0.001 a step would not balance the experts (docs/log.md).
RECIPES: dict[str, dict[str, Any]] = {
    "demo": {
        "steps": 500,
        "per_device_batch_size": 8,
        "bias_update_rate": 0.01,
        "eval_interval": 125,
        "checkpoint_period": 125,
        "scan_layers": False,
    }
}
