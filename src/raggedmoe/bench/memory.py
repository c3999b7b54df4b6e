"""The peak memory of one call in this process, as Linux counts it."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def call_and_peak(run: Callable[[], Any]) -> tuple[Any, int | None]:
    """Call, and say how far the resident memory rose above what was resident before; None where nobody counts it."""
    gc.collect()
    _give_back_freed_memory()
    before = _resident("VmRSS")
    try:
        CLEAR.write_text("5")  # resets VmHWM, the peak
    except OSError:
        return run(), None
    result = run()
    peak = _resident("VmHWM")
    return result, None if before is None or peak is None else max(peak - before, 0)


def _resident(name: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith(f"{name}:")), None)
    return None if kibibytes is None else 1024 * int(kibibytes)


def _give_back_freed_memory() -> None:
    """Let the C library return what earlier calls freed; otherwise a call would use it again, uncounted."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return
