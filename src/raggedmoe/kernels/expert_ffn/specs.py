"""Example calls of `expert_ffn`."""

import functools
from typing import Any

import numpy as np

from raggedmoe.kernels.example import (
    Example,
    draw_group_sizes,
    draw_quantized,
    integers,
    make_spec,
    normal,
    poison_rows,
)
from raggedmoe.kernels.expert_ffn.api import ExpertBiases


def _make(
    rng: np.random.Generator,
    dtype: Any,
    *,
    sizes: tuple[int, ...],
    width: int,
    hidden: int,
    spare: int = 0,
    gated: bool = True,
    biases: bool = False,
    activation: str = "silu",
    weights_format: str | None = None,
    blocks: tuple[int, int] = (1, 0),
) -> Example:
    row = np.arange(sum(sizes) + spare)
    keep = row < sum(sizes)
    groups = len(sizes)
    shape = (groups, hidden, width)
    up_scale, down_scale = width**-0.5, hidden**-0.5  # so that the activation is in its curved part
    arrays: dict[str, Any] = {
        "rows": poison_rows(normal(rng, (row.size, width), dtype), keep),
        "wi_0": normal(rng, shape, dtype, 2 * up_scale),
        "wi_1": normal(rng, shape, dtype, 2 * up_scale) if gated else None,
        "wo": normal(rng, shape, dtype, down_scale),
        "group_sizes": integers(sizes),
    }
    if weights_format is not None:  # blocks of the outer and the inner width of each matmul
        idle = np.asarray(sizes) == 0
        for name, scale in (("wi_0", 2 * up_scale), ("wi_1", 2 * up_scale), ("wo", down_scale)):
            if arrays[name] is not None:
                both = blocks[::-1] if name == "wo" else blocks
                arrays[name] = draw_quantized(rng, shape, weights_format, (1, *both), idle, scale)
    if biases:
        arrays["biases"] = ExpertBiases(
            wi_0=normal(rng, (groups, hidden), dtype),
            wi_1=normal(rng, (groups, hidden), dtype) if gated else None,
            wo=normal(rng, (groups, width), dtype),
        )
    cotangent = poison_rows(normal(rng, (row.size, width), dtype), keep)
    flops = 2 * sum(sizes) * width * hidden * (3 if gated else 2)
    return Example(arrays=arrays, options={"activation": activation}, cotangent=cotangent, flops=flops)


def _make_routed(
    rng: np.random.Generator, dtype: Any, *, tokens: int, experts: int, per_token: int, **rest: Any
) -> Example:
    """Draw group sizes as a router makes them, every expert equally likely."""
    return _make(rng, dtype, sizes=draw_group_sizes(rng, tokens * per_token, experts), **rest)


_spec = functools.partial(make_spec, _make)
_small = functools.partial(_spec, sizes=(7, 0, 20), width=24, hidden=17)
_mixtral = functools.partial(
    make_spec, _make_routed, large=True, tokens=2048, experts=16, per_token=2, width=512, hidden=1024
)

SPECS = (
    _spec("one-row", sizes=(0, 1, 0), width=8, hidden=12),
    _small("spare-rows", spare=6),
    _spec("no-row", sizes=(0, 0), width=8, hidden=8, spare=3, biases=True),
    _spec("all-in-one", sizes=(0, 60), width=32, hidden=16),
    _spec("several-tiles", sizes=(300, 2, 530), width=16, hidden=24, spare=5),
    _small("gelu", activation="gelu"),
    _small("gelu-tanh", activation="gelu_tanh", spare=1),
    _small("relu2-ungated", activation="relu2", gated=False, spare=2),
    _small("biases", biases=True, spare=2),
    _spec("ungated-biases", sizes=(4, 9), width=24, hidden=17, gated=False, activation="gelu", biases=True, spare=2),
    _spec("gpt-oss", sizes=(5, 0, 3), width=2880, hidden=45, activation="clamped_swiglu", biases=True, spare=2),
    _mixtral("mixtral"),
    _mixtral("fine-grained", experts=64, per_token=8),
)

_quantized = functools.partial(_spec, sizes=(7, 0, 20), width=64, hidden=32, spare=2)

QUANTIZED_SPECS = (
    _quantized("int8-channel", formats=("int8",), weights_format="int8", biases=True),
    _quantized("fp8-block", formats=("float8_e4m3fn",), weights_format="float8_e4m3fn", blocks=(32, 32)),
    _quantized("fp8-e5m2-expert", formats=("float8_e5m2",), weights_format="float8_e5m2", blocks=(0, 0), gated=False),
    _quantized("mxfp4", formats=("mxfp4",), weights_format="mxfp4", blocks=(1, 32), activation="clamped_swiglu"),
    _mixtral("mixtral-int8", formats=("int8",), weights_format="int8"),
)
