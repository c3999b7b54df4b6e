"""The record of a run, for its report: its files, which may be old or incomplete, and series made of them."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import numpy as np

from raggedmoe.interop.json_file import read_json_object
from raggedmoe.storage import AnyPath
from raggedmoe.storage.appended import is_appended
from raggedmoe.train.loop.metrics import LOAD, LOSS_OF, METRICS, read_jsonl

RUN, REPORT = "run.json", "report.html"
# What a run writes are float32's numbers, and counts. Beyond these limits sums, axes and int64 would overflow: such a
# value counts as unknown, and a line with such a step is left out.
LARGEST_VALUE, LARGEST_STEP = 1e100, 2**53
DEAD_LINES = 10  # an expert that got nothing in so many last lines of load.jsonl counts as dead


@dataclass(frozen=True, kw_only=True)
class Series:
    """One value over the steps of a run; NaN where a line lacks it."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """The finite values."""
        return self.values[np.isfinite(self.values)]

    @property
    def last(self) -> float:
        """The last known value, NaN if there is none."""
        return float(self.finite[-1]) if self.finite.size else math.nan

    @property
    def median(self) -> float:
        """The median of the known values, NaN if there are none."""
        return float(np.median(self.finite)) if self.finite.size else math.nan

    def mean_of_last(self, window: int) -> float:
        """Average the known values among the last ``window`` ones; NaN if there are none."""
        known = self.values[-window:][np.isfinite(self.values[-window:])]
        return float(known.mean()) if known.size else math.nan

    def smooth(self, window: int) -> "Series":
        """Average the known values around each step, over fewer of them near the start, where curves are steep."""
        half, size = window // 2, len(self.values)
        known = np.isfinite(self.values)
        # Each sum by itself: differences of a running sum would be lost after one step of 1e30.
        around = np.ones(2 * half + 1)
        sums, counts = (np.convolve(x, around)[half : half + size] for x in (np.where(known, self.values, 0.0), known))
        for place in range(min(half, size)):
            sums[place] = self.values[: 2 * place + 1][known[: 2 * place + 1]].sum()
            counts[place] = known[: 2 * place + 1].sum()
        means = np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0)
        return Series(steps=self.steps, values=means)


@dataclass(frozen=True, kw_only=True)
class LoadHistory:
    """The number of tokens of each expert between recorded steps, ``counts [lines, layers, E]``."""

    steps: np.ndarray
    counts: np.ndarray
    layers: list[int]  # the layers' numbers in the model
    num_left_out: int  # lines that are no counts, or whose shape differs from the last one's

    @property
    def dead_experts(self) -> list[tuple[int, int]]:
        """The (layer, expert) pairs of experts that got no token in the last lines."""
        idle = self.counts[-DEAD_LINES:].sum(axis=0) == 0
        return [(self.layers[layer], int(expert)) for layer, expert in np.argwhere(idle)]

    @property
    def dead_since(self) -> int:
        """The first step that those last lines cover."""
        before = self.steps[:-DEAD_LINES]
        return int(before[-1]) + 1 if before.size else 1

    def until(self, step: int) -> "LoadHistory | None":
        """Return the history up to that step; None if there is none."""
        kept = self.steps <= step
        return replace(self, steps=self.steps[kept], counts=self.counts[kept]) if kept.any() else None

    def in_bins(self, max_bins: int) -> "BinnedLoad":
        """Sum the counts over equal intervals of steps, so that a gap in the record is a gap in the picture."""
        between = np.diff(self.steps)
        usual = float(np.median(between)) if between.size else float(max(self.steps[0], 1))
        last = float(self.steps[-1])
        first = max(float(self.steps[0]) - usual, min(0.0, float(self.steps[0]) - 1))
        num_bins = max(1, min(max_bins, round((last - first) / usual)))
        # A line holds what came up to its step, so a bin is open on the left and closed on the right.
        place = np.ceil((self.steps - first) / (last - first) * num_bins - 1e-9).astype(int) - 1
        sums = np.zeros((num_bins, *self.counts.shape[1:]))
        np.add.at(sums, np.clip(place, 0, num_bins - 1), self.counts)
        mean = sums.mean(axis=2, keepdims=True)
        relative = np.divide(sums, mean, out=np.full(sums.shape, np.nan), where=mean > 0)
        return BinnedLoad(first=first, last=last, relative=relative)


@dataclass(frozen=True, kw_only=True)
class BinnedLoad:
    """The load over the mean of the layer's experts, ``relative [bins, layers, E]``; NaN where nothing was recorded."""

    first: float
    last: float
    relative: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The lines of a run by kind, what run.json says, and what was missing or could not be read."""

    folder: AnyPath
    info: dict[str, Any]
    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    events: list[dict[str, Any]]
    load: LoadHistory | None
    problems: list[str]
    samples: list[dict[str, Any]] = field(default_factory=list)  # texts that the model wrote at evaluations

    @property
    def name(self) -> str:
        """The name of the run."""
        return str(self.info.get("name") or self.folder.resolve().name)

    @property
    def model(self) -> dict[str, Any]:
        """What run.json says of the model."""
        return get_typed(self.info, "model", dict)

    def series(self, name: str) -> Series:
        """Return a value of the training steps as a series."""
        return series(self.train, name)

    @property
    def named_sets(self) -> list[str]:
        """The names of the sets that the run was evaluated on beside what it held out of its own data."""
        keys = dict.fromkeys(key for line in self.held_out for key in line if key.startswith(LOSS_OF))
        return [key.removeprefix(LOSS_OF) for key in keys]

    def loss_on(self, name: str) -> Series:
        """Return the loss on a set of that name as a series."""
        return series(self.held_out, f"{LOSS_OF}{name}")

    def until(self, step: int) -> "RunRecord":
        """Return the record of the run as it was after that step."""

        def before(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [line for line in lines if line["step"] <= step]

        load = None if self.load is None else self.load.until(step)
        return replace(
            self,
            train=before(self.train),
            held_out=before(self.held_out),
            samples=before(self.samples),
            events=before(self.events),
            load=load,
        )

    def total(self, name: str) -> float:
        """Sum a value over all training steps; NaN if no line has it."""
        known = self.series(name).finite
        return float(known.sum()) if known.size else math.nan

    def steps_of(self, what: str) -> list[int]:
        """List the steps at which such an event happened."""
        return sorted({event["step"] for event in self.events if event.get("what") == what})

    @property
    def skipped_steps(self) -> list[int]:
        """Steps whose update was left out, by their own line or by an event."""
        by_line = {line["step"] for line in self.train if _float(line.get("skipped")) > 0}
        return sorted(by_line | set(self.steps_of("skipped")))


def read_run(folder: AnyPath) -> RunRecord:
    """Read the files of a run. A missing file is a problem that the report shows; a folder without any is refused."""
    if not (is_appended(folder / METRICS) or (folder / RUN).is_file()):
        raise ValueError(
            f"{folder}: expected the folder of a run, with {METRICS} or {RUN}, found neither; name another"
        )
    problems = []
    info: dict[str, Any] = {}
    try:
        info = read_json_object(folder / RUN)
    except FileNotFoundError:
        problems.append(f"{RUN} is missing: what ran, on what and with which settings is not known.")
    except ValueError:
        problems.append(f"{RUN} could not be read: it is no JSON object, perhaps cut off.")
    lines = []
    if is_appended(folder / METRICS):
        written = read_jsonl(folder / METRICS)
        lines = [line for line in written if _is_step(line.get("step"))]
        if len(lines) < len(written):
            num = len(written) - len(lines)
            problems.append(f"{num} lines of {METRICS} are left out: they have no whole number below 2**53 as step.")
    else:
        problems.append(f"{METRICS} is missing: the run was stopped before its first step, or the file was moved.")
    by_kind = {
        # The last line of a step counts: a run resumed by other means may have written one twice.
        kind: sorted({line["step"]: line for line in lines if line.get("kind") == kind}.values(), key=_step)
        for kind in ("train", "eval", "sample")
    }
    return RunRecord(
        folder=folder,
        info=info,
        train=by_kind["train"],
        held_out=by_kind["eval"],
        samples=by_kind["sample"],
        events=sorted((line for line in lines if line.get("kind") == "event"), key=_step),
        load=_load_history(folder / LOAD, get_typed(get_typed(info, "model", dict), "moe_layers", list)),
        problems=problems,
    )


def get_typed(values: dict[str, Any], name: str, kind: type) -> Any:
    """Return a value if it has that type, or else an empty one, as run.json may be of another version."""
    value = values.get(name)
    return value if isinstance(value, kind) else kind()


def series(lines: list[dict[str, Any]], name: str) -> Series:
    """Make a series of one value of the lines."""
    return Series(
        steps=np.array([line["step"] for line in lines], dtype=np.int64),
        values=np.array([_float(line.get(name)) for line in lines], dtype=np.float64),
    )


def _step(line: dict[str, Any]) -> int:
    return line["step"]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Tell whether a value is a number that can be computed with: neither NaN nor past `LARGEST_VALUE`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_VALUE


def _is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_STEP


def _float(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def _load_history(path: AnyPath, layers: list[Any]) -> LoadHistory | None:
    if not is_appended(path):
        return None
    tables: dict[int, np.ndarray] = {}
    num_lines = 0
    for line in read_jsonl(path):
        num_lines += 1
        try:
            table = np.array(line.get("load"), dtype=np.float64)
        except (TypeError, ValueError, OverflowError):  # layers of different lengths, no numbers, or 400 digits
            continue
        if _is_step(line.get("step")) and table.ndim == 2 and table.size and (abs(table) <= LARGEST_VALUE).all():
            tables[line["step"]] = table
    if not tables:
        return None
    steps = sorted(tables)
    steps = [step for step in steps if tables[step].shape == tables[steps[-1]].shape]
    counts = np.stack([tables[step] for step in steps])
    numbers = [layer for layer in layers if isinstance(layer, int)]
    return LoadHistory(
        steps=np.array(steps, dtype=np.int64),
        counts=counts,
        layers=numbers if len(numbers) == counts.shape[1] else list(range(counts.shape[1])),
        num_left_out=num_lines - len(steps),
    )
