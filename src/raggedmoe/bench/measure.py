"""Timing: contenders take turns, and each keeps its best."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def best_seconds(
    contenders: Mapping[str, Callable[[], Any]], rounds: int = 7, budget: float = 20.0
) -> dict[str, float]:
    """Measure the best time of each over interleaved rounds, so that a slow spell of the machine hits all alike.

    A contender whose turns have used its share of ``budget`` seconds sits out the rest, after one turn at least.
    """
    spent = dict.fromkeys(contenders, 0.0)
    best = dict.fromkeys(contenders, float("inf"))
    for run in contenders.values():
        jax.block_until_ready(run())  # compile, and touch the memory
    for turn in range(rounds):
        for name, run in contenders.items():
            if turn >= 1 and spent[name] > budget / len(contenders):
                continue
            start = time.perf_counter()
            jax.block_until_ready(run())
            elapsed = time.perf_counter() - start
            spent[name] += elapsed
            best[name] = min(best[name], elapsed)
    return best
