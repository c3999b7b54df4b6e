"""`expert_ffn` as XLA's ragged dots around the activation."""

import functools

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.expert_ffn import matmuls
from raggedmoe.kernels.grouped_matmul import masked_dot
from raggedmoe.kernels.grouped_matmul import xla as grouped_matmul
from raggedmoe.kernels.grouped_matmul.xla import FINITE_COPY
from raggedmoe.kernels.proof import COMPILED_XLA
from raggedmoe.kernels.registry import WIDENED, Call, Implementation


def note(call: Call, hardware: Hardware) -> str | None:
    """Return the cost caveat that `explain` shows."""
    unfused = "three ragged dots, not fused: the hidden rows go through memory"
    return "; ".join(filter(None, (masked_dot.note(call, hardware), unfused, FINITE_COPY)))


IMPLEMENTATION = Implementation(
    operation="expert_ffn",
    name="xla",
    forward=functools.partial(matmuls.forward, grouped_matmul),
    forward_keeping=functools.partial(matmuls.forward_keeping, grouped_matmul),
    backward=functools.partial(matmuls.backward, grouped_matmul),
    rank={"cpu": 20, "gpu": 20, "tpu": 20},
    proofs=COMPILED_XLA,
    why_not=masked_dot.why_not,
    note=note,
    quantized=WIDENED,
)
