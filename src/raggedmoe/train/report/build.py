"""Builds the report of a run: one HTML page of results, curves, kernels and settings, which loads nothing else."""

import math
from html import escape

from raggedmoe.storage import AnyPath
from raggedmoe.storage.trees import make_folder, replace_file
from raggedmoe.train.loop.metrics import LOAD, METRICS
from raggedmoe.train.loop.record import DEAD_LINES, REPORT, RUN, RunRecord, get_typed, is_number, read_run, series
from raggedmoe.train.report import page as html
from raggedmoe.train.report.curves import drops_section, loss_section, smoothing_window, speed_section, why_no_mfu
from raggedmoe.train.report.figures import require_matplotlib
from raggedmoe.train.report.load import load_section
from raggedmoe.train.report.page import NOTHING, compact, duration, number, percent, whole
from raggedmoe.train.report.tables import events_section, kernels_section, samples_section, settings_section


def write_report(run: AnyPath, out: AnyPath | None = None, *, step: int | None = None) -> AnyPath:
    """Write the report of a run, by default to ``report.html`` in its folder, and return its path.

    Equal files give equal pages, byte for byte. The page says what an old or incomplete run lacks. With a ``step`` it
    is that of the run as it was then.
    """
    require_matplotlib()
    record = read_run(run) if step is None else read_run(run).until(step)
    sections = [
        _headline(record),
        loss_section(record),
        *samples_section(record),
        load_section(record),
        html.columns([speed_section(record), drops_section(record)]),
        kernels_section(record),
        events_section(record),
        settings_section(record),
        f'<footer class="sub">Made by raggedmoe report from {METRICS}, {LOAD} and {RUN}.</footer>',
    ]
    path = run / (REPORT if step is None else f"report-{step}.html") if out is None else out
    make_folder(path.parent)
    replace_file(path, html.page(f"{record.name}: raggedmoe training report", sections).encode())
    return path


def _headline(run: RunRecord) -> str:
    """Make the head of the page: the name, what ran, problems, and the most important figures."""
    held_out, window = series(run.held_out, "loss"), smoothing_window(run)
    best = number(held_out.finite.min()) if held_out.finite.size else NOTHING
    steps, seconds = (run.train[-1]["step"] if run.train else math.nan), run.total("seconds")
    dropped, skipped = run.total("dropped"), run.skipped_steps
    counted = run.series("skipped").finite.size or skipped
    dead, num_records = ([], 0) if run.load is None else (run.load.dead_experts, min(DEAD_LINES, len(run.load.steps)))
    recent = f"mean of the last {window} steps" if window > 1 else "last step"
    figures = [
        _tile("Held-out loss", number(held_out.last), f"best {best}", unknown="never measured"),
        _tile("Training loss", number(run.series("loss").mean_of_last(window)), recent, unknown="none is finite"),
        _tile("Steps", whole(steps), f"{duration(seconds)} in all" if math.isfinite(seconds) else ""),
        _tile("Tokens", compact(run.total("tokens")), "trained on"),
        _tile("Tokens per second", whole(run.series("tokens_per_second").median), "median"),
        _tile("MFU", percent(run.series("mfu").median), "median, of the peak FLOP/s", unknown=why_no_mfu(run)),
        _tile("Dropped", whole(dropped), "routed slots without an expert", bad=dropped > 0),
        _tile("Skipped steps", whole(len(skipped)) if counted else NOTHING, "update left out", bad=bool(skipped)),
        _tile(
            "Dead experts",
            NOTHING if run.load is None else whole(len(dead)),
            f"no token in the last {html.count(num_records, 'record')}",
            bad=bool(dead),
        ),
    ]
    return "\n".join(
        [
            f"<header><h1>{escape(run.name)}</h1>",
            f'<p class="lead">{escape(_what_ran(run))}</p></header>',
            *(html.missing(problem) for problem in run.problems),
            html.tiles(figures),
        ]
    )


def _tile(
    name: str, value: str, below: str, *, unknown: str = "not recorded", bad: bool = False
) -> tuple[str, str, str, bool]:
    return name, value, unknown if value == NOTHING else below, bad


def _what_ran(run: RunRecord) -> str:
    """Describe in one line the model, the hardware, the versions and the data."""
    model, info = run.model, run.info
    parts = []
    if model.get("name"):
        parts.append(str(model["name"]))
    if is_number(model.get("total")):
        active = f", {compact(model['active'])} active" if is_number(model.get("active")) else ""
        parts.append(f"{compact(model['total'])} parameters{active}")
    if model.get("num_experts"):
        layers = len(get_typed(model, "moe_layers", list)) or "?"
        top = f", {model['experts_per_token']} a token" if model.get("experts_per_token") else ""
        parts.append(f"{layers} MoE layers of {model['num_experts']} experts{top}")
    if info.get("hardware"):
        parts.append(f"{info['devices']} × {info['hardware']}" if info.get("devices") else str(info["hardware"]))
    parts.extend(f"{name} {info[key]}" for key, name in (("jax", "JAX"), ("raggedmoe", "raggedmoe")) if info.get(key))
    if info.get("data"):
        parts.append(f"data {info['data']}")
    return " · ".join(parts)
