"""Example calls of `attention`."""

import functools
from typing import Any

import numpy as np

from raggedmoe.kernels.example import Example, integers, make_spec, normal, replace_values

MANY = 10**9
GARBAGE = 1e4  # in slots that no query sees


def _make(
    rng: np.random.Generator,
    dtype: Any,
    *,
    queries: int,
    slots: int | None = None,
    batch: int = 1,
    heads: int = 1,
    key_heads: int | None = None,
    width: int = 16,
    value_width: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    sinks: bool = False,
    segments: tuple[int, ...] | None = None,
    positions: tuple[int, ...] | None = None,
) -> Example:
    """Draw a call. ``segments``: the length of each. ``positions``: that of each sequence's last query."""
    slots, key_heads, value_width = slots or queries, key_heads or heads, value_width or width
    arrays: dict[str, Any] = {
        "query": normal(rng, (batch, queries, heads, width), dtype),
        "key": normal(rng, (batch, slots, key_heads, width), dtype),
        "value": normal(rng, (batch, slots, key_heads, value_width), dtype),
    }
    slot = np.arange(slots)[None, None, :]
    position = np.broadcast_to(np.arange(queries), (batch, queries))
    if positions is not None:
        position = np.asarray(positions)[:, None] + np.arange(1 - queries, 1)
        arrays["positions"] = integers(position)
    seen: Any = (slot <= position[:, :, None]) & (slot > position[:, :, None] - (window or MANY))
    if segments is not None:
        numbers = np.broadcast_to(np.repeat(np.arange(len(segments)), segments), (batch, queries))
        arrays["segments"] = integers(numbers)
        seen = seen & (numbers[:, :, None] == numbers[:, None, :])
    if sinks:
        # Minus infinity: this head has none.
        arrays["sinks"] = replace_values(normal(rng, (heads,), dtype), np.arange(heads) == 0, -np.inf)
    unread = ~seen.any(1)[:, :, None, None]
    arrays |= {name: replace_values(arrays[name], unread, GARBAGE) for name in ("key", "value")}
    seeing = seen.any(2)[:, :, None, None]
    arrays["query"] = replace_values(arrays["query"], ~seeing, np.nan)
    return Example(
        arrays=arrays,
        options={"window": window, "scale": scale},
        cotangent=replace_values(normal(rng, (batch, queries, heads, value_width), dtype), ~seeing, np.nan),
        flops=2 * int(seen.sum()) * heads * (width + value_width),
    )


_spec = functools.partial(make_spec, _make)

SPECS = (
    _spec("one-query", queries=1),
    _spec("grouped-heads", queries=33, batch=2, heads=6, key_heads=2, scale=0.5),
    _spec("window-1", queries=9, heads=2, window=1),
    _spec("sinks", queries=18, batch=2, heads=4, key_heads=1, width=40, value_width=24, sinks=True),
    _spec(
        "decode", queries=1, slots=90, batch=3, heads=4, key_heads=1, width=72, value_width=64, positions=(0, 41, 89)
    ),
    # The first sequence's queries start at -3 and see nothing there; the last's go past the end of the cache.
    _spec("positions", queries=5, slots=30, batch=3, heads=4, key_heads=2, positions=(1, 18, 33), window=9, sinks=True),
    _spec("odd-sizes", queries=77, heads=3, width=40, value_width=13, window=100),
    _spec("several-chunks", queries=601, batch=2, heads=2, key_heads=1, width=8, segments=(1, 300, 29, 271)),
    _spec("several-chunks-window", queries=601, heads=2, width=8, window=200, sinks=True),
    _spec("several-chunks-cache", queries=300, slots=601, batch=2, heads=1, width=8, positions=(550, 280)),
    _spec("training", queries=2048, heads=16, key_heads=4, width=128, large=True),
    _spec("training-window", queries=4096, heads=8, key_heads=1, width=64, window=128, sinks=True, large=True),
    _spec("latent", queries=1024, heads=8, width=192, value_width=128, large=True),
    _spec(
        "decoding", queries=1, slots=4096, batch=8, heads=16, key_heads=4, width=128, positions=(3000,) * 8, large=True
    ),
)
