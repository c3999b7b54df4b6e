"""How an MoE layer runs: what may differ from machine to machine, and never goes into a checkpoint."""

import math
from dataclasses import dataclass, field, replace

from raggedmoe.kernels.qarray import LHS_FORMATS
from raggedmoe.kernels.quant_config import QuantConfig
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.names import check_known, refuse_conflicts
from raggedmoe.params import check_sizes
from raggedmoe.sharding.axes import SPLITS

STRATEGIES = ("local", "capacity", "dense", "ring", "all_to_all")
ACROSS_RANKS = ("ring", "all_to_all")  # strategies that are for experts on several devices


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The strategy and the kernels that a name of `moe_backend` stands for."""

    strategy: str = "local"
    kernels: KernelChoice = field(default_factory=KernelChoice)
    fused: bool = False  # the experts as one `expert_ffn` instead of grouped matmuls


OLDER_BACKENDS = {"jax": "dense"}  # words that stay known on a command line
BACKENDS: dict[str, Backend] = {
    "auto": Backend(),  # grouped matmuls, or one `expert_ffn` where that is the fastest (`fuses_experts`)
    "dense": Backend(strategy="dense"),  # every expert on every token, by einsum
    "ragged_dot": Backend(kernels=KernelChoice(grouped_matmul="xla")),
    "cpu": Backend(kernels=KernelChoice(grouped_matmul="cpu")),
    "cpu_native": Backend(  # ours in C++
        kernels=KernelChoice(ragged_gather="cpu_native", ragged_gather_reduce="cpu_native", expert_ffn="cpu_native"),
        fused=True,
    ),
    "pallas": Backend(kernels=KernelChoice(grouped_matmul="pallas_tpu")),  # our TPU kernel
    "megablox": Backend(kernels=KernelChoice(grouped_matmul="megablox")),  # JAX's own TPU kernel
    "gmm_v2": Backend(kernels=KernelChoice(grouped_matmul="gmm_v2")),  # tokamax's second TPU kernel
    "expert_ffn": Backend(fused=True),
}


@dataclass(frozen=True, kw_only=True)
class MoEExecution:
    """How a layer runs. The result is that of its `MoEConfig`, but for rows that a `ragged_buffer_factor` drops."""

    moe_backend: str = "auto"  # A name for a strategy and a choice of kernels: see `BACKENDS`.
    strategy: str | None = None  # How rows reach their experts; None takes the backend's strategy.
    kernels: KernelChoice | None = None  # The kernels of the operations that the backend does not name.
    # The rows of the receive buffer, as a multiple of a balanced share; None has room for the worst case. Rows beyond
    # a factor are dropped and counted.
    ragged_buffer_factor: float | None = None
    token_chunks: int = 1  # The tokens come in this many parts, so that moving one overlaps with computing another.
    width_chunks: int = 1  # The model width comes in this many parts, so that moving one overlaps with multiplying.
    tensor_split: str = "expert_dim"  # What the tensor axis of a mesh splits of the experts: F, or D ("model_dim").
    # Backward, the rows are gathered from their tokens again rather than kept: K · D numbers fewer for a token.
    recompute_dispatch: bool = False
    quantization: QuantConfig | None = None  # What of the experts' matmuls is multiplied in 8 bits.
    dispatch_dtype: str | None = None  # Rows are sent to their experts' ranks in this format of 8 bits, with scales.
    hardware: str | None = None  # The chip to choose kernels for; None takes that of the mesh or of the arrays.

    def __post_init__(self) -> None:
        check_sizes(self, "token_chunks", "width_chunks")
        check_known("tensor_split", self.tensor_split, SPLITS)
        backend, factor, across = self.backend, self.ragged_buffer_factor, self.strategy in ACROSS_RANKS
        strategy, kernels = self.strategy or backend.strategy, vars(self.kernels or KernelChoice())
        check_known("strategy", strategy, STRATEGIES)
        alone = f"{' and '.join(ACROSS_RANKS)} alone"
        fused, dtype, splits_width = backend.fused, self.dispatch_dtype, self.tensor_split == "model_dim"
        named = {name: word for name, word in vars(backend.kernels).items() if word not in ("auto", kernels[name])}
        conflicts = [
            (kernels[name] != "auto", "moe_backend", name, f"it names {word!r}") for name, word in named.items()
        ]
        conflicts += [
            (backend.strategy == "dense" != strategy, "moe_backend", "strategy", "it moves no rows to their experts"),
            (fused and self.width_chunks > 1, "moe_backend", "width_chunks", "its activation needs the whole width"),
            (fused and splits_width, "moe_backend", "tensor_split", "its activation needs the whole width"),
            (across and self.recompute_dispatch, "recompute_dispatch", "strategy", "rows would be sent a second time"),
            (factor is not None and not across, "ragged_buffer_factor", "strategy", f"{alone} have such a buffer"),
            (dtype is not None and not across, "dispatch_dtype", "strategy", f"{alone} send rows in 8 bits"),
        ]
        refuse_conflicts({**vars(self), **kernels, "strategy": strategy}, conflicts)
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(f"expected ragged_buffer_factor > 0, or None, got {factor}")
        if dtype is not None:
            check_known("dispatch_dtype", dtype, LHS_FORMATS)

    @property
    def backend(self) -> Backend:
        """What the name of the backend stands for."""
        check_known("moe_backend", self.moe_backend, BACKENDS)
        return BACKENDS[self.moe_backend]

    @property
    def kernel_choice(self) -> KernelChoice:
        """The backend's kernels, and those of `kernels` for the operations that it leaves free."""
        named = {name: choice for name, choice in vars(self.backend.kernels).items() if choice != "auto"}
        return replace(self.kernels or KernelChoice(), **named)
