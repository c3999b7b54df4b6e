"""A whole training step of the default model, against dense matmuls of its useful FLOPs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from raggedmoe.bench.cases import LIMIT, Timing, dense_limit, timings
from raggedmoe.hardware import target_hardware
from raggedmoe.models.flops import train_flops

CASES = {"train demo": ("demo",), "train demo, experts by einsum": ("demo", "moe_backend=jax")}
SIDE = 1024


def train_timings(dtype: str, rounds: int = 5, only: str = "") -> Iterator[list[Timing]]:
    """Steady-state steps on the run's own data: forward, backward, optimizer, reports; no evaluation, no checkpoint."""
    from raggedmoe.train.data import open_data  # grain and optax are extras
    from raggedmoe.train.programs import compile_programs
    from raggedmoe.train.settings import make_config, parse_settings

    for case, words in CASES.items():
        if only not in case:
            continue
        config = make_config(parse_settings((*words, f"dtype={dtype}")), target_hardware())
        batches = open_data(config.data, config.step.model.vocab_size).train_batches()
        programs = compile_programs(config.step, next(batches), evaluates=False)
        state = programs.init(jax.random.key(0))

        def step() -> Any:
            nonlocal state
            state, report = programs.step(state, next(batches))
            return report

        tokens = config.data.batch_size * config.data.sequence_length
        flops = round(tokens * train_flops(config.step.model, config.data.sequence_length))
        square = jax.numpy.ones((SIDE, SIDE), dtype)
        contenders: dict[str, Callable[[], Any]] = {LIMIT: dense_limit(square, square, flops), "step": step}
        yield timings(case, dtype, flops, contenders, rounds)
