"""`attention` by tokamax's own kernel for the chip at hand, when named.

It keeps its softmax statistics to itself: its backward pass runs the forward pass again. For another implementation's
backward pass they are made by `chunked`; where nobody reads them, XLA drops that work.
"""

import importlib.util

import jax

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import matmul_precision
from raggedmoe.kernels.attention import chunked
from raggedmoe.kernels.placement import unchecked_why_not
from raggedmoe.kernels.registry import Call, Implementation


def forward(operands, *, scale, window, backend="mosaic"):
    out = _attend(*operands[:3], scale=scale, window=window, backend=backend)
    return out, chunked.forward(operands, scale=scale, window=window)[1]


def backward(operands, out, logsumexp, cotangent, *, scale, window, backend="mosaic"):
    def attend(query, key, value):
        return _attend(query, key, value, scale=scale, window=window, backend=backend)

    return *jax.vjp(attend, *operands[:3])[1](cotangent), None


def _attend(query, key, value, *, scale, window, backend):
    import tokamax

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
    """Why it cannot run."""
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed; pip install raggedmoe[tokamax]"
    if hardware.platform == "cpu":
        return "its kernels are for TPUs and GPUs, not for cpu"
    for name in ("positions", "segments", "sinks"):
        if name in call.arrays:
            return f"takes no {name}"
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
)
