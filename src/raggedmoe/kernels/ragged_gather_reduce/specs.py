"""Example calls of `ragged_gather_reduce`."""

import functools
from typing import Any

import numpy as np

from raggedmoe.kernels.example import Example, draw_routed_rows, integers, make_spec, normal, poison_rows


def _make(
    rng: np.random.Generator, dtype: Any, *, width: int, weights: bool = True, inverse: bool = True, **routing: Any
) -> Example:
    routed = draw_routed_rows(rng, **routing)
    rows = poison_rows(normal(rng, (routed.slots.size, width), dtype), routed.valid)
    arrays: dict[str, Any] = {"rows": rows, "indices": integers(routed.rows), **routed.range}
    if weights:
        arrays["weights"] = normal(rng, routed.rows.shape, np.float32)
    if inverse:
        arrays["inverse"] = integers(routed.slots)
    flops = 2 * int(routed.valid.sum()) * width
    return Example(arrays=arrays, options={}, cotangent=normal(rng, (len(routed.rows), width), dtype), flops=flops)


_spec = functools.partial(make_spec, _make)

SPECS = (
    _spec("one-token", tokens=1, experts=4, per_token=2, width=8),
    _spec("plain", tokens=33, experts=8, per_token=2, width=48, inverse=False),
    _spec("no-weights", tokens=33, experts=8, per_token=2, width=48, weights=False),
    _spec("no-weights-plain", tokens=21, experts=8, per_token=3, width=7, weights=False, inverse=False, end=40),
    _spec("every-expert", tokens=17, experts=20, per_token=20, width=24),
    _spec("range", tokens=40, experts=8, per_token=3, width=31, start=11, end=77),
    _spec("range-plain", tokens=40, experts=8, per_token=3, width=31, start=11, end=77, inverse=False),
    _spec("no-row", tokens=9, experts=4, per_token=2, width=16, start=5, end=5),
    _spec("width-2880", tokens=12, experts=4, per_token=4, width=2880),
    _spec("mixtral", tokens=2048, experts=16, per_token=2, width=512, large=True),
    _spec("fine-grained", tokens=2048, experts=64, per_token=8, width=512, large=True),
)
