"""Being asked to stop: SIGTERM and SIGINT are remembered until the step under way is done."""

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Inside a ``with``, the first signal is only remembered; a second one stops at once.

    Outside, before there is anything to save, signals do what they do by default.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def reason(self) -> str:
        """What a run that stops says of it; of several processes perhaps only one was asked."""
        return self.signal or "a signal to another process"

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
