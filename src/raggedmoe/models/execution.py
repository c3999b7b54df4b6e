"""How a decoder runs: what may differ from machine to machine, and never goes into a checkpoint."""

from dataclasses import dataclass, field

from raggedmoe.kernels.registry import Choice, check_choice
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.names import check_known

# What a remat policy may keep, in the order in which a layer computes it.
SAVED_NAMES = (
    "q_a",  # compressed queries (MLA with q_lora)
    "kv_a",  # compressed keys and values (MLA)
    "query",  # after norm and rope
    "key",
    "value",
    "attn_out",  # what attention returns, before the output projection
    "attn_proj_out",
    "mlp_up",  # both up projections of a dense MLP or of the shared experts
    "mlp_down",
    "moe_up",  # both up projections of the routed experts, in float32; of a fused kernel that keeps them, in its type
    "moe_down",
)


@dataclass(frozen=True, kw_only=True)
class ModelExecution:
    """How a model runs. The result is that of its `ModelConfig`, but for rows that a `ragged_buffer_factor` drops."""

    moe: MoEExecution = field(default_factory=MoEExecution)  # How its MoE layers run, and the chip that all is for.
    attention_implementation: Choice = "auto"  # The attention kernel.
    scan_layers: bool = True  # Whether like layers are one scan; one after the other is faster where they are few.
    # What is kept for the backward pass: everything ("none"), each layer's input ("full"), or these of `SAVED_NAMES`.
    remat: str | tuple[str, ...] = "none"

    def __post_init__(self) -> None:
        check_choice("attention", self.attention_implementation)
        if isinstance(self.remat, str) and self.remat not in ("none", "full"):
            raise ValueError(f"expected remat 'none', 'full' or a tuple of names to keep, got {self.remat!r}")
        for name in self.saved_names:
            check_known("remat name", name, SAVED_NAMES)

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The names that remat keeps; none for the policies that have a name of their own."""
        return () if isinstance(self.remat, str) else self.remat
