"""The settings of a run, in sections: name, type, default, limits and help of each are here, and nowhere else.

A setting that MaxText has too has its name there; `raggedmoe.interop.maxtext` translates MaxText's other settings.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from typing import Any

from raggedmoe.kernels.qarray import LHS_FORMATS
from raggedmoe.kernels.quant_config import QUANTIZATIONS, QuantConfig
from raggedmoe.kernels.registry import BACKWARD, FORWARD, Choice, Directions, Ordered
from raggedmoe.lora import GROUPS, ROUTERS
from raggedmoe.models.execution import SAVED_NAMES
from raggedmoe.moe.config import ROUTER_WORDS
from raggedmoe.moe.execution import BACKENDS, canonical_backend
from raggedmoe.sharding.axes import SPLITS
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.settings.fields import Section, section_class, setting

TYPES = ("float32", "bfloat16")
LEFT = "; -1: all devices that are left"


@section_class
class ModelOverrides(Section):
    """What changes the model from its preset: layers, types, sizes and the router."""

    num_layers: int | None = setting(
        default=None, help="Number of layers: the model's first ones, or more of its last kind", at_least=1
    )
    mtp_layers: int | None = setting(
        default=None, help="Number of multi-token-prediction modules; none: as the model has", at_least=0
    )
    dtype: str = setting(
        default="auto", help="Type of activations; auto: float32 on a CPU, else bfloat16", choices=("auto", *TYPES)
    )
    weight_dtype: str | None = setting(
        default=None,
        otherwise="float32",
        help="Type of the master weights; none: float32, or beside adapters that of the folder or of the activations",
        choices=TYPES,
    )
    vocab_size: int | None = setting(
        default=None, help="Vocabulary size; none, here and below: as the model has", at_least=1
    )
    base_emb_dim: int | None = setting(default=None, help="Embedding (model) width D", at_least=1)
    base_num_query_heads: int | None = setting(default=None, help="Number of query heads", at_least=1)
    base_num_kv_heads: int | None = setting(default=None, help="Number of key and value heads", at_least=1)
    head_dim: int | None = setting(default=None, help="Width of an attention head", at_least=1)
    base_mlp_dim: int | None = setting(default=None, help="Hidden width of a dense MLP", at_least=1)
    num_experts: int | None = setting(default=None, help="Number of experts in an MoE layer, E", at_least=1)
    num_experts_per_tok: int | None = setting(
        default=None, help="Number of experts that a token is routed to, K", at_least=1
    )
    base_moe_mlp_dim: int | None = setting(default=None, help="Hidden width of an expert, F", at_least=1)
    shared_experts: int | None = setting(
        default=None, help="Number of shared experts, which process every token", at_least=0
    )
    first_num_dense_layers: int | None = setting(
        default=None, help="Number of first layers with a dense MLP instead of experts"
    )
    interleave_moe_layer_step: int | None = setting(
        default=None, help="Every n-th layer has experts, the others a dense MLP", at_least=1
    )
    mlp_bias: bool | None = setting(default=None, help="Whether experts have biases")
    routed_score_func: str | None = setting(
        default=None, help="Function from router logits to scores: softmax, sigmoid, sqrtsoftplus"
    )
    routed_bias: bool | None = setting(
        default=None, help="Router bias: in DeepSeek V3 for the selection of experts only, in others on the logits"
    )
    routed_scaling_factor: float | None = setting(
        default=None, help="Factor on a token's routing weights, in DeepSeek's models"
    )
    norm_topk_prob: bool | None = setting(
        default=None, help="Whether a token's routing weights are normalized to sum to one"
    )
    n_routing_groups: int | None = setting(
        default=None, help="DeepSeek V3: number of groups of experts; -1: no groups", at_least=-1
    )
    topk_routing_group: int | None = setting(
        default=None, help="DeepSeek V3: number of groups that a token may be routed to; -1: all", at_least=-1
    )
    q_lora_rank: int | None = setting(
        default=None, help="Latent attention: rank of compressed queries; 0: not compressed", at_least=0
    )
    kv_lora_rank: int | None = setting(
        default=None, help="Latent attention: rank of compressed keys and values", at_least=1
    )
    qk_nope_head_dim: int | None = setting(
        default=None, help="Latent attention: width of a query and key head without rope", at_least=1
    )
    qk_rope_head_dim: int | None = setting(
        default=None, help="Latent attention: width of a query and key head with rope", at_least=1
    )
    v_head_dim: int | None = setting(default=None, help="Latent attention: width of a value head", at_least=1)
    attention_bias: bool | None = setting(default=None, help="Whether the attention projections have biases")
    attention_sink: bool | None = setting(
        default=None, help="Whether each head has a sink, a learned logit in its softmax"
    )
    sliding_window_size: int | None = setting(
        default=None, help="Keys that a query attends to, in layers with a sliding window", at_least=0
    )
    rope_max_timescale: float | None = setting(default=None, help="Rope theta, the base of its frequencies", above=1)
    normalization_layer_epsilon: float | None = setting(default=None, help="Epsilon of RMSNorm", above=0)
    logits_via_embedding: bool | None = setting(default=None, help="Whether the output head is the embedding (tied)")
    routing: str | None = setting(
        default=None, help="How experts are selected; none: as the model has", choices=ROUTER_WORDS["selection"]
    )
    capacity_factor: float | None = setting(
        default=None,
        help="Slots of each expert in each sequence, as a multiple of an even share; tokens beyond are dropped and "
        "counted; none: no token is dropped",
        above=0,
    )
    load_balance_loss_weight: float | None = setting(
        default=None,
        help="Weight of MaxText's load-balancing loss (per sequence, K times ours, mean over layers); sets aux_loss "
        "and its weight",
        at_least=0,
    )
    lora_rank: int | None = setting(
        default=None,
        help="Train adapters of this rank beside the model's weights, which are frozen; none: train the weights",
        at_least=1,
    )
    lora_alpha: float = setting(
        default=32.0, help="An adapter's product is multiplied by lora_alpha / lora_rank", above=0
    )
    lora_targets: tuple[str, ...] = setting(
        default=tuple(GROUPS),
        help=f"What has adapters: {', '.join(GROUPS)}, or matrices by name, such as attention.wq or moe.wi_0",
    )
    lora_router: str = setting(
        default="frozen", help="Whether routers are trained whole beside adapters", choices=ROUTERS
    )
    aux_loss_weight: float | None = setting(
        default=None, help="Weight of the load-balancing loss; none: as the model has", at_least=0
    )
    aux_loss: str | None = setting(
        default=None,
        help="Balance over the whole batch or each sequence; none: as the model has",
        choices=("batch", "sequence"),
    )
    z_loss_weight: float | None = setting(
        default=None, help="Weight of the router's z-loss; none: as the model has", at_least=0
    )


def _kernels() -> Any:
    return setting(default=("auto",), help="Kernel, or several in order of preference", may_change=True)


def _kernels_of(operation: str, direction: str) -> Any:
    return setting(
        default=(), help=f"Kernel of the {direction} pass alone", name=f"{operation}.{direction}", may_change=True
    )


def _scale(operand: str) -> Any:
    return setting(
        default=None,
        help=f"Constant scale of the quantised {operand}; none: what makes the largest value the format's largest",
        may_change=True,
        above=0,
    )


@section_class
class ExecutionSettings(Section):
    """How the model runs: kernels, rematerialisation, the ways of tokens to experts. No checkpoint depends on it."""

    attention: str = setting(default="auto", help="Attention kernel: auto, dot_product, chunked, …", may_change=True)
    remat: tuple[str, ...] = setting(
        default=("none",),
        help="Activations saved for the backward pass: none (no remat, all are saved), full (none are saved), "
        f"or names out of {', '.join(SAVED_NAMES)}",
        may_change=True,
    )
    scan_layers: bool | None = setting(
        default=None,
        otherwise=True,
        help="Scan over like layers; false compiles longer and runs faster",
        may_change=True,
    )
    moe_backend: str = setting(
        default="auto", help=f"Bundle of dispatch strategy and kernels: {', '.join(BACKENDS)}", may_change=True
    )
    quantization: str = setting(
        default="none",
        help="Experts' matmuls in 8 bits, in training and evaluation: fp8 (e4m3, gradients e5m2), int8, or of the "
        "weights alone; the master weights stay as they are",
        choices=("none", *QUANTIZATIONS),
        may_change=True,
    )
    quantization_block: int | None = setting(
        default=None,
        help="Columns of a row, and squares of a matrix, that share a scale; none: a row, and an output channel",
        may_change=True,
        at_least=1,
    )
    quantization_history: int | None = setting(
        default=None,
        help="Scales by the largest value of so many steps before, one for an operand (delayed); none: by those of now",
        may_change=True,
        at_least=1,
    )
    quantization_weight_scale: float | None = _scale("weights")
    quantization_row_scale: float | None = _scale("rows")
    quantization_cotangent_scale: float | None = _scale("gradients' rows")
    stochastic_rounding: bool = setting(
        default=False, help="Round the gradients' rows up or down by chance, right in the mean", may_change=True
    )
    sparse_matmul: bool | None = setting(
        default=None,
        help="false: every expert on every token, as moe_backend=dense; with a capacity factor, fixed slots",
        may_change=True,
    )
    ragged_gather: tuple[str, ...] = _kernels()
    ragged_gather_forward: tuple[str, ...] = _kernels_of("ragged_gather", FORWARD)
    ragged_gather_backward: tuple[str, ...] = _kernels_of("ragged_gather", BACKWARD)
    ragged_gather_reduce: tuple[str, ...] = _kernels()
    ragged_gather_reduce_forward: tuple[str, ...] = _kernels_of("ragged_gather_reduce", FORWARD)
    ragged_gather_reduce_backward: tuple[str, ...] = _kernels_of("ragged_gather_reduce", BACKWARD)
    grouped_matmul: tuple[str, ...] = _kernels()
    grouped_matmul_forward: tuple[str, ...] = _kernels_of("grouped_matmul", FORWARD)
    grouped_matmul_backward: tuple[str, ...] = _kernels_of("grouped_matmul", BACKWARD)
    expert_ffn: tuple[str, ...] = _kernels()
    expert_ffn_forward: tuple[str, ...] = _kernels_of("expert_ffn", FORWARD)
    expert_ffn_backward: tuple[str, ...] = _kernels_of("expert_ffn", BACKWARD)
    width_chunks: int = setting(
        default=1, help="Chunks of the model width, one sent while another is computed", may_change=True, at_least=1
    )
    token_chunks: int = setting(
        default=1, help="Chunks of a device's tokens, one sent while another is computed", may_change=True, at_least=1
    )
    recompute_dispatch: bool = setting(
        default=False,
        help="Backward, gather the experts' rows again rather than keep them; not with experts on several devices",
        may_change=True,
    )
    expert_strategy: str = setting(
        default="auto",
        help="How tokens reach experts on other devices; auto: all_to_all",
        choices=("auto", "all_to_all", "ring"),
        may_change=True,
    )
    ragged_buffer_factor: float | None = setting(
        default=None,
        help="Rows that a device can receive, as a multiple of an even share; rows beyond are dropped and counted; "
        "none: room for all that can come",
        may_change=True,
        above=0,
    )
    dispatch_dtype: str | None = setting(
        default=None,
        help="Send rows to experts on other devices in 8 bits, a scale beside each; none: in the activations' type",
        choices=LHS_FORMATS,
        may_change=True,
    )
    rerun_on_overflow: bool = setting(
        default=False, help="Rerun a step that drops rows, with twice the buffer", may_change=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "moe_backend", canonical_backend(self.moe_backend))
        if self.quantization_history is not None and self.quantization_block is not None:
            raise ValueError(
                f"quantization_history={self.quantization_history} makes one scale for a whole operand, and "
                f"quantization_block={self.quantization_block} one for each block; leave one of them out"
            )

    @property
    def quant_config(self) -> QuantConfig | None:
        """What is quantised of the experts' matmuls, None where nothing is."""
        if self.quantization == "none":
            return None
        config = QUANTIZATIONS[self.quantization]
        return replace(
            config,
            block=self.quantization_block,
            history=self.quantization_history,
            weight_scale=self.quantization_weight_scale,
            row_scale=self.quantization_row_scale if config.rows else None,
            cotangent_scale=self.quantization_cotangent_scale if config.cotangents else None,
            stochastic_rounding=self.stochastic_rounding and config.cotangents is not None,
        )

    @property
    def scans_layers(self) -> bool:
        """Whether like layers are scanned over."""
        return self.value_of("scan_layers")

    def kernel_choice(self, operation: str) -> Choice:
        """Return the implementation of an operation that is asked for, one for each direction where they differ."""

        def unpack_single(names: tuple[str, ...]) -> Ordered:
            return names[0] if len(names) == 1 else names

        forward, backward = (
            unpack_single(getattr(self, f"{operation}_{direction}") or getattr(self, operation))
            for direction in (FORWARD, BACKWARD)
        )
        return forward if forward == backward else Directions(forward=forward, backward=backward)


@section_class
class MeshSettings(Section):
    """How many devices split what: the degrees of parallelism."""

    dcn_data_parallelism: int = setting(
        default=-1,
        help="Slices, each with all of the degrees below, that split the batch and replicate the state; -1: all slices",
        may_change=True,
    )
    data_parallelism: int = setting(
        default=1, help=f"Devices that split the batch and replicate the state{LEFT}", may_change=True
    )
    fsdp_parallelism: int = setting(
        default=1, help=f"Devices that split the batch and shard the state{LEFT}", may_change=True
    )
    expert_parallelism: int = setting(
        default=1, help=f"Devices that split the batch and hold E/n experts each{LEFT}", may_change=True
    )
    tensor_parallelism: int = setting(
        default=1, help=f"Devices that split heads, vocabulary and the experts' width{LEFT}", may_change=True
    )
    tensor_split: str = setting(
        default="expert_dim",
        help="What tensor parallelism splits of the experts: width F, or D",
        choices=SPLITS,
        may_change=True,
    )

    @property
    def plan(self) -> Plan:
        """The mesh that the degrees ask for. A degree of -1 is open: `Plan.resolve` fills it in."""
        return Plan(
            slices=self.dcn_data_parallelism,
            data=self.data_parallelism,
            fsdp=self.fsdp_parallelism,
            expert=self.expert_parallelism,
            tensor=self.tensor_parallelism,
            tensor_split=self.tensor_split,
        )

    @property
    def num_devices(self) -> int:
        """The devices that the degrees ask for, at least: those that are left over count as one."""
        return self.plan.least.num_devices


BYTE_LENGTH, TOKENS_PER_DEVICE = 256, 4096  # of a sequence of bytes, and of a micro-batch
PEAK_LEARNING_RATE = 3e-3  # the demo's
BYTES = "bytes"  # the tokenizer_path that says so
OF_FILES = ("text", "chat", "hf", "tokens")  # the datasets that are read from dataset_path
OF_CONVERSATIONS = ("chat", "hf")  # those that a chat template may write
HELD_OUT = "held-out"  # what the share of the data that is not trained on is called among sets to evaluate on
WITHOUT_TOKENIZER = ("tokens", "synthetic")  # the datasets that no tokenizer of the run makes


@section_class
class DataConfig(Section):
    """What to train on, and in which rows and order.

    The datasets: "stdlib" is the source code of the Python that runs, and needs no download. "text" is your own files.
    Both are read as bytes or through a tokenizer. "chat" is conversations, whose answers alone are learned. "hf" is a
    dataset of Hugging Face on this machine, of texts or of conversations. "synthetic" is random tokens with something
    to learn in them.
    """

    dataset_type: str | None = setting(
        default=None,
        otherwise="stdlib",
        help="Training data: Python's own sources (has to be asked for, unless the model is one of bytes), text files, "
        "conversations (jsonl), a dataset of Hugging Face (parquet, arrow), what `raggedmoe tokenize` wrote, or random "
        "tokens",
        choices=("stdlib", "text", "chat", "hf", "tokens", "synthetic"),
    )
    dataset_path: tuple[str, ...] = setting(
        default=(), help="Files or folders, separated by commas, for dataset_type=text, chat, hf, tokens"
    )
    dataset_split: str | None = setting(
        default=None, help="Split of dataset_type=hf, such as test; none: train, or all if there is none of that name"
    )
    dataset_column: str | None = setting(
        default=None,
        help="Column of text or of messages, for dataset_type=hf; none: messages, prompt and completion, or text",
    )
    dataset_suffixes: tuple[str, ...] = setting(
        default=(), help="Suffixes of the files to read in folders; none: the usual ones"
    )
    tokenizer_path: str | None = setting(
        default=None, help="A tokenizer.json; bytes: tokens are bytes; none: that of the model's folder, or else bytes"
    )
    add_eos: bool = setting(default=True, help="End each document with the end-of-text token, which a model learns")
    eos_token: str | None = setting(
        default=None, help="Text of the end-of-text token; none: what belongs to the tokenizer says; of bytes, 0xff"
    )
    chat_date: str | None = setting(
        default=None, help="Date, as 2026-05-31, that a chat template may ask for; none: the day on which the run began"
    )
    max_target_length: int | None = setting(
        default=None,
        help="Sequence length in tokens; none: 256 for models of bytes, else 2048 or the most that the model has",
        at_least=2,
    )
    per_device_batch_size: int | None = setting(
        default=None,
        help="Sequences per device in a micro-batch; none: 16, or 4096 tokens where max_target_length is none too",
        may_change=True,
        at_least=1,
    )
    packing: bool = setting(default=True, help="Pack several documents into a row; false: one per row, padded")
    held_out: float = setting(
        default=0.05, help="Share of the data that is held out for evaluation", at_least=0, at_most=0.5
    )
    eval_paths: tuple[str, ...] = setting(
        default=(),
        help="More data to evaluate on, as NAME=PATH,NAME=PATH, read as dataset_path is; each name has a loss",
    )
    data_seed: int = setting(default=0, help="Seed of the train/held-out split and of the shuffling")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset in OF_FILES and not self.dataset_path:
            raise ValueError(
                f"dataset_type={self.dataset}: expected dataset_path with files or folders, got none; give at least one"
            )
        if self.dataset == "tokens" and len(self.dataset_path) != 1:
            raise ValueError(f"dataset_type=tokens: expected one folder, got {','.join(self.dataset_path)}")
        unread = None
        if self.dataset in WITHOUT_TOKENIZER and self.tokenizer_path is not None:
            unread = f"tokenizer_path={self.tokenizer_path}"
        elif self.dataset not in OF_FILES and self.dataset_path:
            unread = f"dataset_path={','.join(self.dataset_path)}"
        if unread is not None:
            raise ValueError(f"dataset_type={self.dataset} reads no {unread}; leave it out, or use dataset_type=text")
        if not all(suffix.startswith(".") for suffix in self.dataset_suffixes):
            raise ValueError(f"expected dataset_suffixes such as .txt, got {','.join(self.dataset_suffixes)}")
        self._check_eval_paths()
        if self.chat_date is not None:
            try:
                date.fromisoformat(self.chat_date)
            except ValueError:
                raise ValueError(f"chat_date={self.chat_date}: expected a date such as 2026-05-31") from None

    @property
    def dataset(self) -> str:
        """What the data are made of: the type that was asked for, or else Python's own sources."""
        return self.value_of("dataset_type")

    def _check_eval_paths(self) -> None:
        for entry in self.eval_paths:
            name, _, path = entry.partition("=")
            if not re.fullmatch(r"[\w.-]+", name) or name == HELD_OUT or not path:
                raise ValueError(
                    f"eval_paths={','.join(self.eval_paths)}: expected NAME=PATH, with a name of letters and digits "
                    f"other than {HELD_OUT}, got {entry!r}"
                )
        if self.eval_paths and self.dataset == "synthetic":
            raise ValueError(
                f"dataset_type=synthetic reads no eval_paths={','.join(self.eval_paths)}; leave it out, or use "
                "dataset_type=text"
            )

    @property
    def named_eval_paths(self) -> dict[str, tuple[str, ...]]:
        """The files or folders of each set to evaluate on, by its name."""
        paths: dict[str, tuple[str, ...]] = {}
        for name, _, path in (entry.partition("=") for entry in self.eval_paths):
            paths[name] = (*paths.get(name, ()), path)
        return paths

    @property
    def holds_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.held_out > 0 or bool(self.eval_paths)

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence; without a model to follow, the demo's."""
        return BYTE_LENGTH if self.max_target_length is None else self.max_target_length

    @property
    def sequences_per_device(self) -> int:
        """Sequences that a device holds at once."""
        return TOKENS_PER_DEVICE // BYTE_LENGTH if self.per_device_batch_size is None else self.per_device_batch_size


@section_class
class StepSettings(Section):
    """What a step adds up, beside the optimizer."""

    gradient_accumulation_steps: int = setting(
        default=1, help="Micro-batches per step, whose gradients are accumulated", at_least=1
    )
    mtp_loss_weight: float = setting(
        default=0.3, help="Weight of the multi-token-prediction loss; 0 does not train it", at_least=0
    )
    bias_update_rate: float | None = setting(
        default=None,
        otherwise=1e-3,
        help="Update rate of the selection bias, in models that have one; 0: never",
        at_least=0,
    )

    @property
    def selection_bias_rate(self) -> float:
        """What the selection bias of an expert moves by in a step."""
        return self.value_of("bias_update_rate")


@section_class
class OptimizerConfig(Section):
    """The settings of the optimizer, AdamW or Muon, and of its schedule."""

    opt_type: str = setting(
        default="adamw",
        help="Optimizer: adamw; muon trains matrices of the layers by Muon, and the rest by AdamW",
        choices=("adamw", "muon"),
    )
    learning_rate: float | None = setting(
        default=None,
        help="Peak learning rate; none: 3e-3, less for models wider than the demo, a tenth for loaded parameters",
        above=0,
    )
    schedule: str = setting(
        default="cosine", help="Learning-rate schedule after the warm-up", choices=("cosine", "wsd", "constant")
    )
    warmup_steps: int | None = setting(
        default=None, help="Steps of linear warm-up; none: set by warmup_fraction", at_least=0
    )
    warmup_fraction: float = setting(
        default=0.02, help="Warm-up as a share of the steps, if warmup_steps is none", at_least=0, at_most=1
    )
    warmup_from: str = setting(
        default="first",
        help="Learning rate of warm-up step i of n, counted from 0: first has (i + 1)/n of the peak, zero has i/n, so "
        "that the first step changes nothing",
        choices=("first", "zero"),
    )
    schedule_steps: int | None = setting(
        default=None, help="Steps that the schedule spans, then the rate is 0; none: all steps", at_least=1
    )
    decay_fraction: float = setting(
        default=0.2, help="Share of the steps over which schedule=wsd decays", at_least=0, at_most=1
    )
    decay_style: str = setting(
        default="linear", help="Shape of the decay of schedule=wsd", choices=("linear", "cosine")
    )
    final_fraction: float | None = setting(
        default=None, otherwise=0.1, help="Final learning rate as a share of the peak", at_least=0, at_most=1
    )
    adam_b1: float = setting(default=0.9, help="Adam's beta1, decay of the first moment", at_least=0, below=1)
    adam_b2: float = setting(default=0.95, help="Adam's beta2, decay of the second moment", at_least=0, below=1)
    adam_eps: float = setting(default=1e-8, help="Adam's epsilon, added outside the square root", above=0)
    adam_eps_root: float = setting(default=0.0, help="Adam's epsilon inside the square root", at_least=0)
    muon_beta: float = setting(default=0.95, help="Decay of Muon's momentum", at_least=0, below=1)
    muon_consistent_rms: float | None = setting(
        default=0.2,
        help="Root mean square of Muon's updates before the learning rate, 0.2 being about AdamW's; none: each "
        "singular value is about one, or the root of outputs/inputs where there are more outputs",
        above=0,
    )
    muon_weight_decay: float | None = setting(
        default=None, help="Weight decay of the parameters that Muon trains; none: weight_decay", at_least=0
    )
    weight_decay: float = setting(default=0.1, help="Weight decay", at_least=0)
    weight_decay_of: str = setting(
        default="matrices", help="Parameters that decay: matrices, or all", choices=("matrices", "all")
    )
    grad_dtype: str = setting(
        default="float32", help="Type that gradients are rounded to before clipping", choices=TYPES
    )
    mu_dtype: str = setting(
        default="float32",
        help="Type of Adam's first moment and of Muon's momentum; Adam's second is float32",
        choices=TYPES,
    )
    gradient_clipping_threshold: float = setting(
        default=1.0, help="Largest global norm of the gradients; 0: no clipping", at_least=0
    )

    def for_run(self, steps: int) -> "OptimizerConfig":
        """Return the configuration for a run of so many steps, which the schedule spans if it is not told otherwise."""
        made = replace(self, schedule_steps=steps) if self.schedule_steps is None else self
        made.check_fits(made.num_steps, f"{'schedule_' if made is self else ''}steps={made.num_steps}")
        return made

    def check_fits(self, steps: int, of: str, shown: Callable[[str], str] | None = None) -> None:
        """Refuse a warm-up and a decay that are longer than so many steps of a schedule, which ``of`` calls them.

        ``shown`` is how the user wrote a setting, if it was not in Python.
        """
        shown = shown or (lambda name: f"{name}={getattr(self, name)}")
        warmup, decay = self._warmup_steps_of(steps), int(self.decay_fraction * steps)
        asked = shown("warmup_steps")
        if self.warmup_steps is None:
            asked = f"{shown('warmup_fraction')} ({warmup} steps)"
        if warmup > steps:
            raise ValueError(
                f"{asked} is more than {of}: the learning rate would never reach its peak; use fewer warm-up steps or "
                "more steps"
            )
        if self.schedule == "wsd" and warmup + decay > steps:
            raise ValueError(
                f"{asked} and {shown('decay_fraction')} ({decay} steps) together are more than {of}; use less of either"
            )

    def _warmup_steps_of(self, steps: int) -> int:
        return int(self.warmup_fraction * steps) if self.warmup_steps is None else self.warmup_steps

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after the warm-up; without a model to follow, the demo's."""
        return PEAK_LEARNING_RATE if self.learning_rate is None else self.learning_rate

    @property
    def final_share(self) -> float:
        """The final learning rate as a share of the peak."""
        return self.value_of("final_fraction")

    @property
    def num_steps(self) -> int:
        """Steps that the schedule spans."""
        if self.schedule_steps is None:
            raise ValueError("expected schedule_steps, got None: the schedule's length; `for_run` fills it in")
        return self.schedule_steps

    @property
    def num_warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        return self._warmup_steps_of(self.num_steps)

    @property
    def decay_steps(self) -> int:
        """Steps over which "wsd" decays."""
        return int(self.decay_fraction * self.num_steps)


SHORT_RUN = 20  # steps of a run that prints every one


@section_class
class RunConfig(Section):
    """A run's length, folder and seed, and what is done how often beside its steps."""

    steps: int | None = setting(
        default=None,
        otherwise=1000,
        help="Number of training steps, which the schedule spans by default",
        may_change=True,
        at_least=1,
    )
    seed: int = setting(
        default=0, help="Seed of the initial parameters and of all randomness in a step", at_least=0, below=2**32
    )
    load_parameters_path: str | None = setting(
        default=None, help="Checkpoint to start from: a Hugging Face folder or one of ours; alone, it is the model too"
    )
    from_scratch: bool = setting(
        default=False, help="Of a model's folder take architecture and tokenizer, and begin with new parameters"
    )
    base_output_directory: str = setting(default="out", help="Folder in which runs are written", may_change=True)
    run_name: str | None = setting(
        default=None, help="Name of the run and of its folder; none: the model's name", may_change=True
    )
    init_from: str | None = setting(
        default=None, help="Another run to begin with: RUN for its newest checkpoint, or RUN@STEP; see init_state"
    )
    init_state: str = setting(
        default="weights",
        help="What to take of init_from: weights (a new run, from step 0), or all, the optimizer's state too (the run "
        "goes on at that step of the schedule, and where it was in the data if they and the batch are the same)",
        choices=("weights", "all"),
    )
    line_period: int | None = setting(
        default=None,
        help="Steps between printed lines, not on a terminal; none: 10, or 1 in a run of 20 steps or fewer",
        may_change=True,
        at_least=1,
    )
    load_period: int = setting(
        default=10, help="Steps between lines of load.jsonl, the load of every expert", may_change=True, at_least=1
    )
    eval_interval: int | None = setting(
        default=None,
        otherwise=100,
        help="Steps between evaluations; 0: at the start and the end only",
        may_change=True,
        at_least=0,
    )
    eval_steps: int | None = setting(
        default=None, otherwise=16, help="Batches per evaluation", may_change=True, at_least=1
    )
    sample_tokens: int | None = setting(
        default=None,
        otherwise=0,
        help="Tokens of the text that the model writes at each evaluation, for the log and the report; 0: no text",
        may_change=True,
        at_least=0,
    )
    sample_prompt: str | None = setting(
        default=None,
        help="What that text continues; none: the beginning of the first row that is held out",
        may_change=True,
    )
    max_skipped_steps: int = setting(
        default=10,
        help="Steps in a row whose loss or gradient is not finite, each skipped, after which the run stops",
        may_change=True,
        at_least=1,
    )
    tensorboard: bool = setting(default=True, help="Write TensorBoard events as well", may_change=True)
    profiler: str = setting(
        default="none", help="xplane records a trace for xprof", choices=("none", "xplane"), may_change=True
    )
    profiler_steps: int = setting(default=3, help="Number of steps in the trace", may_change=True, at_least=1)
    skip_first_n_steps_for_profiler: int = setting(
        default=1, help="Number of steps before the trace", may_change=True, at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_from is not None and self.load_parameters_path is not None:
            raise ValueError(
                f"init_from={self.init_from} and load_parameters_path={self.load_parameters_path} contradict each "
                "other: both say what the run begins with; leave one out"
            )
        if self.traces and self.steps is not None and self.steps <= self.skip_first_n_steps_for_profiler:
            raise ValueError(
                f"steps={self.steps} leaves nothing to trace after skip_first_n_steps_for_profiler="
                f"{self.skip_first_n_steps_for_profiler}; use more steps or skip fewer"
            )

    @property
    def traces(self) -> bool:
        """Whether a trace is recorded."""
        return self.profiler != "none"

    @property
    def num_steps(self) -> int:
        """Training steps."""
        return self.value_of("steps")

    @property
    def steps_between_lines(self) -> int:
        """Steps between printed lines."""
        return self.line_period or (1 if self.num_steps <= SHORT_RUN else 10)

    @property
    def steps_between_evaluations(self) -> int:
        """Steps between evaluations; 0: at the start and the end only."""
        return self.value_of("eval_interval")

    @property
    def batches_per_evaluation(self) -> int:
        """Batches that are held out for an evaluation."""
        return self.value_of("eval_steps")

    @property
    def num_sample_tokens(self) -> int:
        """Tokens that the model writes at an evaluation."""
        return self.value_of("sample_tokens")


@section_class
class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    enable_checkpointing: bool = setting(
        default=True, help="Write checkpoints, and resume from the newest", may_change=True
    )
    checkpoint_period: int | None = setting(
        default=None, otherwise=100, help="Steps between checkpoints", may_change=True, at_least=1
    )
    keep_last: int = setting(default=2, help="Number of newest checkpoints to keep", may_change=True, at_least=1)
    keep_best: bool = setting(
        default=True, help="Also keep the checkpoint with the lowest held-out loss", may_change=True
    )
    async_checkpointing: bool = setting(
        default=True, help="Write checkpoints while training continues", may_change=True
    )

    @property
    def steps_between_checkpoints(self) -> int:
        """Steps between checkpoints."""
        return self.value_of("checkpoint_period")


# What a model brings along for settings whose default is None. The demo takes about two minutes on two cores, in which
# a bias that moves by the published 0.001 a step would not balance the experts; small batches learn most in that time
# (docs/log.md).
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "demo": {
        "steps": 1200,
        "per_device_batch_size": 4,
        "final_fraction": 0.02,
        "bias_update_rate": 0.01,
        "eval_interval": 300,
        "eval_steps": 32,
        "sample_tokens": 64,
        "checkpoint_period": 300,
        "scan_layers": False,
    }
}
