"""What an MoE layer is: small frozen configurations, checked when they are made. A checkpoint holds them."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from raggedmoe.kernels.expert_ffn.api import check_activation
from raggedmoe.kernels.registry import quantizes_why_not
from raggedmoe.lora import LoraConfig, with_adapters
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.names import check_words, refuse_conflicts, refuse_keywords_of
from raggedmoe.params import ParamSpec, check_divides, check_sizes

EXPERT_MATRICES = ("wi_0", "wi_1", "wo")
SHARED_MATRICES = ("shared_wi_0", "shared_wi_1", "shared_wo")
Selection = Literal["learned", "random", "hash", "balanced", "expert_choice"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """score → (bias) → (group limit) → top-k → normalise → scale.

    Mixtral, Qwen3: the defaults. OLMoE: ``normalize="none"``. gpt-oss (top-k, then softmax): ``score="logits",
    normalize="softmax", logit_bias=True``. DeepSeek V3: ``score="sigmoid", selection_bias=True, num_groups=8,
    groups_per_token=4, scale=2.5``. DeepSeek V2: ``normalize="none", group_score="max"``. Llama 4:
    ``score="sigmoid", normalize="none", weigh="input"``.
    """

    # The function from logits to the scores that rank experts and become weights.
    score: Literal["softmax", "sigmoid", "sqrt_softplus", "logits"] = "softmax"
    # Who picks the experts: the scores ("learned"), chance ("random"), the token's id ("hash"), a round robin over the
    # tokens ("balanced"), or each expert its tokens ("expert_choice").
    selection: Selection = "learned"
    # What becomes of a token's K chosen scores: they stay ("none"), are divided by their "sum", or go through a
    # "softmax". Expert choice does not read it.
    normalize: Literal["none", "sum", "softmax"] = "sum"
    normalize_epsilon: float = 1e-20  # A number that is added to the sum that normalize="sum" divides by.
    scale: float = 1.0  # A factor that all weights are multiplied by, last.
    weigh: Literal["output", "input"] = "output"  # What the weights multiply: the expert's "output" or its "input".
    logit_bias: bool = False  # Whether the logits have a trained bias.
    selection_bias: bool = False  # Whether the scores have a bias that decides who is chosen and enters no weight.
    expert_scale: bool = False  # Whether each expert's weights have a trained factor.
    num_groups: int = 1  # The number of equal groups that the experts are in; 1 is no group limit.
    groups_per_token: int = 1  # The number of groups that a token's experts may come from.
    # What ranks a token's groups: the sum of their two best scores, or their "max".
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    jitter: float = 0.0  # The router's input is multiplied by uniform noise in 1 ± jitter, where a key is given.
    # What the balance loss is taken over: the whole "batch", or each "sequence".
    aux_loss: Literal["batch", "sequence"] = "batch"
    # What the balance loss takes for probabilities: scores over their sum ("normalized"), or a "softmax" of the scores
    # that rank experts, the selection bias included.
    aux_loss_probabilities: Literal["normalized", "softmax"] = "normalized"
    aux_loss_weight: float = 0.0  # The factor of the balance loss in what the layer returns; 0 leaves it out.
    z_loss_weight: float = 0.0  # The factor of the router's z-loss in what the layer returns; 0 leaves it out.

    def __post_init__(self) -> None:
        check_sizes(self, "num_groups", "groups_per_token")
        check_words(self)
        for name, limit in (("aux_loss_weight", math.inf), ("z_loss_weight", math.inf), ("jitter", 1)):
            if not 0 <= getattr(self, name) < limit:
                raise ValueError(f"expected 0 <= {name} < {limit}, got {getattr(self, name)}")
        learned, by_expert = self.selection == "learned", self.selection == "expert_choice"
        sums_logits = self.score == "logits" and self.normalize == "sum"
        conflicts = (
            (self.groups_per_token > self.num_groups, "groups_per_token", "num_groups", "there are not so many"),
            (sums_logits, "score", "normalize", "logits may be negative, and their sum zero, but not a 'softmax'"),
            (not learned and self.num_groups > 1, "selection", "num_groups", "it reads no group limit"),
            (not learned and self.selection_bias, "selection", "selection_bias", "it reads no selection bias"),
            (by_expert and self.aux_loss_weight, "selection", "aux_loss_weight", "it is balanced by construction"),
        )
        refuse_conflicts(vars(self), conflicts)


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """What one expert computes, and what all tokens share."""

    activation: str = "silu"
    gated: bool = True
    biases: bool = False
    num_shared: int = 0  # experts that see every token, as one MLP of num_shared times the width
    shared_gate: bool = False  # their sum times a sigmoid of the token

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if self.num_shared < 0:
            raise ValueError(f"expected num_shared >= 0, got {self.num_shared}")
        if self.shared_gate and not self.num_shared:
            raise ValueError("shared_gate=True needs num_shared >= 1, got 0")


@refuse_keywords_of(MoEExecution, "MoE(config, execution=MoEExecution({keywords}))")
@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """What one MoE layer is. `MoEExecution` is how it runs."""

    num_experts: int  # E
    experts_per_token: int  # K; with expert-choice routing, the average
    model_dim: int  # D
    expert_dim: int  # F
    router: RouterConfig = field(default_factory=RouterConfig)
    experts: ExpertConfig = field(default_factory=ExpertConfig)
    # The slots of each expert in a sequence, over an even share; a token beyond them is dropped and counted. None drops
    # no token. Expert choice needs it: an expert takes as many tokens as it has slots.
    capacity_factor: float | None = None
    param_dtype: DTypeLike = jnp.float32  # The type that weights are stored in; the router's are always float32.
    lora: LoraConfig | None = None  # Adapters, which then learn alone; None: the weights themselves learn.

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", "experts_per_token", "model_dim", "expert_dim")
        router, factor, per_token = self.router, self.capacity_factor, self.experts_per_token
        by_expert = router.selection == "expert_choice"
        if factor is not None and factor <= 0:
            raise ValueError(f"expected capacity_factor > 0, got {factor}")
        check_divides("num_experts", self.num_experts, "num_groups", router.num_groups)
        size = self.num_experts // router.num_groups
        lone = router.num_groups > 1 and router.group_score == "top2_sum" and size < 2
        too_few = router.groups_per_token * size < per_token
        conflicts = (
            (per_token > self.num_experts, "experts_per_token", "num_experts", "a token uses an expert at most once"),
            (by_expert and factor is None, "selection", "capacity_factor", "1.0 gives each an even share"),
            (lone, "group_score", "num_groups", "there are no two experts in a group"),
            (too_few, "groups_per_token", "experts_per_token", f"groups of {size} hold too few experts"),
        )
        refuse_conflicts({**vars(self), **vars(router)}, conflicts)

    def capacity(self, length: int) -> int:
        """Return C, the slots of each expert in a sequence of so many tokens, or with expert choice in all of them.

        It is an even share of the slots, ``ceil(S·K/E)``, times the factor, rounded down; never more than one for each
        token, as a token uses an expert once. With expert choice the share is not rounded, and the product up.
        """
        factor, per_token = self.capacity_factor, self.experts_per_token
        assert factor is not None
        if self.router.selection == "expert_choice":
            return min(max(math.ceil(factor * length * per_token / self.num_experts), 1), length)
        share = max(math.ceil(length * per_token / self.num_experts), 1)
        slots = int(share * factor)
        reason = f"of an even share of {share} slots none is left, rounded down; at least 1/{share} leaves one"
        refuse_conflicts(vars(self), [(slots < 1, "capacity_factor", f"sequences of {length} tokens", reason)])
        return min(slots, length)

    def param_specs(self) -> dict[str, ParamSpec]:
        """Declare every parameter of the layer, by name."""
        router, experts, float32 = self.router, self.experts, jnp.float32
        gated, biases, shared = experts.gated, experts.biases, bool(experts.num_shared)
        sizes = {"expert": self.num_experts, "expert_dim": self.expert_dim, "model_dim": self.model_dim}
        sizes["shared_dim"] = experts.num_shared * self.expert_dim

        def spec(*axes: str, dtype: DTypeLike = self.param_dtype, **how: Any) -> ParamSpec:
            return ParamSpec(shape=tuple(sizes[axis] for axis in axes), dtype=dtype, axes=axes, **how)

        weight, shared_weight = ("expert", "expert_dim", "model_dim"), ("shared_dim", "model_dim")
        specs: dict[str, ParamSpec | bool] = {
            "router_kernel": spec("expert", "model_dim", dtype=float32, contracts="model_dim"),
            "router_logit_bias": router.logit_bias and spec("expert", dtype=float32, init="zeros"),
            "router_selection_bias": router.selection_bias
            and spec("expert", dtype=float32, init="zeros", updated_by="load"),
            "router_expert_scale": router.expert_scale and spec("expert", dtype=float32, init="ones"),
            "wi_0": spec(*weight, contracts="model_dim"),
            "wi_1": gated and spec(*weight, contracts="model_dim"),
            "wo": spec(*weight, contracts="expert_dim"),
            "bias_wi_0": biases and spec("expert", "expert_dim", init="zeros"),
            "bias_wi_1": biases and gated and spec("expert", "expert_dim", init="zeros"),
            "bias_wo": biases and spec("expert", "model_dim", init="zeros"),
            "shared_wi_0": shared and spec(*shared_weight, contracts="model_dim"),
            "shared_wi_1": shared and gated and spec(*shared_weight, contracts="model_dim"),
            "shared_wo": shared and spec(*shared_weight, contracts="shared_dim"),
            "shared_gate": experts.shared_gate and spec("model_dim", contracts="model_dim"),
        }
        declared = {name: entry for name, entry in specs.items() if isinstance(entry, ParamSpec)}
        return with_adapters(declared, self.lora, "moe.")


def strategy_name(config: MoEConfig, execution: MoEExecution) -> str:
    """Name the strategy of a layer: "capacity" where its experts have fixed slots, else what the execution says."""
    return "capacity" if config.capacity_factor is not None else execution.strategy or execution.backend.strategy


def check_execution(config: MoEConfig, execution: MoEExecution, quantized: Collection[str] = ()) -> None:
    """Require that a layer of this configuration can run so, where these of its parameters are quantised."""
    if not isinstance(execution, MoEExecution):
        raise TypeError(f"expected execution to be a MoEExecution, got {type(execution).__name__}")
    backend, quantization, strategy = execution.backend, execution.quantization, strategy_name(config, execution)
    fused, batched, chunked = backend.fused, strategy in ("capacity", "dense"), execution.width_chunks > 1
    by_expert = config.router.selection == "expert_choice"
    slots, experts = config.capacity_factor is not None, [name for name in EXPERT_MATRICES if name in quantized]
    rounded, operands = experts or quantization, f"quantised {', '.join(experts)}" if experts else "quantization"
    why_not = quantization and quantizes_why_not("grouped_matmul", execution.kernel_choice.grouped_matmul)
    kernels = vars(execution.kernel_choice)
    named = {name for name, choice in kernels.items() if choice != "auto"}
    unread = f"with moe_backend={execution.moe_backend!r} it would never be read"
    moves_rows = slots and execution.strategy not in (None, "capacity")
    conflicts = (
        (strategy == "capacity" and not slots, "strategy", "capacity_factor", "1.0 gives experts an even share"),
        (moves_rows, "capacity_factor", "strategy", "it gives the experts fixed slots, which is strategy='capacity'"),
        (slots and backend.strategy == "dense", "capacity_factor", "moe_backend", "it gives the experts fixed slots"),
        (slots and execution.token_chunks > 1, "capacity_factor", "token_chunks", "it is of slots in whole sequences"),
        ("expert_ffn" in named and not fused, "expert_ffn", "strategy", f"{unread}, but with 'expert_ffn'"),
        ("grouped_matmul" in named and (fused or batched), "grouped_matmul", "strategy", unread),
        ("ragged_gather" in named and strategy == "dense", "ragged_gather", "strategy", unread),
        ("ragged_gather_reduce" in named and strategy == "dense", "ragged_gather_reduce", "strategy", unread),
        ("ragged_gather_reduce" in named and by_expert, "ragged_gather_reduce", "expert choice", unread),
        (fused and config.lora, "lora", "moe_backend", "it fuses the matmuls, between which LoRA adds its own"),
        (fused and quantization, "quantization", "moe_backend", "its fused kernel rounds nothing between its matmuls"),
        (why_not, "quantization", "moe_backend", f"its kernels of grouped_matmul: {why_not}"),
        (experts and quantization, operands, "quantization", "it quantises arrays"),
        (batched and rounded, operands, "strategy", "it is one batched matmul of all experts"),
        (chunked and rounded, operands, "width_chunks", "what shares a scale would be cut"),
    )
    settings = {**vars(config), **vars(execution), **kernels, "strategy": execution.strategy or strategy}
    refuse_conflicts(settings, conflicts)
    if others := sorted(set(quantized) - {*EXPERT_MATRICES, *SHARED_MATRICES}):
        raise ValueError(f"expected arrays as {', '.join(others)}, got quantised ones; dequantise them")
    for name in ("model_dim", "expert_dim"):
        check_divides(name, getattr(config, name), "quantization_block", (quantization and quantization.block) or 1)
    check_divides("model_dim", config.model_dim, "width_chunks", execution.width_chunks)
