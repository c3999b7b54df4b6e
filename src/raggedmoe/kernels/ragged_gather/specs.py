"""Example calls of `ragged_gather`."""

import functools
from typing import Any

import numpy as np

from raggedmoe.kernels.example import Example, draw_routed_rows, integers, make_spec, normal, poison_rows


def _make(
    rng: np.random.Generator, dtype: Any, *, width: int, weights: bool = False, inverse: bool = True, **routing: Any
) -> Example:
    routed = draw_routed_rows(rng, **routing)
    arrays: dict[str, Any] = {
        "x": normal(rng, (len(routed.rows), width), dtype),
        "indices": integers(routed.slots // routed.rows.shape[1]),
        **routed.range,
    }
    if weights:
        arrays["weights"] = poison_rows(normal(rng, (routed.slots.size,), np.float32), routed.valid)
    if inverse:
        arrays["inverse"] = integers(routed.rows)
    cotangent = poison_rows(normal(rng, (routed.slots.size, width), dtype), routed.valid)
    return Example(arrays=arrays, options={}, cotangent=cotangent, flops=0)


_spec = functools.partial(make_spec, _make)

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
