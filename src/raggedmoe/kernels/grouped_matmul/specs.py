"""Example calls of `grouped_matmul`."""

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
    routing,
)


def _make(
    rng: np.random.Generator,
    dtype: Any,
    *,
    sizes: tuple[int, ...],
    inner: int,
    out: int,
    spare: int = 0,
    transpose: bool = False,
    offset: int | None = None,
    groups: int | None = None,
    result: str | None = None,
    rhs_format: str | None = None,
    rhs_blocks: tuple[int, int] = (0, 1),
    lhs_format: str | None = None,
) -> Example:
    groups = groups or len(sizes)
    first = sum(sizes[: offset or 0])
    last = sum(sizes[: (offset or 0) + groups])
    row = np.arange(sum(sizes) + spare)
    keep = (row >= first) & (row < last)
    arrays: dict[str, Any] = {
        "lhs": poison_rows(normal(rng, (row.size, inner), dtype), keep),
        "rhs": normal(rng, (groups, out, inner) if transpose else (groups, inner, out), dtype),
        "group_sizes": integers(sizes),
    }
    if rhs_format is not None:  # blocks of the inner and the outer width
        idle = np.asarray(sizes)[(offset or 0) :][:groups] == 0
        blocks = (1, *(rhs_blocks[::-1] if transpose else rhs_blocks))
        arrays["rhs"] = draw_quantized(rng, arrays["rhs"].shape, rhs_format, blocks, idle)
    if lhs_format is not None:
        arrays["lhs"] = draw_quantized(rng, (row.size, inner), lhs_format, (1, 0), ~keep)
    options: dict[str, Any] = {"transpose_rhs": transpose}
    if offset is not None:
        arrays["group_offset"] = integers(offset)
    if result is not None:
        options["preferred_element_type"] = result
    cotangent = poison_rows(normal(rng, (row.size, out), result or dtype), keep)
    return Example(arrays=arrays, options=options, cotangent=cotangent, flops=2 * (last - first) * inner * out)


def _make_routed(
    rng: np.random.Generator, dtype: Any, *, tokens: int, experts: int, per_token: int, **rest: Any
) -> Example:
    """Draw group sizes as a router makes them, every expert equally likely."""
    return _make(rng, dtype, sizes=draw_group_sizes(rng, tokens * per_token, experts), **rest)


def _skewed_sizes(num_tokens: int, num_experts: int, per_token: int) -> tuple[int, ...]:
    experts = routing(np.random.default_rng(0), num_tokens, num_experts, per_token)
    return tuple(int(size) for size in np.bincount(experts.reshape(-1), minlength=num_experts))


_spec = functools.partial(make_spec, _make)
_mixtral = functools.partial(
    make_spec, _make_routed, large=True, tokens=2048, experts=16, per_token=2, inner=512, out=1024, transpose=True
)

SPECS = (
    _spec("one-row", sizes=(1,), inner=8, out=8),
    _spec("one-row-of-many", sizes=(0, 0, 1, 0), inner=16, out=24),
    _spec("even", sizes=(16, 16, 16, 16), inner=32, out=64),
    _spec("even-transposed", sizes=(16, 16, 16, 16), inner=32, out=64, transpose=True),
    _spec("empty-groups", sizes=(0, 30, 0, 7, 0), inner=24, out=40),
    _spec("all-in-one", sizes=(0, 70, 0), inner=24, out=40, transpose=True),
    _spec("no-row", sizes=(0, 0, 0), inner=8, out=8, spare=5),
    _spec("spare-rows", sizes=(3, 9, 20), inner=33, out=17, spare=13),
    _spec("skewed", sizes=_skewed_sizes(150, 12, 3), inner=31, out=65, spare=3, transpose=True),
    _spec("several-tiles", sizes=(600, 3, 290, 1100), inner=16, out=24, spare=9),
    _spec("offset", sizes=(5, 0, 20, 3, 11, 8), inner=20, out=12, offset=2, groups=3, spare=4),
    _spec("offset-transposed", sizes=(5, 0, 20, 3, 11, 8), inner=20, out=12, offset=4, groups=2, transpose=True),
    _spec("float32-sums", sizes=(11, 0, 26), inner=40, out=16, spare=2, transpose=True, result="float32"),
    _spec("width-2880", sizes=(3, 0, 9), inner=2880, out=48, spare=1, transpose=True),
    _spec("out-2880", sizes=(3, 0, 9), inner=48, out=2880, spare=1),
    _mixtral("mixtral"),
    _mixtral("fine-grained", experts=64, per_token=8),
)

_quantized = functools.partial(_spec, sizes=(0, 30, 0, 7, 0), inner=64, out=96, spare=3)

QUANTIZED_SPECS = (
    _quantized("int8-channel", formats=("int8",), rhs_format="int8"),
    _quantized(
        "fp8-block", formats=("float8_e4m3fn",), rhs_format="float8_e4m3fn", rhs_blocks=(32, 32), transpose=True
    ),
    _quantized("fp8-e5m2-expert", formats=("float8_e5m2",), rhs_format="float8_e5m2", rhs_blocks=(0, 0)),
    _quantized("mxfp4", formats=("mxfp4",), rhs_format="mxfp4", rhs_blocks=(32, 1), transpose=True),
    _quantized("mxfp4-down", formats=("mxfp4",), rhs_format="mxfp4", rhs_blocks=(32, 1), offset=1, groups=3),
    _quantized("int8-rows", formats=("int8",), rhs_format="int8", lhs_format="int8", transpose=True),
    _quantized("fp8-rows", formats=("float8_e4m3fn",), rhs_format="float8_e4m3fn", lhs_format="float8_e4m3fn"),
    _mixtral("mixtral-int8", formats=("int8",), rhs_format="int8"),
    _mixtral("mixtral-fp8", formats=("float8_e4m3fn",), rhs_format="float8_e4m3fn", rhs_blocks=(128, 128)),
)
