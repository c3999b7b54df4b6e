"""A whole training step of the default model, against dense matmuls of its useful FLOPs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.bench.cases import LIMIT, Timing, dense_limit, timings
from raggedmoe.hardware import target_hardware
from raggedmoe.models.flops import train_flops
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.sections import ExecutionSettings, ModelOverrides

CASES = {"train demo": "auto", "train demo, experts by einsum": "dense"}  # with that moe_backend
SIDE = 1024


def train_timings(dtype: str, rounds: int = 5, only: str = "") -> Iterator[list[Timing]]:
    """Steady-state steps on the run's own data: forward, backward, optimizer, reports; no evaluation, no checkpoint."""
    for case, moe_backend in CASES.items():
        if only in case:
            yield _train_timings(case, moe_backend, dtype, rounds)


def _train_timings(case: str, moe_backend: str, dtype: str, rounds: int) -> list[Timing]:
    from raggedmoe.train.data.batches import open_data  # grain and optax are extras
    from raggedmoe.train.step.programs import compile_programs

    asked = TrainConfig(
        model="demo",
        overrides=ModelOverrides(dtype=dtype),
        execution=ExecutionSettings(moe_backend=moe_backend),
    )
    config = resolve(asked, target_hardware())
    batches = open_data(config.data, config.step.model.vocab_size, config.batch_size).train_batches()
    programs = compile_programs(config.step, next(batches), None)
    state = programs.init(jax.random.key(0))

    def step() -> Any:
        nonlocal state
        state, report = programs.step(state, next(batches))
        return report

    model, length = config.step.model, config.data.sequence_length
    per_token = train_flops(model, length, mtp_layers=config.step.mtp_layers)
    flops = round(config.batch_size * length * per_token)
    square = jnp.ones((SIDE, SIDE), dtype)
    contenders: dict[str, Callable[[], Any]] = {LIMIT: dense_limit(square, square, flops), "step": step}
    return timings(case, dtype, flops, contenders, rounds)
