"""A run under way, and what is done with it beside its steps: reports, held-out loss, checkpoints, the end."""

import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from raggedmoe.models.module import Decoder
from raggedmoe.train import run_folder
from raggedmoe.train.checkpoint import Checkpoints
from raggedmoe.train.data import Batches, Data
from raggedmoe.train.metrics import LOAD, MetricsWriter, read_jsonl
from raggedmoe.train.programs import Programs
from raggedmoe.train.rows import Batch
from raggedmoe.train.screen import Screen
from raggedmoe.train.settings import TrainConfig
from raggedmoe.train.state import TrainState
from raggedmoe.train.step import StepReport


@dataclass(kw_only=True)
class Run:
    """What the loop works with."""

    config: TrainConfig
    data: Data
    held_out: list[Batch]
    programs: Programs
    metrics: MetricsWriter
    checkpoints: Checkpoints | None
    screen: Screen
    batches: Batches
    flops_per_token: float
    peak_flops: float
    load: np.ndarray  # of every layer's experts since the last line of load.jsonl
    dropped: int = 0
    skipped_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)  # held out, first to last, of this process
    since: float = field(default_factory=time.perf_counter)  # when the step before was seen to end


def log_step(run: Run, step: int, report: StepReport) -> None:
    """Wait for a step, and write down what it was like."""
    fetched = jax.device_get({**vars(report), **vars(report.losses), "losses": None})
    now = time.perf_counter()
    seconds, run.since = max(now - run.since, 1e-9), now
    tokens = run.config.data.batch_size * run.config.data.sequence_length
    values: dict[str, Any] = {
        "loss": _finite(fetched["loss"]),
        "aux_loss": _finite(fetched["aux_loss"]),
        "z_loss": _finite(fetched["z_loss"]),
        "grad_norm": _finite(fetched["grad_norm"]),
        "learning_rate": float(fetched["learning_rate"]),
        "skipped": int(not fetched["finite"]),
        "tokens": tokens,
        "targets": int(fetched["tokens"]),
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
        run.dropped += int(fetched["dropped"])
        run.load += fetched["load"]
        if step % run.config.run.load_period == 0 or step == run.config.step.optimizer.steps:
            run.metrics.load(step, run.load)
            run.load = np.zeros_like(run.load)
    run.skipped_in_a_row = int(fetched["skipped_in_a_row"])
    run.metrics.train(step, values)
    if values["skipped"]:
        text = f"loss {float(fetched['loss'])}, gradient norm {float(fetched['grad_norm'])}"
        run.metrics.event(step, "skipped", text)
        run.screen.say(f"step {step} skipped: {text}; {run.skipped_in_a_row} in a row")
    run.screen.step(step, values)


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def evaluate(run: Run, state: TrainState, step: int) -> float | None:
    """The held-out loss in nats per target, written down; None: nothing is held out."""
    if run.programs.held_out is None:
        return None
    found = [run.programs.held_out(state.params, batch) for batch in run.held_out]
    sums = np.asarray(jax.device_get(found), np.float64).sum(0)
    loss = float(sums[0] / sums[1])
    run.metrics.held_out(step, {"loss": loss, "targets": int(sums[1])})
    run.screen.say(f"after step {step}: held-out loss {loss:.4f} nats per target")
    run.losses.append(loss)
    return loss


def save(run: Run, state: TrainState, step: int, metric: float | None) -> None:
    """A checkpoint, with all that the run needs to go on exactly."""
    if run.checkpoints is None:
        return
    run.metrics.flush()  # what the checkpoint covers is on disk before it is
    extra = {"data": run.batches.get_state(), "load": run.load.tolist()}
    run.checkpoints.save(step, state, extra, metric=metric)


def finish(run: Run, state: TrainState) -> str:
    """Write the trained model, and say how it went."""
    model = Decoder(run.config.step.model, params=state.params)
    folder = run_folder.save_model(run.config.run.folder, model, run.data.tokenizer_json())
    lines = [f"finished: the model is in {folder}"]
    if run.losses:
        lines.append(f"held-out loss {run.losses[-1]:.4f} nats per target, from {run.losses[0]:.4f}")
    if len(run.load):
        dead, window = dead_experts(run)
        lines.append(f"dead experts: {dead} of {run.load.size} (no token in {window}); dropped slots: {run.dropped}")
    lines.append(f"raggedmoe report {run.config.run.folder} makes a page of it")
    return "\n".join(lines)


def dead_experts(run: Run) -> tuple[int, str]:
    """Experts without a token in the last tenth of the run's lines of load, and which steps those are."""
    lines = read_jsonl(run.config.run.folder / LOAD)
    recent = lines[-max(1, len(lines) // 10) :]
    total = np.sum([line["load"] for line in recent], axis=0)
    before = lines[-len(recent) - 1]["step"] if len(lines) > len(recent) else 0
    return int((total == 0).sum()), f"steps {before + 1} to {recent[-1]['step']}"
