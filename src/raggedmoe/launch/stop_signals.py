"""SIGTERM and SIGINT as requests to stop, where signals that are repeated within two seconds are one request."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_SECONDS = 2.0  # seconds from the first signal in which further ones are the same request


class StopSignals:
    """A context that calls ``handle`` with the first stop signal, and with each that comes 2 s or more after it.

    Signals within those 2 s count as the first one. The context does not end before they are over: outside of it a
    signal does what it did before, and a repeated one would kill the process while it ends by itself.

    Python takes signals in its main thread alone: in another one the context changes nothing.
    """

    def __init__(self, handle: Callable[[signal.Signals], None]) -> None:
        self._handle = handle
        self._first: float | None = None  # when it came
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._first is not None:
            time.sleep(max(0.0, self._first + REPEAT_SECONDS - time.monotonic()))
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now < self._first + REPEAT_SECONDS:
            return
        if self._first is None:
            self._first = now
        self._handle(signal.Signals(number))
