"""A run under way, and what is done with it beside its steps: reports, held-out loss, checkpoints, the end."""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from raggedmoe.models.module import Decoder
from raggedmoe.sharding.training import TrainSharding, on_first_host
from raggedmoe.train.checkpoint.checkpoints import Checkpoints
from raggedmoe.train.data.batches import Batches, Data
from raggedmoe.train.data.rows import Batch
from raggedmoe.train.loop import run_folder
from raggedmoe.train.loop.metrics import MetricsWriter, NoMetrics
from raggedmoe.train.loop.record import read_run
from raggedmoe.train.loop.screen import Screen
from raggedmoe.train.settings.resolve import ResolvedConfig
from raggedmoe.train.step.programs import Programs
from raggedmoe.train.step.state import TrainState
from raggedmoe.train.step.step import StepReport


@dataclass(kw_only=True)
class Run:
    """A run under way: its configuration, data, programs and writers, and the figures of its last steps."""

    config: ResolvedConfig
    data: Data
    held_out: list[Batch]
    programs: Programs
    metrics: MetricsWriter | NoMetrics
    checkpoints: Checkpoints | None
    screen: Screen
    sharding: TrainSharding
    batches: Batches
    memory: int | None  # of each device, in bytes; None: nobody says
    flops_per_token: float
    peak_flops: float
    load: np.ndarray  # of every layer's experts since the last line of load.jsonl
    skipped_in_a_row: int = 0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))  # tokens and seconds of steps
    since: float = field(default_factory=time.perf_counter)  # when the step before was seen to end


def log_step(run: Run, step: int, report: StepReport) -> None:
    """Wait for a step, and write down what it was like."""
    fetched = jax.device_get({**vars(report), **vars(report.losses), "losses": None})
    now = time.perf_counter()
    seconds, run.since, tokens = max(now - run.since, 1e-9), now, int(fetched["tokens"])
    values: dict[str, Any] = {
        "loss": _finite(fetched["loss"]),
        "aux_loss": _finite(fetched["aux_loss"]),
        "z_loss": _finite(fetched["z_loss"]),
        "grad_norm": _finite(fetched["grad_norm"]),
        "learning_rate": float(fetched["learning_rate"]),
        "skipped": int(not fetched["finite"]),
        "tokens": tokens,
        "targets": int(fetched["targets"]),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": tokens / seconds * run.flops_per_token / run.peak_flops,
    }
    if run.config.step.mtp_layers:
        values["mtp_loss"] = _finite(fetched["mtp_loss"])
    if len(run.load):
        values |= {
            "entropy": float(fetched["entropy"]),
            "max_violation": float(fetched["max_violation"]),
            "dropped": int(fetched["dropped"]),
        }
        run.load += fetched["load"]
        if step % run.config.run.load_period == 0 or step == run.config.run.steps:
            run.metrics.load(step, run.load)
            run.load = np.zeros_like(run.load)
    run.skipped_in_a_row = int(fetched["skipped_in_a_row"])
    run.metrics.train(step, values)
    if values["skipped"]:
        text = f"loss {float(fetched['loss'])}, gradient norm {float(fetched['grad_norm'])}"
        run.metrics.event(step, "skipped", text)
        run.screen.say(f"step {step} skipped: {text}; {run.skipped_in_a_row} in a row")
    # One step's time may be another's where reports come late: the screen has the mean of the last ones.
    run.recent.append((tokens, seconds))
    speed = sum(tokens for tokens, _ in run.recent) / sum(seconds for _, seconds in run.recent)
    values |= {"tokens_per_second": speed, "mfu": speed * run.flops_per_token / run.peak_flops}
    run.screen.step(step, values)


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def evaluate(run: Run, state: TrainState, step: int) -> float | None:
    """The held-out loss in nats per target, written down; None: nothing is held out."""
    if run.programs.held_out is None:
        return None
    sums_and_counts = [run.programs.held_out(state.params, batch) for batch in run.held_out]
    sums = np.asarray(jax.device_get(sums_and_counts), np.float64).sum(0)
    loss = float(sums[0] / sums[1])
    run.metrics.held_out(step, {"loss": loss, "targets": int(sums[1])})
    run.screen.say(f"after step {step}: held-out loss {loss:.4f} nats per target")
    run.since = time.perf_counter()
    return loss


def save(run: Run, state: TrainState, step: int, metric: float | None) -> None:
    """A checkpoint, with all that the run needs to go on exactly."""
    if run.checkpoints is None:
        return
    run.metrics.event(step, "checkpoint", "" if metric is None else f"held-out loss {metric:.4f}")
    run.metrics.flush()  # what the checkpoint covers is on disk before it is
    extra = {
        "data": run.batches.get_state(),
        "load": run.load.tolist(),
        "settings": run.config.asked.values(),
        "data_fingerprint": run.data.fingerprint,
        "devices": run.config.plan.num_devices,
    }
    run.checkpoints.save(step, state, extra, metric=metric)
    run.since = time.perf_counter()


def finish(run: Run, state: TrainState) -> str:
    """Write the trained model, and say how it went. Of several processes the first does; all take part."""
    params = on_first_host(state.params)
    if params is None:
        return ""
    model = Decoder(run.config.step.model, params=params)
    folder = run_folder.save_model(run.config.folder, model, run.data.tokenizer_json())
    run.metrics.flush()
    record = read_run(run.config.folder)
    lines = [f"finished: the model is in {folder}"]
    losses = [line["loss"] for line in record.held_out]
    if losses:
        first, last = ("not finite" if loss is None else f"{loss:.4f}" for loss in (losses[0], losses[-1]))
        lines.append(f"held-out loss {last} nats per target, from {first}")
    if record.load is not None:
        num_dead, since = len(record.load.dead_experts), record.load.dead_since
        dead = f"dead experts: {num_dead} of {run.load.size} (no token since step {since})"
        dropped = record.total("dropped")  # not known where somebody moved metrics.jsonl away
        lines.append(f"{dead}; dropped slots: {dropped:.0f}" if math.isfinite(dropped) else dead)
    if record.skipped_steps:
        lines.append(f"skipped steps, not finite: {len(record.skipped_steps)}")
    lines.append(f"raggedmoe report {run.config.folder} makes a page of it")
    return "\n".join(lines)
