"""`attention` by tokamax's own kernel for the chip at hand, when named.

It keeps its softmax statistics to itself: its backward pass runs the forward pass again. For another implementation's
backward pass they are made by `chunked`; where nobody reads them, XLA drops that work.
"""

import contextlib
import importlib.metadata
import importlib.util

import jax
from packaging.version import Version

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import matmul_precision
from raggedmoe.kernels.attention import chunked
from raggedmoe.kernels.placement import unchecked_why_not
from raggedmoe.kernels.registry import Call, Implementation
from raggedmoe.kernels.tokamax_flags import leave_command_line_alone

BLOCK = 128  # of its TPU kernel: a sequence is whole blocks
COMPILES_ELSEWHERE = "0.0.14"  # the first that need not look at the attached device


def forward(operands, *, scale, window, backend="mosaic", hardware=None):
    with _compile_target(hardware):
        out = _attend(*operands[:3], scale=scale, window=window, backend=backend)
    return out, chunked.forward(operands, scale=scale, window=window)[1]


def backward(operands, out, logsumexp, cotangent, *, scale, window, backend="mosaic", hardware=None):
    def attend(query, key, value):
        return _attend(query, key, value, scale=scale, window=window, backend=backend)

    with _compile_target(hardware):
        return *jax.vjp(attend, *operands[:3])[1](cotangent), None


def _compile_target(hardware: Hardware | None):
    """Let tokamax compile on a machine without the chip, which it refuses unless it is told that this is meant."""
    from tokamax._src import config

    return config.cross_compile(True) if hardware and hardware.platform == "tpu" else contextlib.nullcontext()


def _attend(query, key, value, *, scale, window, backend):
    import tokamax

    leave_command_line_alone()
    return tokamax.dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        precision=matmul_precision(query.dtype),
        implementation=backend,
    )


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run; None: it can."""
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed; pip install raggedmoe[tokamax]"
    if hardware.platform == "cpu":
        return "its kernels are for TPUs and GPUs, not for cpu"
    for name in ("positions", "segments", "sinks"):
        if name in call.arrays:
            return f"takes no {name}"
    return _tpu_why_not(call) if hardware.platform == "tpu" else unchecked_why_not(call)


def _tpu_why_not(call: Call) -> str | None:
    version, length = importlib.metadata.version("tokamax"), call.arrays["query"].shape[1]
    if Version(version) < Version(COMPILES_ELSEWHERE):
        return f"tokamax {version} compiles it for an attached TPU only; use tokamax {COMPILES_ELSEWHERE} or newer"
    if call.options["window"] is not None:
        return "its TPU kernel takes no window"
    if length % BLOCK:
        return f"its TPU kernel takes a length that is a multiple of {BLOCK}, got {length}"
    return unchecked_why_not(call)


IMPLEMENTATION = Implementation(
    operation="attention",
    name="tokamax",
    forward=forward,
    backward=backward,
    rank={"gpu": 20, "tpu": 30},
    proofs=(),
    why_not=why_not,
    note=lambda call, hardware: "its backward pass runs the forward pass again",
    takes_hardware=True,
)
