"""The output of a run: a progress bar on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Screen:
    """Prints to standard output. `step` moves the progress bar, or prints a line every ``line_period`` steps."""

    def __init__(self, steps: int, line_period: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._steps, self._line_period = steps, line_period
        self._progress: Progress | None = None
        self._task: Any = None

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False)

    def start(self, step: int) -> None:
        """Show that training begins after that many steps."""
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=16),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=self._steps, completed=step)

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the figures of a step."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=format_figures(values))
        elif step % self._line_period == 0 or step == self._steps:
            self.say(line(step, self._steps, values))

    def stop(self) -> None:
        """Remove the progress bar, as training has ended."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def line(step: int, steps: int, values: Mapping[str, Any]) -> str:
    """Format the line of a step for a file or a pipe; it begins like MaxText's, so that searches for that find it."""
    figures = ", ".join(f"{name}: {text}" for name, text in _figures(values).items())
    return f"completed step: {step}, of: {steps}, seconds: {values['seconds']:.3f}, {figures}"


def format_figures(values: Mapping[str, Any]) -> str:
    """Format the figures of a step for the progress bar."""
    return "  ".join(f"{name} {text}".strip() for name, text in _figures(values).items())


def _figures(values: Mapping[str, Any]) -> dict[str, str]:
    """Format the figures of a step by name, the loss last."""
    figures = {"tokens/s": f"{values['tokens_per_second']:.0f}", "MFU": f"{values['mfu']:.0%}"}
    if "entropy" in values:
        figures |= {
            "entropy": f"{values['entropy']:.2f}",
            "max violation": f"{values['max_violation']:.2f}",
            "dropped": str(values["dropped"]),
        }
    if values["skipped"]:
        figures["skipped"] = "yes"
    return figures | {"loss": "not finite" if values["loss"] is None else f"{values['loss']:.3f}"}
