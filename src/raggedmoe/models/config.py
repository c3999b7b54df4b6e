"""What a decoder is: small frozen configurations, checked when they are made. A checkpoint holds them."""

import functools
import math
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from raggedmoe.kernels.expert_ffn.api import check_activation, may_keep_sums
from raggedmoe.lora import LoraConfig
from raggedmoe.models.execution import ModelExecution
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.config import check_execution as check_moe_execution
from raggedmoe.names import check_known, refuse_keywords_of
from raggedmoe.params import check_divides, check_sizes

MOST_LAYERS = 10_000  # those of multi-token prediction included: they are listed one by one
MOST_LAYERS_OF_A_PATTERN = 64  # that `stacks` looks for; the body of a scan that is compiled whole
QK_NORMS = ("none", "head", "full")


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN: low frequencies are slowed down by ``factor``, high ones kept, those between blended."""

    factor: float
    original_length: int  # positions that the model was first trained on
    beta_fast: float = 32.0  # turns over the original length above which a frequency is kept
    beta_slow: float = 1.0  # and below which it is divided by the factor
    mscale: float = 1.0  # cos and sin are multiplied by m(mscale) / m(mscale_all_dim), m(s) = 0.1 · s · ln(factor) + 1
    mscale_all_dim: float = 0.0  # MLA's softmax scale is multiplied by m(mscale_all_dim)²
    truncate: bool = True  # round the blend's ends to whole dimensions

    def __post_init__(self) -> None:
        check_sizes(self, "original_length")
        if self.factor < 1:
            raise ValueError(f"expected a YaRN factor >= 1, got {self.factor}")

    def magnitude(self, scale: float) -> float:
        """Return ``m(scale)``: how much longer vectors are made, so that a longer context's softmax stays as sharp."""
        return 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions."""

    theta: float = 10_000.0
    interleaved: bool = False  # pairs are (0, 1), (2, 3) … instead of (0, H/2), (1, H/2 + 1) …
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise ValueError(f"expected a rope theta > 1, got {self.theta}")


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig:
    """Attention with N query heads that share M key and value heads."""

    num_heads: int  # N
    num_kv_heads: int  # M
    head_dim: int  # H
    qk_norm: str = "none"  # RMSNorm of queries and keys: over each "head", or over all heads together ("full")
    biases: bool = False  # of the four projections
    sinks: bool = False  # a learned logit for each head that takes a share of the softmax
    clip: float | None = None  # queries, keys and values are clamped to ± this, before rope
    norm_epsilon: float = 1e-6  # of the QK norm
    rope: RopeConfig = field(default_factory=RopeConfig)

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "num_kv_heads", "head_dim")
        check_known("qk_norm", self.qk_norm, QK_NORMS)
        check_divides("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"expected clip > 0 or None, got {self.clip}")
        if self.head_dim % 2:
            raise ValueError(f"expected an even head_dim, as rope turns pairs, got {self.head_dim}")

    @property
    def rope_dim(self) -> int:
        return self.head_dim

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek): keys and values are up projections of one small latent per token."""

    num_heads: int  # N
    q_lora_rank: int | None  # width of the compressed queries; None: queries are projected directly
    kv_lora_rank: int  # width of the latent
    nope_dim: int  # of each head, the part without position
    rope_dim: int  # and the part with it, whose key all heads share
    value_dim: int
    norm_epsilon: float = 1e-6  # of the norms on compressed queries and on the latent
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(interleaved=True))

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "kv_lora_rank", "nope_dim", "rope_dim", "value_dim")
        if self.q_lora_rank is not None:
            check_sizes(self, "q_lora_rank")
        if self.rope_dim % 2:
            raise ValueError(f"expected an even rope_dim, as rope turns pairs, got {self.rope_dim}")

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        yarn = self.rope.yarn
        return self.head_dim**-0.5 * (yarn.magnitude(yarn.mscale_all_dim) ** 2 if yarn else 1.0)


AttentionConfig = GroupedQueryConfig | LatentConfig


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What tells one layer of a decoder from another; layers of one kind can be scanned over."""

    moe: bool
    window: int | None  # keys that a query sees, itself included; None: all before it


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Consecutive layers, ``kinds`` repeated: what one `scan` runs over."""

    first: int  # number of its first layer in the model
    kinds: tuple[LayerKind, ...]
    repeats: int

    def layer(self, repeat: int, position: int) -> int:
        """Return the number in the model of one of the stack's layers."""
        return self.first + repeat * len(self.kinds) + position


@refuse_keywords_of(ModelExecution, "Decoder(config, execution=ModelExecution({keywords}))")
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder: embedding, layers of attention and MLP or MoE, final norm, head. `ModelExecution` is how it runs."""

    family: str  # whose checkpoints it reads and writes
    vocab_size: int  # V
    num_layers: int
    model_dim: int  # D
    attention: AttentionConfig
    moe: MoEConfig
    mlp_dim: int | None = None  # width of a dense MLP; None: there is none
    activation: str = "silu"  # of dense MLPs
    dense_layers: tuple[int, ...] = ()  # the layers that have a dense MLP instead of experts
    windows: tuple[int | None, ...] = (None,)  # sliding windows, repeated over the layers
    norm_epsilon: float = 1e-6
    tied_embeddings: bool = False  # the head is the embedding
    mtp_layers: int = 0  # DeepSeek's multi-token prediction: modules that predict one token further each
    max_length: int = 4096  # positions that the model is made for
    dtype: DTypeLike = jnp.float32  # of activations
    param_dtype: DTypeLike = jnp.float32  # of stored weights
    lora: LoraConfig | None = None  # adapters, which then learn alone; None: the weights themselves learn

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "num_layers", "model_dim", "max_length")
        check_activation(self.activation)
        for name, kinds in {"attention": (GroupedQueryConfig, LatentConfig), "moe": (MoEConfig,)}.items():
            if not isinstance(getattr(self, name), kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"expected {name} to be a {expected}, got {getattr(self, name)!r}")
        if self.moe.lora is not None:
            raise ValueError("expected lora in the ModelConfig, which gives it to its MoE layers, got it in moe")
        if self.moe.model_dim != self.model_dim:
            raise ValueError(f"expected moe.model_dim to be model_dim={self.model_dim}, got {self.moe.model_dim}")
        outside = [layer for layer in self.dense_layers if not 0 <= layer < self.num_layers]
        if outside:
            raise ValueError(f"expected dense_layers in 0 .. {self.num_layers - 1}, got {outside}")
        if self.dense_layers and self.mlp_dim is None:
            raise ValueError(f"dense_layers={self.dense_layers} need mlp_dim, the width of their MLP, got None")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"expected at least one window, each None or >= 1, got {self.windows}")
        if self.mtp_layers < 0:
            raise ValueError(f"expected mtp_layers >= 0, got {self.mtp_layers}")
        if self.num_layers + self.mtp_layers > MOST_LAYERS:
            raise ValueError(
                f"expected num_layers and mtp_layers to be at most {MOST_LAYERS} together, got {self.num_layers} and "
                f"{self.mtp_layers}"
            )

    @property
    def moe_layer(self) -> MoEConfig:
        """The MoE layers' configuration, with the model's type of parameters and its adapters."""
        return replace(self.moe, param_dtype=self.param_dtype, lora=self.lora)

    def kind(self, layer: int) -> LayerKind:
        """Return what a layer is. Those past the last, as multi-token prediction has, are MoE layers without window."""
        if layer >= self.num_layers:
            return LayerKind(moe=True, window=None)
        return LayerKind(moe=layer not in self._dense, window=self.windows[layer % len(self.windows)])

    @functools.cached_property
    def _dense(self) -> frozenset[int]:
        return frozenset(self.dense_layers)

    @functools.cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have experts."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self._dense)

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The layers as the fewest scans: from each start, the repeated pattern that reaches furthest."""
        equal: dict[LayerKind, LayerKind] = {}  # one object of each kind: identity is the faster comparison
        kinds = [equal.setdefault(kind, kind) for kind in map(self.kind, range(self.num_layers))]
        stacks, first = [], 0
        while first < len(kinds):
            period, repeats = _longest_repeat(kinds, first)
            stacks.append(Stack(first=first, kinds=tuple(kinds[first : first + period]), repeats=repeats))
            first += period * repeats
        return tuple(stacks)


def check_execution(config: ModelConfig, execution: ModelExecution) -> None:
    """Require that a model of this configuration can run with this execution."""
    if not isinstance(execution, ModelExecution):
        raise TypeError(
            f"expected execution to be a ModelExecution, got {type(execution).__name__}; that of its MoE layers is "
            "ModelExecution(moe=MoEExecution(...))"
        )
    check_moe_execution(config.moe_layer, execution.moe)
    absent = {"q_a", "kv_a"}
    if isinstance(config.attention, LatentConfig):
        absent = {"q_a"} if config.attention.q_lora_rank is None else set()
    absent |= set() if config.dense_layers or config.moe.experts.num_shared else {"mlp_up", "mlp_down"}
    if execution.moe.backend.fused and not may_keep_sums(execution.moe.kernel_choice.expert_ffn):
        absent |= {"moe_up"}
    for name in execution.saved_names:
        if name in absent:
            raise ValueError(f"remat keeps {name!r}, which this model never computes; leave it out")


def first_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Return the configuration of the model's first layers alone."""
    dense = tuple(layer for layer in config.dense_layers if layer < num_layers)
    return replace(config, num_layers=num_layers, dense_layers=dense)


def _longest_repeat(kinds: list[LayerKind], first: int) -> tuple[int, int]:
    """Return period and repeats of the pattern that covers most layers from a start on; of those, the shortest period.

    A pattern that does not repeat counts for nothing but its first layer, so that it is not one long unrolled body.
    With a longest period, the time for all starts grows as the number of layers, and not as its square: what is looked
    at beyond the first layers is what the pattern then covers.
    """
    best = (1, 1)
    for period in range(1, min((len(kinds) - first) // 2, MOST_LAYERS_OF_A_PATTERN) + 1):
        pattern, repeats = kinds[first : first + period], 1
        while kinds[first + repeats * period : first + (repeats + 1) * period] == pattern:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best
