"""`moe_backend`, the one switch that users know: a name for a strategy and a choice of kernels."""

from dataclasses import dataclass, field

from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.names import unknown


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What a name stands for."""

    strategy: str = "local"
    kernels: KernelChoice = field(default_factory=KernelChoice)
    fused: bool = False  # the experts as one `expert_ffn` instead of grouped matmuls


def backend_named(name: str) -> Backend:
    """The backend with that name; one whose kernels are not built yet is refused with what is missing."""
    if name in NOT_BUILT:
        raise ValueError(f"moe_backend={name!r} is not built yet: {NOT_BUILT[name]}; use one of {', '.join(BACKENDS)}")
    if name not in BACKENDS:
        raise unknown("moe_backend", name, (*BACKENDS, *NOT_BUILT))
    return BACKENDS[name]


BACKENDS: dict[str, Backend] = {
    "auto": Backend(),
    "jax": Backend(strategy="dense"),  # every expert on every token, by einsum
    "ragged_dot": Backend(kernels=KernelChoice(grouped_matmul="xla")),
    "cpu": Backend(kernels=KernelChoice(grouped_matmul="cpu")),
    "expert_ffn": Backend(fused=True),
}

NOT_BUILT: dict[str, str] = {
    "pallas": "it needs our Pallas TPU kernels",
    "megablox": "it needs the wrapper of JAX's megablox kernel",
    "gmm_v2": "it needs the wrapper of tokamax's second ragged_dot kernel",
}
