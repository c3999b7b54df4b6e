"""Requests to stop a run: SIGTERM and SIGINT are remembered until the current step is done."""

import signal
from types import TracebackType

from raggedmoe.launch.stop_signals import StopSignals


class Interruption:
    """A context in which the first request to stop is only remembered, while a second one stops at once.

    Outside of it, before there is anything to save, signals do what they do by default; so they do throughout a run
    that a thread other than the main one has started.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._signals = StopSignals(self._remember)

    def __enter__(self) -> "Interruption":
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, traceback)

    @property
    def reason(self) -> str:
        """Why the run stops, to be printed; in a run of several processes the signal may have gone to another."""
        return self.signal or "a signal to another process"

    def _remember(self, number: signal.Signals) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number.name
