"""Builds the page that compares runs: results side by side, curves in one picture, the settings that differ."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape

from raggedmoe.storage import AnyPath
from raggedmoe.storage.trees import make_folder, replace_file
from raggedmoe.train.loop.metrics import METRICS
from raggedmoe.train.loop.record import RUN, RunRecord, Series, get_typed, is_number, series
from raggedmoe.train.report import page as html
from raggedmoe.train.report.curves import smoothing_window, spikes
from raggedmoe.train.report.figures import Curve, Marks, curves_svg, require_matplotlib
from raggedmoe.train.report.page import NOTHING, compact, duration, number, whole
from raggedmoe.train.report.tables import flat

COMPARISON = "comparison.html"
RUN_COLOURS = ("blue", "orange", "green", "red")
MAX_RUNS = 2 * len(RUN_COLOURS)  # each colour has a whole and a dashed line
# Settings that say where a run is and not what it is.
PLACES = ("base_output_directory", "run_name")


def write_comparison(runs: Sequence[RunRecord], out: AnyPath | None = None) -> AnyPath:
    """Write the page that compares runs, by default into the folder of the first, and return its path."""
    require_matplotlib()
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"expected 2 to {MAX_RUNS} runs to compare, got {len(runs)}: more cannot be told apart")
    names = _names(runs)
    sections = [
        f"<header><h1>{escape(', '.join(names))}</h1>",
        f'<p class="lead">{len(runs)} runs side by side, of which each has a report of its own</p></header>',
        *(html.missing(f"{name}: {problem}") for name, run in zip(names, runs) for problem in run.problems),
        _results(runs, names),
        _figures("Loss", runs, names, (*LOSSES, *_of_named_sets(runs))),
        _figures("Expert load", runs, names, LOADS),
        _figures("Speed", runs, names, SPEEDS),
        _differences(runs, names),
        f'<footer class="sub">Made by raggedmoe report from {METRICS} and {RUN} of each run.</footer>',
    ]
    path = runs[0].folder / COMPARISON if out is None else out
    make_folder(path.parent)
    replace_file(path, html.page(f"{', '.join(names)}: raggedmoe training reports", sections).encode())
    return path


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs, and their folders where several have one name."""
    counts = Counter(run.name for run in runs)
    return [run.name if counts[run.name] == 1 else str(run.folder) for run in runs]


def _results(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Make the table of what came of each run, a column each."""
    window = _window(runs)
    figures: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
        ("Begins with", _origin),
        ("Held-out loss", lambda run: number(_held_out(run).last)),
        ("Best held-out loss", lambda run: number(_held_out(run).finite.min(initial=math.inf))),
        *((f"Loss on {name}", _last_loss_on(name)) for name in _named_sets(runs)),
        ("Training loss", lambda run: number(run.series("loss").mean_of_last(window))),
        ("Steps", lambda run: whole(run.train[-1]["step"]) if run.train else NOTHING),
        ("Tokens", lambda run: compact(run.total("tokens"))),
        ("Tokens per second, median", lambda run: whole(run.series("tokens_per_second").median)),
        ("Seconds of all steps", lambda run: duration(run.total("seconds"))),
        ("Dropped slots", lambda run: whole(run.total("dropped"))),
        ("Skipped steps", lambda run: whole(len(run.skipped_steps))),
    )
    rows = [
        (f'<td class="key">{escape(title)}</td>', *(escape(figure(run)) for run in runs)) for title, figure in figures
    ]
    return html.section("Results", html.table(("", *names), rows, name="results beside"))


def _named_sets(runs: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.named_sets))


def _last_loss_on(name: str) -> Callable[[RunRecord], str]:
    return lambda run: number(run.loss_on(name).last)


def _origin(run: RunRecord) -> str:
    """Say which other run a run began with."""
    parent = get_typed(run.info, "parent", dict)
    if not parent:
        return "new parameters"
    what = "all of" if parent.get("state") == "all" else "the weights of"
    return f"{what} step {parent.get('step')} of {parent.get('run')}"


def _window(runs: Sequence[RunRecord]) -> int:
    """Return over how many steps the curves of all runs are averaged, so that none looks rougher than another."""
    return max(smoothing_window(run) for run in runs)


def _held_out(run: RunRecord) -> Series:
    return series(run.held_out, "loss")


Values = Callable[[RunRecord, int], Series]  # of a run, averaged over so many steps


def _values(name: str) -> Values:
    return lambda run, window: run.series(name)


def _smooth(name: str) -> Values:
    return lambda run, window: run.series(name).smooth(window)


HELD_OUT = "Held-out loss (nats per token)"
# The pictures of a section: heading, values of a run, and whether the axis begins at 0.
LOSSES: tuple[tuple[str, Values, bool], ...] = (
    ("Training loss (nats per token), smoothed", _smooth("loss"), False),
    (HELD_OUT, lambda run, window: _held_out(run), False),
    ("Learning rate", _values("learning_rate"), True),
    ("Gradient norm, smoothed", _smooth("grad_norm"), False),
)


def _of_named_sets(runs: Sequence[RunRecord]) -> tuple[tuple[str, Values, bool], ...]:
    """List the pictures of the loss on each set that has a name."""

    def picture(name: str) -> tuple[str, Values, bool]:
        return f"{HELD_OUT}: {name}", lambda run, window: run.loss_on(name), False

    return tuple(map(picture, _named_sets(runs)))


LOADS: tuple[tuple[str, Values, bool], ...] = (
    ("Entropy of the load (nats), smoothed", _smooth("entropy"), False),
    ("Largest violation of balance, smoothed", _smooth("max_violation"), True),
)
SPEEDS: tuple[tuple[str, Values, bool], ...] = (("Tokens per second, smoothed", _smooth("tokens_per_second"), True),)


def _figures(
    heading: str, runs: Sequence[RunRecord], names: Sequence[str], pictures: tuple[tuple[str, Values, bool], ...]
) -> str:
    """Draw each value of all runs in one picture, over the steps."""
    marks, window, figures = _branch_marks(runs), _window(runs), []
    for title, values, from_zero in pictures:
        curves = []
        for number_of_run, (run, name) in enumerate(zip(runs, names)):
            one = values(run, window)
            if one.finite.size:
                colour, dashed = RUN_COLOURS[number_of_run % len(RUN_COLOURS)], number_of_run >= len(RUN_COLOURS)
                style = "points" if title.startswith(HELD_OUT) else "line"
                curves.append(Curve(series=one, label=name, colour=colour, style=style, dashed=dashed))
        if curves:
            logarithmic = not from_zero and any(spikes(curve.series) for curve in curves)
            svg = curves_svg(title, curves, marks=marks, from_zero=from_zero, logarithmic=logarithmic)
            figures.append(html.figure(title, svg))
    if not figures:
        return html.section(heading, html.missing(f"No run has a curve of this: {METRICS} has no such values."))
    return html.section(heading, html.columns(figures))


def _branch_marks(runs: Sequence[RunRecord]) -> list[Marks]:
    """Mark the steps at which runs went on from the whole state of another."""
    parents = (get_typed(run.info, "parent", dict) for run in runs)
    steps = {parent["step"] for parent in parents if parent.get("state") == "all" and is_number(parent.get("step"))}
    return [Marks(steps=sorted(steps), label="branched", colour="muted")] if steps else []


def _differences(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """List the settings that are not the same in all runs."""
    settings = [dict(flat(get_typed(run.info, "settings", dict))) for run in runs]
    for run, of_run in zip(runs, settings):
        if "devices" in run.info:
            of_run["devices"] = json.dumps(run.info["devices"])
    different = [
        name
        for name in dict.fromkeys(name for of_run in settings for name in of_run)
        if name not in PLACES and len({of_run.get(name) for of_run in settings}) > 1
    ]
    if not different:
        return html.section("Settings", html.paragraph("All settings of the runs are the same."))
    rows = [
        (f'<td class="key">{html.code(name)}</td>', *(html.code(of_run.get(name, NOTHING)) for of_run in settings))
        for name in different
    ]
    table = html.table(("Setting", *names), rows, name="differences beside")
    return html.section("Settings", html.paragraph("Those that are not the same in all runs."), table)
