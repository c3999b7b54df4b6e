"""The settings of a run, in sections: name, type, default, limits and help of each are said once, in its field.

Those of the model, of how it runs, of the mesh and of a step are here, the others in a file for each kind of section.

A setting that MaxText has too has its name there; `raggedmoe.interop.maxtext` translates MaxText's other settings.
"""

from dataclasses import replace
from typing import Any, get_args

from raggedmoe.kernels.qarray import LHS_FORMATS
from raggedmoe.kernels.quant_config import QUANTIZATIONS, QuantConfig
from raggedmoe.kernels.registry import BACKWARD, FORWARD, Choice, Directions, Ordered
from raggedmoe.lora import GROUPS, ROUTERS
from raggedmoe.models.execution import SAVED_NAMES
from raggedmoe.moe.config import Selection
from raggedmoe.moe.execution import BACKENDS, OLDER_BACKENDS
from raggedmoe.sharding.axes import SPLITS
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.settings.data_section import (
    BYTE_LENGTH,
    BYTES,
    HELD_OUT,
    OF_CONVERSATIONS,
    OF_FILES,
    TOKENS_PER_DEVICE,
    WITHOUT_TOKENIZER,
    DataConfig,
)
from raggedmoe.train.settings.fields import TYPES, Section, section_class, setting
from raggedmoe.train.settings.optimizer_section import PEAK_LEARNING_RATE, OptimizerConfig
from raggedmoe.train.settings.run_sections import RECIPES, SHORT_RUN, CheckpointConfig, RunConfig

# All sections are imported from here, whichever file they stand in.
__all__ = [
    "BYTES",
    "BYTE_LENGTH",
    "HELD_OUT",
    "LEFT",
    "OF_CONVERSATIONS",
    "OF_FILES",
    "PEAK_LEARNING_RATE",
    "RECIPES",
    "SHORT_RUN",
    "TOKENS_PER_DEVICE",
    "TYPES",
    "WITHOUT_TOKENIZER",
    "CheckpointConfig",
    "DataConfig",
    "ExecutionSettings",
    "MeshSettings",
    "ModelOverrides",
    "OptimizerConfig",
    "RunConfig",
    "StepSettings",
]

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
        default=None, help="How experts are selected; none: as the model has", choices=get_args(Selection)
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
    keep_quantised: bool | None = setting(
        default=None,
        help="Leave the frozen matrices beside adapters in the fp8, int8 or mxfp4 that their folder has; false: "
        "dequantise them; none: leave them where that can be",
        may_change=True,
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
        object.__setattr__(self, "moe_backend", OLDER_BACKENDS.get(self.moe_backend, self.moe_backend))
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
