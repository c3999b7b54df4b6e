"""What an MoE layer is: small frozen configurations, checked when they are made."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from raggedmoe.kernels.expert_ffn.api import check_activation
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.moe.backends import Backend, backend_named
from raggedmoe.names import unknown
from raggedmoe.params import LARGEST_SIZE, ParamSpec, divisors
from raggedmoe.partition import SPLITS

SCORES = ("softmax", "sigmoid", "sqrt_softplus", "logits")
SELECTIONS = ("learned", "random", "hash", "balanced", "expert_choice")
NORMALIZATIONS = ("none", "sum", "softmax")
STRATEGIES = ("local", "capacity", "dense", "ring", "all_to_all")
ACROSS_RANKS = ("ring", "all_to_all")  # strategies that are for experts on several devices
TAKES_RANKS = (*ACROSS_RANKS, "dense", "capacity")  # and those that can have them there


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise unknown(what, value, known)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """score → (bias) → (group limit) → top-k → normalise → scale.

    Mixtral, Qwen3: the defaults. OLMoE: ``normalize="none"``. gpt-oss (top-k, then softmax): ``score="logits",
    normalize="softmax", logit_bias=True``. DeepSeek V3: ``score="sigmoid", selection_bias=True, num_groups=8,
    groups_per_token=4, scale=2.5``. DeepSeek V2: ``normalize="none", group_score="max"``. Llama 4:
    ``score="sigmoid", normalize="none", weigh="input"``.
    """

    score: str = "softmax"  # The function from logits to the scores that rank experts and become weights.
    # Who picks the experts: the scores ("learned"), chance ("random"), the token's id ("hash"), a round robin over the
    # tokens ("balanced"), or each expert its tokens ("expert_choice").
    selection: str = "learned"
    # What becomes of a token's K chosen scores: they stay ("none"), are divided by their "sum", or go through a
    # "softmax". Expert choice does not read it.
    normalize: str = "sum"
    normalize_epsilon: float = 1e-20  # A number that is added to the sum that normalize="sum" divides by.
    scale: float = 1.0  # A factor that all weights are multiplied by, last.
    weigh: str = "output"  # What the weights multiply: the expert's "output" or its "input".
    logit_bias: bool = False  # Whether the logits have a trained bias.
    selection_bias: bool = (
        False  # Whether the scores have a bias that decides who is chosen and never enters the weights.
    )
    expert_scale: bool = False  # Whether each expert's weights have a trained factor.
    num_groups: int = 1  # The number of equal groups that the experts are in; 1 is no group limit.
    groups_per_token: int = 1  # The number of groups that a token's experts may come from.
    group_score: str = "top2_sum"  # What ranks a token's groups: the sum of their two best scores, or their "max".
    jitter: float = 0.0  # The router's input is multiplied by uniform noise in 1 ± jitter, where a key is given.
    aux_loss: str = "batch"  # What the balance loss is taken over: the whole "batch", or each "sequence".
    # What the balance loss takes for probabilities: scores over their sum ("normalized"), or a "softmax" of the scores
    # that rank experts, the selection bias included.
    aux_loss_probabilities: str = "normalized"
    aux_loss_weight: float = 0.0  # The factor of the balance loss in what the layer returns; 0 leaves it out.
    z_loss_weight: float = 0.0  # The factor of the router's z-loss in what the layer returns; 0 leaves it out.

    def __post_init__(self) -> None:
        _one_of("score", self.score, SCORES)
        _one_of("selection", self.selection, SELECTIONS)
        _one_of("normalize", self.normalize, NORMALIZATIONS)
        _one_of("weigh", self.weigh, ("output", "input"))
        _one_of("group_score", self.group_score, ("top2_sum", "max"))
        _one_of("aux_loss", self.aux_loss, ("batch", "sequence"))
        _one_of("aux_loss_probabilities", self.aux_loss_probabilities, ("normalized", "softmax"))
        if self.score == "logits" and self.normalize == "sum":
            raise ValueError(
                "score='logits' may be negative, so normalize='sum' can divide by zero; use normalize='softmax'"
            )
        for name in ("aux_loss_weight", "z_loss_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"expected 0 <= jitter < 1, got {self.jitter}")
        if not 1 <= self.groups_per_token <= self.num_groups:
            raise ValueError(
                f"expected 1 <= groups_per_token <= num_groups, got {self.groups_per_token} and {self.num_groups}"
            )
        if self.selection != "learned" and (self.num_groups > 1 or self.selection_bias):
            raise ValueError(
                f"selection={self.selection!r} reads no group limit and no selection bias; leave num_groups and "
                "selection_bias out, or use selection='learned'"
            )
        if self.selection == "expert_choice" and self.aux_loss_weight:
            raise ValueError("selection='expert_choice' is balanced by construction; leave aux_loss_weight out")


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


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer."""

    num_experts: int  # E
    experts_per_token: int  # K; with expert-choice routing, the average
    model_dim: int  # D
    expert_dim: int  # F
    router: RouterConfig = field(default_factory=RouterConfig)
    experts: ExpertConfig = field(default_factory=ExpertConfig)
    moe_backend: str = "auto"  # a named pair of strategy and kernels
    strategy: str | None = None  # how rows reach their experts; None: the backend's
    kernels: KernelChoice | None = None  # of operations that the backend does not name
    capacity_factor: float | None = None  # strategy "capacity": an expert's slots in a sequence, over an even share
    ragged_buffer_factor: float | None = None  # receive buffer, as a multiple of T·K rows; None: never too small
    token_chunks: int = 1  # the tokens in this many parts, so that moving one overlaps with computing another
    width_chunks: int = 1  # the model width in this many parts, so that moving one overlaps with multiplying another
    tensor_split: str = "expert_dim"  # what the tensor axis of a mesh splits of the experts: F, or D ("model_dim")
    hardware: str | None = None  # the chip to choose kernels for; None: that of the mesh or the arrays
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "model_dim", "expert_dim", "token_chunks", "width_chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"expected {name} to be a positive integer, got {value!r}")
            if value > LARGEST_SIZE:
                raise ValueError(f"expected {name} to be at most {LARGEST_SIZE}, got {value}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than num_experts={self.num_experts}; "
                f"a token uses an expert at most once: use at most {self.num_experts}"
            )
        _one_of("tensor_split", self.tensor_split, SPLITS)
        self._check_groups()
        self._check_strategy()
        self._check_chunks()

    def _check_groups(self) -> None:
        router, experts = self.router, self.num_experts
        if experts % router.num_groups:
            fitting = [n for n in divisors(experts) if n <= 2 * router.num_groups]
            padded = math.ceil(experts / router.num_groups) * router.num_groups
            raise ValueError(
                f"num_experts={experts} is not divisible by num_groups={router.num_groups}; "
                f"use num_groups in {fitting}, or pad with num_experts={padded}"
            )
        size = experts // router.num_groups
        if router.num_groups > 1 and router.group_score == "top2_sum" and size < 2:
            raise ValueError("group_score='top2_sum' needs two experts in a group, got 1; use 'max' or fewer groups")
        if router.groups_per_token * size < self.experts_per_token:
            raise ValueError(
                f"groups_per_token={router.groups_per_token} groups of {size} hold fewer experts than "
                f"experts_per_token={self.experts_per_token}; use more groups per token"
            )

    def _check_strategy(self) -> None:
        backend = backend_named(self.moe_backend)
        for operation, choice in vars(self.kernels or KernelChoice()).items():
            named = getattr(backend.kernels, operation)
            if "auto" not in (choice, named) and choice != named:
                raise ValueError(
                    f"moe_backend={self.moe_backend!r} already names {named!r} for {operation}, got {choice!r}; give "
                    "either, the other operations' kernels are free"
                )
        if backend.strategy == "dense" and self.strategy not in (None, "dense"):
            raise ValueError(
                f"moe_backend={self.moe_backend!r} computes every expert on every token and moves no rows; "
                f"it cannot be used with strategy={self.strategy!r}: leave strategy out, or use another backend"
            )
        strategy = self.strategy_name
        _one_of("strategy", strategy, STRATEGIES)
        if (self.capacity_factor is not None) != (strategy == "capacity"):
            raise ValueError(
                f"capacity_factor belongs to strategy='capacity' alone, got {self.capacity_factor} with {strategy!r}"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"expected capacity_factor > 0, got {self.capacity_factor}")
        if self.router.selection == "expert_choice" and strategy != "capacity":
            raise ValueError(
                f"selection='expert_choice' has no fixed K and needs strategy='capacity', got {strategy!r}"
            )
        if self.ragged_buffer_factor is not None:
            if strategy not in ACROSS_RANKS:
                raise ValueError(
                    f"ragged_buffer_factor belongs to strategies {' and '.join(ACROSS_RANKS)}, got "
                    f"{self.ragged_buffer_factor} with {strategy!r}; leave it out"
                )
            if not 0 < self.ragged_buffer_factor < math.inf:
                raise ValueError(f"expected ragged_buffer_factor > 0, or None, got {self.ragged_buffer_factor}")
        for operation, reason in self._unread(backend, strategy).items():
            if getattr(self.kernel_choice, operation) != "auto":
                raise ValueError(
                    f"the kernel choice for {operation} would never be read with moe_backend={self.moe_backend!r} and "
                    f"strategy={strategy!r}: {reason}; leave it out"
                )

    def _check_chunks(self) -> None:
        fused = f"moe_backend={self.moe_backend!r} fuses the activation, which needs the sums over the whole width"
        if self.backend.fused and self.width_chunks > 1:
            raise ValueError(
                f"{fused}; it cannot be used with width_chunks={self.width_chunks}: use width_chunks=1 or another "
                "backend"
            )
        if self.backend.fused and self.tensor_split == "model_dim":
            raise ValueError(f"{fused}; it cannot be used with tensor_split='model_dim': use 'expert_dim'")
        if self.model_dim % self.width_chunks:
            raise ValueError(f"model_dim={self.model_dim} is not divisible by width_chunks={self.width_chunks}")
        if self.token_chunks > 1 and self.strategy_name == "capacity":
            raise ValueError(
                f"strategy='capacity' gives each expert slots in whole sequences; it cannot be used with "
                f"token_chunks={self.token_chunks}: use token_chunks=1 or another strategy"
            )

    def _unread(self, backend: Backend, strategy: str) -> dict[str, str]:
        """The operations that this layer never calls, and why."""
        unread = {}
        if backend.fused:
            unread["grouped_matmul"] = "the experts are one expert_ffn"
        else:
            unread["expert_ffn"] = "the experts are split into matmuls; moe_backend='expert_ffn' fuses them"
            if strategy in ("capacity", "dense"):
                unread["grouped_matmul"] = "all experts have as many rows, which is one batched matmul"
        if strategy == "dense":
            unread["ragged_gather"] = unread["ragged_gather_reduce"] = "no rows are moved"
        elif self.router.selection == "expert_choice":
            unread["ragged_gather_reduce"] = "expert choice combines by a scatter-add"
        return unread

    @property
    def backend(self) -> Backend:
        return backend_named(self.moe_backend)

    @property
    def strategy_name(self) -> str:
        return self.strategy or self.backend.strategy

    @property
    def kernel_choice(self) -> KernelChoice:
        """The backend's kernels, and the given ones for the operations that it leaves free."""
        named = {name: choice for name, choice in vars(self.backend.kernels).items() if choice != "auto"}
        return replace(self.kernels or KernelChoice(), **named)

    def sequence_capacity(self, length: int) -> int:
        """Slots that each expert has in a sequence of so many tokens under strategy "capacity", C.

        An even share of the sequence's slots, ``ceil(S·K/E)``, times the factor, rounded down; never more than one for
        each token, as a token uses an expert once.
        """
        assert self.capacity_factor is not None
        share = max(math.ceil(length * self.experts_per_token / self.num_experts), 1)
        slots = int(share * self.capacity_factor)
        if slots < 1:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} leaves the experts no slot in a sequence of {length} tokens: "
                f"an even share is {share}, and {share} · {self.capacity_factor} is rounded down to 0; use at least "
                f"1/{share}, or longer sequences"
            )
        return min(slots, length)

    def expert_choice_capacity(self, num_tokens: int) -> int:
        """Tokens that each expert takes of so many with expert-choice routing, C."""
        share = (self.capacity_factor or 1.0) * num_tokens * self.experts_per_token / self.num_experts
        return min(max(math.ceil(share), 1), num_tokens)

    def param_specs(self) -> dict[str, ParamSpec]:
        """Every parameter of the layer, by name."""
        num, width, hidden, dtype = self.num_experts, self.model_dim, self.expert_dim, self.param_dtype

        def weight(contracts: str) -> ParamSpec:
            axes = ("expert", "expert_dim", "model_dim")
            return ParamSpec(shape=(num, hidden, width), dtype=dtype, axes=axes, contracts=contracts)

        def per_expert(init: str) -> ParamSpec:
            return ParamSpec(shape=(num,), dtype=jnp.float32, axes=("expert",), init=init)

        def bias(size: int, axis: str) -> ParamSpec:
            return ParamSpec(shape=(num, size), dtype=dtype, axes=("expert", axis), init="zeros")

        def shared(contracts: str) -> ParamSpec:
            shape = (self.experts.num_shared * hidden, width)
            return ParamSpec(shape=shape, dtype=dtype, axes=("shared_dim", "model_dim"), contracts=contracts)

        gated, router = self.experts.gated, self.router
        specs: dict[str, ParamSpec | None] = {
            "router_kernel": ParamSpec(
                shape=(num, width), dtype=jnp.float32, axes=("expert", "model_dim"), contracts="model_dim"
            ),
            "router_logit_bias": per_expert("zeros") if router.logit_bias else None,
            "router_selection_bias": per_expert("zeros") if router.selection_bias else None,
            "router_expert_scale": per_expert("ones") if router.expert_scale else None,
            "wi_0": weight("model_dim"),
            "wi_1": weight("model_dim") if gated else None,
            "wo": weight("expert_dim"),
            "bias_wi_0": bias(hidden, "expert_dim") if self.experts.biases else None,
            "bias_wi_1": bias(hidden, "expert_dim") if self.experts.biases and gated else None,
            "bias_wo": bias(width, "model_dim") if self.experts.biases else None,
            "shared_wi_0": shared("model_dim") if self.experts.num_shared else None,
            "shared_wi_1": shared("model_dim") if self.experts.num_shared and gated else None,
            "shared_wo": shared("shared_dim") if self.experts.num_shared else None,
            "shared_gate": ParamSpec(shape=(width,), dtype=dtype, axes=("model_dim",), contracts="model_dim")
            if self.experts.shared_gate
            else None,
        }
        return {name: spec for name, spec in specs.items() if spec is not None}


def chosen_by_experts(config: MoEConfig) -> bool:
    """Each expert picks its tokens, so that a token has any number of experts."""
    return config.router.selection == "expert_choice"
