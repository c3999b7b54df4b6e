"""The table of settings of `raggedmoe train`: name, type, default and help of each. Parsing and `--help` read it.

A setting that MaxText has too has its name there; `raggedmoe.interop.maxtext` translates MaxText's other settings.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raggedmoe.interop.maxtext import FALSE, TRUE
from raggedmoe.kernels.registry import BACKWARD, FORWARD
from raggedmoe.models.execution import SAVED_NAMES
from raggedmoe.moe.execution import BACKENDS
from raggedmoe.sharding.axes import SPLITS

SCHEDULES = ("cosine", "wsd", "constant")
WARMUP_STARTS = ("first", "zero")
DECAY_STYLES = ("linear", "cosine")
WEIGHT_DECAY_TARGETS = ("matrices", "all")
BOOLS = {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}


def _parse_bool(text: str) -> bool:
    return BOOLS[text.lower()]


def _parse_names(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise ValueError(text)
    return parts


def _parse_int(text: str) -> int:
    number = float(text.replace("_", ""))
    if not number.is_integer():
        raise ValueError(text)
    return int(text.replace("_", "")) if "." not in text and "e" not in text.lower() else int(number)


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _parse_word(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


@dataclass(frozen=True, kw_only=True)
class ValueType:
    """The type of a setting's value: how it is parsed, and how an error describes it."""

    read: Callable[[str], Any]
    expected: str


VALUE_TYPES: dict[str, ValueType] = {
    "int": ValueType(read=_parse_int, expected="a whole number"),
    "float": ValueType(read=_parse_float, expected="a finite number"),
    "bool": ValueType(read=_parse_bool, expected="true or false"),
    "str": ValueType(read=_parse_word, expected="a word"),
    "names": ValueType(read=_parse_names, expected="names separated by commas"),
}


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting of a run."""

    name: str
    section: str
    kind: str  # a name in VALUE_TYPES
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    may_change: bool = False  # whether a run can be resumed with another value, as earlier steps do not depend on it

    def parse(self, text: str) -> Any:
        """Parse a value as a user typed it."""
        kind = VALUE_TYPES[self.kind]
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
    """Make the keys of one section of the help."""
    section_keys = []
    for key_name, kind, default, text, *more in keys:
        options = more[0] if more else {}
        section_keys.append(Key(name=key_name, section=name, kind=kind, default=default, help=text, **options))
    return section_keys


_RESUMABLE: dict[str, Any] = {"may_change": True}
KERNEL_KEYS = ("ragged_gather", "ragged_gather_reduce", "grouped_matmul", "expert_ffn")


def _kernel_keys() -> list[tuple]:
    """List the keys that choose the kernels of each operation of a layer, in both directions or in one."""
    keys: list[tuple] = []
    for operation in KERNEL_KEYS:
        keys.append((operation, "names", ("auto",), "Kernel, or several in order of preference", _RESUMABLE))
        for direction in (FORWARD, BACKWARD):
            keys.append((f"{operation}.{direction}", "names", (), f"Kernel of the {direction} pass alone", _RESUMABLE))
    return keys


_LEFT = "; -1: all devices that are left"

_MODEL = _section(
    "model",
    ("model_name", "str", "demo", "Model to train: a name that `raggedmoe models` lists, or demo"),
    ("num_layers", "int", None, "Number of layers: the model's first ones, or more of its last kind"),
    ("load_parameters_path", "str", None, "Checkpoint to start from: a Hugging Face folder or one of ours"),
    ("attention", "str", "auto", "Attention kernel: auto, dot_product, chunked, …", _RESUMABLE),
    (
        "remat",
        "names",
        ("none",),
        "Activations saved for the backward pass: none (no remat, all are saved), full (none are saved), "
        f"or names out of {', '.join(SAVED_NAMES)}",
        _RESUMABLE,
    ),
    ("scan_layers", "bool", True, "Scan over like layers; false compiles longer and runs faster", _RESUMABLE),
    (
        "dtype",
        "str",
        "auto",
        "Type of activations; auto: float32 on a CPU, else bfloat16",
        {"choices": ("auto", "float32", "bfloat16")},
    ),
    ("weight_dtype", "str", "float32", "Type of the master weights", {"choices": ("float32", "bfloat16")}),
    ("mtp_layers", "int", None, "Number of multi-token-prediction modules; none: as the model has"),
    ("mtp_loss_weight", "float", 0.3, "Weight of the multi-token-prediction loss; 0 does not train it"),
)
_SIZES = _section(
    "sizes",
    ("vocab_size", "int", None, "Vocabulary size; none, here and below: as the model has"),
    ("base_emb_dim", "int", None, "Embedding (model) width D"),
    ("base_num_query_heads", "int", None, "Number of query heads"),
    ("base_num_kv_heads", "int", None, "Number of key and value heads"),
    ("head_dim", "int", None, "Width of an attention head"),
    ("base_mlp_dim", "int", None, "Hidden width of a dense MLP"),
    ("num_experts", "int", None, "Number of experts in an MoE layer, E"),
    ("num_experts_per_tok", "int", None, "Number of experts that a token is routed to, K"),
    ("base_moe_mlp_dim", "int", None, "Hidden width of an expert, F"),
    ("shared_experts", "int", None, "Number of shared experts, which process every token"),
    ("first_num_dense_layers", "int", None, "Number of first layers with a dense MLP instead of experts"),
    ("interleave_moe_layer_step", "int", None, "Every n-th layer has experts, the others a dense MLP"),
    ("mlp_bias", "bool", None, "Whether experts have biases"),
    ("routed_score_func", "str", None, "Function from router logits to scores: softmax, sigmoid, sqrtsoftplus"),
    (
        "routed_bias",
        "bool",
        None,
        "Router bias: in DeepSeek V3 for the selection of experts only, in others on the logits",
    ),
    ("routed_scaling_factor", "float", None, "Factor on a token's routing weights, in DeepSeek's models"),
    ("norm_topk_prob", "bool", None, "Whether a token's routing weights are normalized to sum to one"),
    ("n_routing_groups", "int", None, "DeepSeek V3: number of groups of experts; -1: no groups"),
    ("topk_routing_group", "int", None, "DeepSeek V3: number of groups that a token may be routed to; -1: all"),
    ("q_lora_rank", "int", None, "Latent attention: rank of compressed queries; 0: not compressed"),
    ("kv_lora_rank", "int", None, "Latent attention: rank of compressed keys and values"),
    ("qk_nope_head_dim", "int", None, "Latent attention: width of a query and key head without rope"),
    ("qk_rope_head_dim", "int", None, "Latent attention: width of a query and key head with rope"),
    ("v_head_dim", "int", None, "Latent attention: width of a value head"),
    ("attention_bias", "bool", None, "Whether the attention projections have biases"),
    ("attention_sink", "bool", None, "Whether each head has a sink, a learned logit in its softmax"),
    ("sliding_window_size", "int", None, "Keys that a query attends to, in layers with a sliding window"),
    ("rope_max_timescale", "float", None, "Rope theta, the base of its frequencies"),
    ("normalization_layer_epsilon", "float", None, "Epsilon of RMSNorm"),
    ("logits_via_embedding", "bool", None, "Whether the output head is the embedding (tied)"),
)
_EXPERTS = _section(
    "experts",
    ("moe_backend", "str", "auto", f"Bundle of dispatch strategy and kernels: {', '.join(BACKENDS)}", _RESUMABLE),
    (
        "sparse_matmul",
        "bool",
        None,
        "false: every expert on every token, as moe_backend=dense; with a capacity factor, fixed slots",
        _RESUMABLE,
    ),
    *_kernel_keys(),
    ("width_chunks", "int", 1, "Chunks of the model width, one sent while another is computed", _RESUMABLE),
    ("routing", "str", None, "How experts are selected: learned, random, balanced, hash; none: as the model has"),
    (
        "capacity_factor",
        "float",
        None,
        "Slots of each expert in each sequence, as a multiple of an even share; tokens beyond are dropped"
        " and counted; none: no token is dropped",
    ),
    (
        "load_balance_loss_weight",
        "float",
        None,
        "Weight of MaxText's load-balancing loss (per sequence, K times ours, mean over layers); sets "
        "aux_loss and its weight",
    ),
    ("aux_loss_weight", "float", None, "Weight of the load-balancing loss; none: as the model has"),
    (
        "aux_loss",
        "str",
        None,
        "Balance over the whole batch or each sequence; none: as the model has",
        {"choices": ("batch", "sequence")},
    ),
    ("z_loss_weight", "float", None, "Weight of the router's z-loss; none: as the model has"),
    ("bias_update_rate", "float", 1e-3, "Update rate of the selection bias, in models that have one; 0: never"),
)
_DATA = _section(
    "data",
    (
        "dataset_type",
        "str",
        "stdlib",
        "Training data: Python's own sources (as bytes), text files, or random tokens",
        {"choices": ("stdlib", "text", "synthetic")},
    ),
    ("dataset_path", "names", (), "Files or folders of text, separated by commas, for dataset_type=text"),
    ("dataset_suffixes", "names", (), "Suffixes of the files to read in folders; none: the usual ones"),
    ("tokenizer_path", "str", None, "A tokenizer.json for dataset_type=text; none: tokens are bytes"),
    ("max_target_length", "int", 256, "Sequence length in tokens"),
    ("per_device_batch_size", "int", 16, "Sequences per device in a micro-batch", _RESUMABLE),
    ("gradient_accumulation_steps", "int", 1, "Micro-batches per step, whose gradients are accumulated"),
    ("packing", "bool", True, "Pack several documents into a row; false: one per row, padded"),
    ("held_out", "float", 0.05, "Share of the data that is held out for evaluation"),
    ("data_seed", "int", 0, "Seed of the train/held-out split and of the shuffling"),
)
_LEARNING = _section(
    "learning",
    ("steps", "int", 1000, "Number of training steps, which the schedule spans by default", _RESUMABLE),
    ("learning_rate", "float", 3e-3, "Peak learning rate"),
    ("schedule", "str", "cosine", "Learning-rate schedule after the warm-up", {"choices": SCHEDULES}),
    ("warmup_steps", "int", None, "Steps of linear warm-up; none: set by warmup_fraction"),
    ("warmup_fraction", "float", 0.02, "Warm-up as a share of the steps, if warmup_steps is none"),
    (
        "warmup_from",
        "str",
        "first",
        "Learning rate of warm-up step i of n, counted from 0: first has (i + 1)/n of the peak, zero has "
        "i/n, so that the first step changes nothing",
        {"choices": WARMUP_STARTS},
    ),
    ("schedule_steps", "int", None, "Steps that the schedule spans, then the rate is 0; none: all steps"),
    ("decay_fraction", "float", 0.2, "Share of the steps over which schedule=wsd decays"),
    ("decay_style", "str", "linear", "Shape of the decay of schedule=wsd", {"choices": DECAY_STYLES}),
    ("final_fraction", "float", 0.1, "Final learning rate as a share of the peak"),
    ("adam_b1", "float", 0.9, "Adam's beta1, decay of the first moment"),
    ("adam_b2", "float", 0.95, "Adam's beta2, decay of the second moment"),
    ("adam_eps", "float", 1e-8, "Adam's epsilon, added outside the square root"),
    ("adam_eps_root", "float", 0.0, "Adam's epsilon inside the square root"),
    ("weight_decay", "float", 0.1, "Weight decay of AdamW"),
    (
        "weight_decay_of",
        "str",
        "matrices",
        "Parameters that decay: matrices, or all",
        {"choices": WEIGHT_DECAY_TARGETS},
    ),
    (
        "grad_dtype",
        "str",
        "float32",
        "Type that gradients are rounded to before clipping",
        {"choices": ("float32", "bfloat16")},
    ),
    (
        "mu_dtype",
        "str",
        "float32",
        "Type of Adam's first moment; the second is float32",
        {"choices": ("float32", "bfloat16")},
    ),
    ("gradient_clipping_threshold", "float", 1.0, "Largest global norm of the gradients; 0: no clipping"),
    (
        "max_skipped_steps",
        "int",
        10,
        "Steps in a row whose loss or gradient is not finite, each skipped, after which the run stops",
        _RESUMABLE,
    ),
    ("seed", "int", 0, "Seed of the initial parameters and of all randomness in a step"),
)
_RUN = _section(
    "run",
    ("base_output_directory", "str", "out", "Folder in which runs are written", _RESUMABLE),
    ("run_name", "str", None, "Name of the run and of its folder; none: the model's name", _RESUMABLE),
    (
        "line_period",
        "int",
        None,
        "Steps between printed lines, not on a terminal; none: 10, or 1 in a run of 20 steps or fewer",
        _RESUMABLE,
    ),
    ("load_period", "int", 10, "Steps between lines of load.jsonl, the load of every expert", _RESUMABLE),
    ("eval_interval", "int", 100, "Steps between evaluations; 0: at the start and the end only", _RESUMABLE),
    ("eval_steps", "int", 16, "Batches per evaluation", _RESUMABLE),
    ("tensorboard", "bool", True, "Write TensorBoard events as well", _RESUMABLE),
    ("profiler", "str", "none", "xplane records a trace for xprof", {"choices": ("none", "xplane"), **_RESUMABLE}),
    ("profiler_steps", "int", 3, "Number of steps in the trace", _RESUMABLE),
    ("skip_first_n_steps_for_profiler", "int", 1, "Number of steps before the trace", _RESUMABLE),
)
_CHECKPOINTS = _section(
    "checkpoints",
    ("enable_checkpointing", "bool", True, "Write checkpoints, and resume from the newest", _RESUMABLE),
    ("checkpoint_period", "int", 100, "Steps between checkpoints", _RESUMABLE),
    ("keep_last", "int", 2, "Number of newest checkpoints to keep", _RESUMABLE),
    ("keep_best", "bool", True, "Also keep the checkpoint with the lowest held-out loss", _RESUMABLE),
    ("async_checkpointing", "bool", True, "Write checkpoints while training continues", _RESUMABLE),
)
_PARALLEL = _section(
    "parallel",
    ("data_parallelism", "int", 1, f"Devices that split the batch and replicate the state{_LEFT}", _RESUMABLE),
    ("fsdp_parallelism", "int", 1, f"Devices that split the batch and shard the state{_LEFT}", _RESUMABLE),
    ("expert_parallelism", "int", 1, f"Devices that split the batch and hold E/n experts each{_LEFT}", _RESUMABLE),
    ("tensor_parallelism", "int", 1, f"Devices that split heads, vocabulary and the experts' width{_LEFT}", _RESUMABLE),
    (
        "expert_strategy",
        "str",
        "auto",
        "How tokens reach experts on other devices; auto: all_to_all",
        {"choices": ("auto", "all_to_all", "ring"), **_RESUMABLE},
    ),
    ("token_chunks", "int", 1, "Chunks of a device's tokens, one sent while another is computed", _RESUMABLE),
    (
        "ragged_buffer_factor",
        "float",
        None,
        "Rows that a device can receive, as a multiple of an even share; rows beyond are dropped and "
        "counted; none: room for all that can come",
        _RESUMABLE,
    ),
    ("rerun_on_overflow", "bool", False, "Rerun a step that drops rows, with twice the buffer", _RESUMABLE),
    (
        "tensor_split",
        "str",
        "expert_dim",
        "What tensor parallelism splits of the experts: width F, or D",
        {"choices": SPLITS, **_RESUMABLE},
    ),
)
KEYS: dict[str, Key] = {
    key.name: key
    for section in (_MODEL, _SIZES, _EXPERTS, _DATA, _LEARNING, _RUN, _CHECKPOINTS, _PARALLEL)
    for key in section
}
SECTIONS = tuple(dict.fromkeys(key.section for key in KEYS.values()))

# Defaults that a model brings along. The demo takes about two minutes on two cores, in which a bias that moves by the
# published 0.001 a step would not balance the experts; small batches learn most in that time (docs/log.md).
RECIPES: dict[str, dict[str, Any]] = {
    "demo": {
        "steps": 1200,
        "per_device_batch_size": 4,
        "final_fraction": 0.02,
        "bias_update_rate": 0.01,
        "eval_interval": 300,
        "eval_steps": 32,
        "checkpoint_period": 300,
        "scan_layers": False,
    }
}
