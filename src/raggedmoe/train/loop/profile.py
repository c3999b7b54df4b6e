"""The profiler, which records a trace of a few steps for xprof (`profiler=xplane`)."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps the profiler traces."""

    skip: int  # steps of this process before the trace
    steps: int

    def __post_init__(self) -> None:
        if self.skip < 0 or self.steps < 1:
            raise ValueError(
                f"expected skip_first_n_steps_for_profiler >= 0 and profiler_steps >= 1, got {self.skip}, {self.steps}"
            )


class Trace:
    """Records the steps that its configuration names; without a configuration it does nothing."""

    def __init__(self, config: ProfileConfig | None, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._done = 0
        self._recording = False
        self.text: str | None = None  # what was recorded, and where
        self._begin_if_due()

    def step_done(self, result: Any) -> None:
        """Count a step that was started; ``result`` is what it will return."""
        if self._config is None:
            return
        self._done += 1
        if self._done in (self._config.skip, self._config.skip + self._config.steps):
            jax.block_until_ready(result)  # whole steps are in the trace, and no other
        self._begin_if_due()
        if self._done >= self._config.skip + self._config.steps:
            self.close()

    def close(self) -> None:
        """Stop recording, and write the trace."""
        if self._recording:
            jax.profiler.stop_trace()
            self._recording = False
            assert self._config is not None
            self.text = f"trace of {self._done - self._config.skip} steps in {self._folder}"

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin_if_due(self) -> None:
        if self._config is not None and self._done == self._config.skip:
            jax.profiler.start_trace(str(self._folder))
            self._recording = True
