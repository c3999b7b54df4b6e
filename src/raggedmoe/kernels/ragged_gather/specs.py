"""Example calls of `ragged_gather`."""

import functools
from typing import Any

import numpy as np

from raggedmoe.kernels.example import Example, Spec, integers, normal, poisoned, routing


def _make(
    rng: np.random.Generator,
    dtype: Any,
    *,
    tokens: int,
    experts: int,
    per_token: int,
    width: int,
    start: int | None = None,
    end: int | None = None,
    weights: bool = False,
    inverse: bool = True,
) -> Example:
    slots = np.argsort(routing(rng, tokens, experts, per_token).reshape(-1), kind="stable")
    row = np.arange(slots.size)
    keep = (row >= (start or 0)) & (row < (slots.size if end is None else end))
    arrays: dict[str, Any] = {
        "x": normal(rng, (tokens, width), dtype),
        "indices": integers(slots // per_token),
    }
    if start is not None:
        arrays["start"] = integers(start)
    if end is not None:
        arrays["end"] = integers(end)
    if weights:
        arrays["weights"] = poisoned(normal(rng, (slots.size,), np.float32), keep)
    if inverse:
        arrays["inverse"] = integers(np.argsort(slots).reshape(tokens, per_token))
    cotangent = poisoned(normal(rng, (slots.size, width), dtype), keep)
    return Example(arrays=arrays, options={}, cotangent=cotangent, flops=0)


def _spec(name: str, large: bool = False, **sizes: Any) -> Spec:
    return Spec(name=name, make=functools.partial(_make, **sizes), large=large)


SPECS = (
    _spec("one-token", tokens=1, experts=4, per_token=2, width=8),
    _spec("plain", tokens=33, experts=8, per_token=2, width=48, inverse=False),
    _spec("inverse", tokens=33, experts=8, per_token=2, width=48),
    _spec("every-expert", tokens=17, experts=20, per_token=20, width=24, weights=True),
    _spec("range", tokens=40, experts=8, per_token=3, width=31, start=11, end=77),
    _spec("range-weights", tokens=40, experts=8, per_token=3, width=31, start=11, end=77, weights=True),
    _spec("range-weights-plain", tokens=40, experts=8, per_token=3, width=31, end=50, weights=True, inverse=False),
    _spec("no-row", tokens=9, experts=4, per_token=2, width=16, start=5, end=5, weights=True),
    _spec("width-2880", tokens=12, experts=4, per_token=4, width=2880, weights=True),
    _spec("mixtral", tokens=2048, experts=16, per_token=2, width=512, large=True),
    _spec("fine-grained", tokens=2048, experts=64, per_token=8, width=512, large=True),
)
