"""SIGTERM and SIGINT as requests to stop: a sender that repeats itself asks once."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST = 2.0  # seconds from the first signal in which further ones are the same request


class StopSignals:
    """Inside a ``with``, calls ``heed`` with the first signal, and with each that comes after 2 s.

    Those that come before count as the first. The ``with`` does not end within that time: outside signals do what they
    did before, and one of those that were sent together would end the process while it ends by itself.
    """

    def __init__(self, heed: Callable[[signal.Signals], None]) -> None:
        self._heed = heed
        self._first: float | None = None  # when it came
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._first is not None:
            time.sleep(max(0.0, self._first + SAME_REQUEST - time.monotonic()))
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now < self._first + SAME_REQUEST:
            return
        if self._first is None:
            self._first = now
        self._heed(signal.Signals(number))
