"""The metrics files of a run: JSON lines of its steps and of its experts' load, and TensorBoard's events."""

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

import numpy as np

from raggedmoe.storage import AnyPath, ObjectPath
from raggedmoe.storage.appended import (
    SEGMENT_BYTES,
    is_appended,
    open_appended,
    read_appended,
    rewrite_appended,
)
from raggedmoe.storage.lease import check_lease
from raggedmoe.storage.trees import make_folder, upload

METRICS = "metrics.jsonl"
LOAD = "load.jsonl"
TENSORBOARD = "tensorboard"
LOSS_OF = "loss/"  # before the name of a set, in the line of an evaluation
TENSORBOARD_SECONDS = 10.0  # between two flushes while nobody asks for one; each takes milliseconds


class MetricsWriter:
    """Appends to ``metrics.jsonl``, ``load.jsonl`` and TensorBoard's event files in a run's folder.

    ``resume_step=None`` starts a run and refuses a folder that has metrics. A number resumes the run after that step:
    lines that a killed run wrote past it are removed, as those steps are done again. Each line is handed to the
    operating system at once, for those who watch the file; in an object store all lines are written every few seconds.
    """

    def __init__(self, folder: AnyPath, *, resume_step: int | None, tensorboard: bool = True) -> None:
        metrics, load = folder / METRICS, folder / LOAD
        for path in (metrics, load):
            if resume_step is None and is_appended(path) and read_jsonl(path):
                raise ValueError(
                    f"{path}: expected no such lines where a run starts, got those of another run; resume that one, or "
                    "name a new folder"
                )
        if tensorboard:
            _require_tensorboard()
        make_folder(folder)
        for path in (metrics, load):
            _truncate_after(path, -1 if resume_step is None else resume_step)
        self._metrics, self._load = open_appended(metrics), open_appended(load)
        self._events = _TensorBoardFile(folder / TENSORBOARD, resume_step) if tensorboard else None
        self._is_closed = self._is_abandoned = False

    def train(self, step: int, values: Mapping[str, SupportsFloat | None]) -> None:
        """Write the values of a training step, such as ``loss``. A value that is not finite becomes null."""
        self._record("train", step, values)

    def held_out(self, step: int, values: Mapping[str, SupportsFloat | None]) -> None:
        """Write the values of an evaluation after that many steps."""
        self._record("eval", step, values)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Write how the model continues a prompt after that many steps."""
        self._metrics.append(_line({"kind": "sample", "step": int(step), "prompt": prompt, "text": text}))

    def event(self, step: int, what: str, text: str = "") -> None:
        """Write an event, such as ``resumed``, ``interrupted``, ``skipped`` or ``checkpoint``."""
        self._metrics.append(_line({"kind": "event", "step": int(step), "what": what, "text": text}))

    def load(self, step: int, load: Sequence[Sequence[int]] | np.ndarray) -> None:
        """Write how many tokens each expert got since the previous line, ``[layers, E]``."""
        counts = np.asarray(load)
        if counts.ndim != 2 or not (np.issubdtype(counts.dtype, np.number) and (counts == np.floor(counts)).all()):
            raise ValueError(
                f"expected load as whole counts [layers, experts], got an array of {counts.dtype}{list(counts.shape)}"
            )
        self._load.append(_line({"step": int(step), "load": counts.astype(np.int64).tolist()}))

    def flush(self) -> None:
        """Flush all lines to disk, so that they survive a power cut. Call it before a checkpoint commits."""
        for file in (self._metrics, self._load, self._events):
            if file is not None:
                file.flush()

    def abandon(self) -> None:
        """Have `close` raise nothing, as what cannot be written has ended the run already."""
        self._is_abandoned = True

    def close(self) -> None:
        """Flush and close the files. Closing twice does no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        suppressed = (OSError,) if self._is_abandoned else ()
        with contextlib.suppress(*suppressed), contextlib.ExitStack() as closing:
            for file in (self._metrics, self._load, self._events):
                if file is not None:
                    closing.callback(file.close)
            self.flush()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            self.abandon()
        self.close()

    def _record(self, kind: str, step: int, values: Mapping[str, SupportsFloat | None]) -> None:
        numbers = {name: _number(value) for name, value in values.items()}
        if taken := {"kind", "step"} & numbers.keys():
            raise ValueError(f"expected other names of values than kind and step, got {', '.join(sorted(taken))}")
        self._metrics.append(_line({"kind": kind, "step": int(step), **numbers}))
        if self._events is not None:
            group = "held_out" if kind == "eval" else kind
            self._events.scalars(int(step), {f"{group}/{k}": v for k, v in numbers.items() if v is not None})


class NoMetrics:
    """Takes the place of `MetricsWriter` in all processes but the first, and writes nothing."""

    def train(self, step: int, values: Mapping[str, SupportsFloat | None]) -> None: ...

    def held_out(self, step: int, values: Mapping[str, SupportsFloat | None]) -> None: ...

    def sample(self, step: int, prompt: str, text: str) -> None: ...

    def event(self, step: int, what: str, text: str = "") -> None: ...

    def load(self, step: int, load: Sequence[Sequence[int]] | np.ndarray) -> None: ...

    def flush(self) -> None: ...

    def abandon(self) -> None: ...

    def __enter__(self) -> "NoMetrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def read_jsonl(path: AnyPath) -> list[dict[str, Any]]:
    """Read a file of JSON objects, one a line. An incomplete last line, which a killed run leaves, is left out.

    NaN and Infinity, which are no JSON but which some write, read as None, as does our null.
    """
    return [values for _, values in _numbered_lines(read_appended(path), path)]


def last_step(path: AnyPath) -> int:
    """Return the last step that a file has a line of; -1 if it has none."""
    return max((step for step, _ in _steps(read_appended(path), path)), default=-1)


def _numbered_lines(content: bytes, path: AnyPath) -> list[tuple[int, dict[str, Any]]]:
    lines = content.split(b"\n")
    numbered = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line, parse_constant=lambda name: None)
            if not isinstance(values, dict):
                raise ValueError(f"a {type(values).__name__}")
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no newline follows: the writer was stopped in the middle
                break
            raise ValueError(
                f"{path}, line {number}: expected a JSON object, got {error}; remove the line or move the file away"
            ) from None
        numbered.append((number, values))
    return numbered


def _truncate_after(path: AnyPath, step: int) -> None:
    """Remove the lines after a step, and an incomplete last one."""
    rewrite_appended(
        path,
        lambda content, part: b"".join(_line(line) for line_step, line in _steps(content, part) if line_step <= step),
    )


def _steps(content: bytes, path: AnyPath) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterate over the lines with their steps, which every line of a run to resume must have."""
    for number, values in _numbered_lines(content, path):
        if not isinstance(values.get("step"), int):
            raise ValueError(
                f"{path}, line {number}: expected a whole number as step, got {values.get('step')!r}; "
                "remove the line or move the file away"
            )
        yield values["step"], values


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _number(value: SupportsFloat | None) -> float | int | None:
    """Convert a value to a Python number; one that is not finite to None."""
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        value = np.asarray(value)
        value = int(value) if np.issubdtype(value.dtype, np.integer) else float(value)
    return value if math.isfinite(value) else None


def _require_tensorboard() -> None:
    try:
        import tensorboardX  # noqa: F401
    except ImportError:
        raise ValueError(
            "TensorBoard's events need the tensorboardX package; pip install 'raggedmoe[train]', or switch them off"
        ) from None


class _TensorBoardFile:
    """One event file, written in this thread; in an object store several, of which the last is written anew.

    tensorboardX's SummaryWriter hands events to a queue that its flush does not wait for, and names the file after
    the second, so that a run resumed within it would overwrite the file before. Hence its parts, and a number.
    """

    def __init__(self, folder: AnyPath, resume_step: int | None) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        make_folder(folder)
        self._folder, self._number = folder, len(list(folder.iterdir()))
        self._copies = tempfile.TemporaryDirectory(prefix="raggedmoe-") if isinstance(folder, ObjectPath) else None
        self._open_file()
        self._flushed = time.monotonic()
        if resume_step is not None:  # TensorBoard hides what earlier files have from this step on
            self._write(Event(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, values: dict[str, float | int]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(step=step, summary=summary))
        if time.monotonic() - self._flushed > TENSORBOARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._writer.flush()  # which calls fsync
        self._flushed = time.monotonic()
        if self._copies is not None:
            assert isinstance(self._folder, ObjectPath)
            check_lease(self._folder)
            upload(Path(self._copies.name), self._folder)
            [file] = Path(self._copies.name).iterdir()
            if file.stat().st_size >= SEGMENT_BYTES:
                self._writer.close()
                file.unlink()
                self._open_file()

    def close(self) -> None:
        self._writer.close()
        if self._copies is not None:
            self._copies.cleanup()

    def _open_file(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        folder = self._folder if self._copies is None else Path(self._copies.name)
        self._writer = EventsWriter(str(folder / "events"), f".{self._number:06}")
        self._number += 1

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)
