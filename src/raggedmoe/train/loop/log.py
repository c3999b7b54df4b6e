"""What a run says of its steps: the metrics files, the screen, and the functions that a caller gave."""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from raggedmoe.train.loop.metrics import LOSS_OF, MetricsWriter, NoMetrics
from raggedmoe.train.loop.sample import TextSample
from raggedmoe.train.loop.screen import Screen
from raggedmoe.train.loop.speed import Speed
from raggedmoe.train.settings.resolve import ResolvedConfig
from raggedmoe.train.settings.sections import HELD_OUT
from raggedmoe.train.step.step import StepReport

# Takes a line of metrics.jsonl: a step's (its kind is "train"), an evaluation's ("eval"), a text's ("sample") or an
# event's. The run stops after the step under way, with the model that it has then, if it returns True. What it raises
# ends the run, whose checkpoints stay: it goes on from them. Process 0 alone calls it.
Callback = Callable[[Mapping[str, Any]], bool | None]


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """What an evaluation on a set gave."""

    loss: float  # in nats per target
    num_targets: int


class RunLog:
    """Writes down what a run does, and keeps the figures of its last steps for that."""

    def __init__(
        self,
        config: ResolvedConfig,
        metrics: MetricsWriter | NoMetrics,
        screen: Screen,
        speed: Speed,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._config, self._speed = config, speed
        self._metrics, self._screen, self._callbacks = metrics, screen, callbacks
        self.load = np.zeros((len(moe_layers(config)), config.step.model.moe.num_experts), np.int64)
        self.skipped_in_a_row = 0
        self.stop_requested = False  # by a callback
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)  # tokens and seconds of steps
        self._since = time.perf_counter()  # when the step before was seen to end

    def step(self, step: int, report: StepReport) -> None:
        """Wait for a step, and write down what it was like."""
        fetched = jax.device_get({**vars(report), **vars(report.losses), "losses": None})
        now = time.perf_counter()
        seconds, self._since = max(now - self._since, 1e-9), now
        values = self._values(fetched, seconds)
        if len(self.load):
            self.load += fetched["load"]
            if step % self._config.run.load_period == 0 or step == self._config.run.num_steps:
                self._metrics.load(step, self.load)
                self.load = np.zeros_like(self.load)
        self.skipped_in_a_row = int(fetched["skipped_in_a_row"])
        self._metrics.train(step, values)
        if values["skipped"]:
            text = f"loss {float(fetched['loss'])}, gradient norm {float(fetched['grad_norm'])}"
            self.event(step, "skipped", text)
            self.say(f"step {step} skipped: {text}; {self.skipped_in_a_row} in a row")
        # One step's time may be another's where reports come late: the screen has the mean of the last ones.
        self._recent.append((values["tokens"], seconds))
        speed = sum(tokens for tokens, _ in self._recent) / sum(seconds for _, seconds in self._recent)
        self._screen.step(step, {**values, "tokens_per_second": speed, "mfu": self._speed.mfu(speed)})
        self._call({"kind": "train", "step": step, **values})

    def _values(self, fetched: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the values of a step's line."""
        tokens = int(fetched["tokens"])
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
            "mfu": self._speed.mfu(tokens / seconds),
        }
        if self._config.step.mtp_layers:
            values["mtp_loss"] = _finite(fetched["mtp_loss"])
        if len(self.load):
            values |= {
                "entropy": float(fetched["entropy"]),
                "max_violation": float(fetched["max_violation"]),
                "dropped": int(fetched["dropped"]),
            }
        return values

    def held_out(self, step: int, losses: Mapping[str, HeldOutLoss]) -> None:
        """Write down the loss of each set that is held out after so many steps: ``loss`` is the first one's."""
        first, *_ = losses
        values: dict[str, Any] = {"loss": losses[first].loss, "targets": losses[first].num_targets}
        values |= {f"{LOSS_OF}{name}": losses[name].loss for name in losses if name != HELD_OUT}
        self._metrics.held_out(step, values)
        others = "".join(f"; {name} {losses[name].loss:.4f}" for name in losses if name != first)
        what = "" if first == HELD_OUT else f" on {first}"
        self.say(f"after step {step}: held-out loss{what} {losses[first].loss:.4f} nats per target{others}")
        self._call({"kind": "eval", "step": step, **values})
        self.restart_clock()

    def sample(self, step: int, sample: TextSample) -> None:
        """Write down what the model writes after so many steps."""
        self._metrics.sample(step, sample.prompt, sample.text)
        prompt, text = (json.dumps(part, ensure_ascii=False) for part in (sample.prompt, sample.text))  # in one line
        self.say(f"after step {step}: {prompt} goes on {text}")
        self._call({"kind": "sample", "step": step, "prompt": sample.prompt, "text": sample.text})
        self.restart_clock()

    def event(self, step: int, what: str, text: str = "") -> None:
        """Write down an event, such as ``resumed``, ``interrupted``, ``skipped`` or ``checkpoint``."""
        self._metrics.event(step, what, text)
        self._call({"kind": "event", "step": step, "what": what, "text": text})

    def say(self, text: str) -> None:
        """Print a line."""
        self._screen.say(text)

    def start(self, step: int) -> None:
        """Show that training goes on after that many steps."""
        self._screen.start(step)
        self.restart_clock()

    def stop(self) -> None:
        """Show that training has ended."""
        self._screen.stop()

    def restart_clock(self) -> None:
        """Begin the time of the next step now: what was done since the last one is no step."""
        self._since = time.perf_counter()

    def flush(self) -> None:
        """Flush all lines to disk."""
        self._metrics.flush()

    def abandon(self) -> None:
        """Have the files close without another error, as one has ended the run."""
        self._metrics.abandon()

    def _call(self, line: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            try:
                answers = [callback(line) for callback in self._callbacks]
            except OSError as error:  # one of the run's own would mean that its files cannot be written
                raise RuntimeError(f"a callback of the run raised {type(error).__name__}: {error}") from error
            self.stop_requested |= any(answer is True for answer in answers)


def moe_layers(config: ResolvedConfig) -> list[int]:
    """List the numbers of the layers with experts whose load is counted, multi-token prediction's last."""
    model, modules = config.step.model, config.step.mtp_layers
    return [*model.moe_layers, *range(model.num_layers, model.num_layers + modules)]


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
