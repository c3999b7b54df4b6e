"""`moe_backend`, the one switch that users know: a name for a strategy and a choice of kernels."""

from dataclasses import dataclass, field

from raggedmoe.kernels.registry import KernelChoice


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The strategy and the kernels that a name of `moe_backend` stands for."""

    strategy: str = "local"
    kernels: KernelChoice = field(default_factory=KernelChoice)
    fused: bool = False  # the experts as one `expert_ffn` instead of grouped matmuls


def canonical_backend(word: str) -> str:
    """The name of a backend from what is typed on a command line, where an older word stays known."""
    return "dense" if word == "jax" else word


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
