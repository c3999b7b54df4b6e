"""The profiler, which records a trace of a few steps for xprof (`profiler=xplane`)."""

import math
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from raggedmoe.storage import AnyPath, ObjectPath
from raggedmoe.storage.trees import remove, upload
from raggedmoe.train.settings.sections import RunConfig


class Trace:
    """Records the steps that the settings of the profiler name; without a profiler it does nothing."""

    def __init__(self, config: RunConfig, folder: AnyPath) -> None:
        self._folder = folder
        self._local: Path | None = None  # where the profiler writes
        self._first = config.skip_first_n_steps_for_profiler if config.traces else math.inf
        self._last = self._first + config.profiler_steps
        self._done = 0
        self._recording = False
        self.text: str | None = None  # what was recorded, and where
        self._begin_if_due()

    def step_done(self, result: Any) -> None:
        """Count a step that was started; ``result`` is what it will return."""
        self._done += 1
        if self._done in (self._first, self._last):
            jax.block_until_ready(result)  # whole steps are in the trace, and no other
        self._begin_if_due()
        if self._done >= self._last:
            self.close()

    def close(self) -> None:
        """Stop recording, and write the trace."""
        if self._recording:
            jax.profiler.stop_trace()
            self._recording = False
            if isinstance(self._folder, ObjectPath):
                assert self._local is not None
                upload(self._local, self._folder)
                remove(self._local)
            self.text = f"trace of {self._done - self._first} steps in {self._folder}"

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin_if_due(self) -> None:
        if self._done == self._first:
            if isinstance(self._folder, Path):
                self._local = self._folder
            else:
                self._local = Path(tempfile.mkdtemp(prefix="raggedmoe-"))
            jax.profiler.start_trace(str(self._local))
            self._recording = True
