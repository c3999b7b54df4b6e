"""The pictures of the report, as SVG in the page's fonts and colours."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raggedmoe.train.loop.record import BinnedLoad, Series

# 360 points wide: on a phone of 390 pixels a point of the figure is a pixel, on a desktop about one and a half.
WIDTH = 5.0
TEXT = 11.0  # points
MAX_POINTS = 400  # points of a curve; more cannot be told apart
MAX_BINS = 120  # columns of a heat map, over steps
MAX_ROWS = 256  # rows of a heat map, over experts
TOP_LOAD = 4.0  # where the colours of a heat map end

# matplotlib knows no CSS variables: it gets colours that occur nowhere else, which are replaced in its output.
COLOURS = {
    "ink": "#0a0b01",
    "muted": "#0a0b02",
    "grid": "#0a0b03",
    "blue": "#0a0b04",
    "orange": "#0a0b05",
    "green": "#0a0b06",
    "red": "#0a0b07",
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A series and how it is drawn: "raw" thin and pale, "line" strong, "points" joined marks."""

    series: Series
    label: str
    colour: str
    style: str = "line"
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Marks at steps where something happened: lines over the whole height, or crosses at the bottom."""

    steps: Sequence[int]
    label: str
    colour: str
    crosses: bool = False


def require_matplotlib() -> None:
    """Raise an error that says how to install matplotlib, if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("the report's pictures need the matplotlib package; pip install 'raggedmoe[plot]'") from None


def curves_svg(
    name: str,
    curves: Sequence[Curve],
    *,
    marks: Sequence[Marks] = (),
    logarithmic: bool = False,
    from_zero: bool = False,
    reference: tuple[float, str] | None = None,
) -> str:
    """Draw curves over steps, with a legend above them if there is more than one."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for curve in curves:
            _draw_curve(axes, curve)
        if reference is not None:
            level, label = reference
            axes.axhline(level, color=COLOURS["muted"], linewidth=1, linestyle=(0, (4, 3)), label=label)
        for mark in marks:
            _draw_marks(axes, mark)
        if logarithmic:
            axes.set_yscale("log")
        elif from_zero:
            largest = max((float(curve.series.finite.max(initial=0.0)) for curve in curves), default=0.0)
            axes.set_ylim(0, 1.06 * largest or 1.0)
        _style(axes, logarithmic)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            figure.legend(
                loc="outside upper left",
                ncols=3,
                frameon=False,
                fontsize=TEXT,
                labelcolor=COLOURS["ink"],
                handlelength=1.3,
                columnspacing=1.2,
                borderpad=0,
                borderaxespad=0.2,
                handletextpad=0.5,
            )

    return _svg(name, 2.5, draw)


def expert_load_svg(name: str, load: BinnedLoad, layer: int, top: float) -> str:
    """Draw the heat map of one layer: steps to the right, experts down; the colour is the load over the mean."""
    table = load.relative[:, layer].T
    num_experts = len(table)
    if num_experts > MAX_ROWS:
        table = np.stack([rows.mean(axis=0) for rows in np.array_split(table, MAX_ROWS)])
    height = 0.55 + min(3.6, max(0.9, 0.085 * len(table)))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _draw_heat(axes, table, load, top, num_experts)
        axes.set_ylabel("expert", color=COLOURS["muted"], fontsize=TEXT, labelpad=2)

    return _svg(name, height, draw)


def busiest_svg(name: str, load: BinnedLoad, layers: Sequence[int], top: float) -> str:
    """Draw the heat map of all layers: steps to the right, layers down; the colour is the busiest expert's load."""
    table = load.relative.max(axis=2).T
    height = 0.55 + min(3.6, max(0.5, 0.13 * len(table)))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _draw_heat(axes, table, load, top, len(table))
        places = sorted({round(place) for place in np.linspace(0, len(table) - 1, min(len(table), 6))})
        axes.set_yticks(places, [str(layers[place]) for place in places])
        axes.set_ylabel("layer", color=COLOURS["muted"], fontsize=TEXT, labelpad=2)

    return _svg(name, height, draw)


def scale_svg(top: float) -> str:
    """Draw the scale of the heat maps' colours."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        # From 0 to 1 as wide as from 1 to the top, as the colours are.
        values = np.concatenate([np.linspace(0, 1, 100), np.linspace(1, top, 100)])[None]
        axes.imshow(_rgba(values, top), extent=(0, 2, 0, 1), aspect="auto", interpolation="none")
        ticks = [0, 0.5, *(tick for tick in (1, 1.5, 2, 3, 4) if tick <= top and (tick != 1.5 or top == 2))]
        names = {0: "0, idle", 1: "1, fair share", TOP_LOAD: "≥ 4"}
        places = [tick if tick <= 1 else 1 + (tick - 1) / (top - 1) for tick in ticks]
        axes.set_xticks(places, [names.get(tick, f"{tick:g}") for tick in ticks])
        axes.set_yticks([])
        _frame(axes)
        # The outer labels would stick out of the figure.
        axes.get_xticklabels()[0].set_ha("left")
        axes.get_xticklabels()[-1].set_ha("right")

    return _svg("scale", 0.55, draw)


def top_of_scale(load: BinnedLoad) -> float:
    """Return where the scale of all layers ends: it goes from 0 over 1, the mean, to a round number that few exceed."""
    most = float(np.nanmax(load.relative)) if np.isfinite(load.relative).any() else 2.0
    return next((top for top in (2.0, 3.0) if most <= top), TOP_LOAD)


def _draw_curve(axes: Any, curve: Curve) -> None:
    steps, values = curve.series.steps, curve.series.values
    colour, dashes = COLOURS[curve.colour], (0, (4, 2)) if curve.dashed else "-"
    if curve.style == "points":
        axes.plot(
            steps,
            values,
            marker="o" if len(steps) <= 30 else "",
            linestyle=dashes,
            color=colour,
            markersize=3.5,
            linewidth=1.4,
            label=curve.label,
            zorder=4,
        )
        return
    if len(steps) > MAX_POINTS:
        groups = np.array_split(np.arange(len(steps)), MAX_POINTS)
        groups = [group[np.isfinite(values[group])] for group in groups]
        groups = [group for group in groups if group.size]
        centres = np.array([steps[group].mean() for group in groups])
        if curve.style == "raw":
            low, high = (np.array([f(values[group]) for group in groups]) for f in (np.min, np.max))
            axes.fill_between(centres, low, high, color=colour, alpha=0.3, linewidth=0, label=curve.label)
            return
        steps, values = centres, np.array([values[group].mean() for group in groups])
    raw = curve.style == "raw"
    # A single step makes no line.
    marker = "o" if np.isfinite(values).sum() == 1 else ""
    axes.plot(
        steps,
        values,
        color=colour,
        linestyle=dashes,
        alpha=0.4 if raw else 1.0,
        linewidth=0.8 if raw else 1.8,
        label=curve.label,
        marker=marker,
        markersize=4,
        zorder=2 if raw else 3,
    )


def _draw_marks(axes: Any, marks: Marks) -> None:
    colour = COLOURS[marks.colour]
    shown = list(marks.steps)[:: max(1, len(marks.steps) // 60)]
    if marks.crosses and shown:
        axes.plot(
            shown,
            [0.03] * len(shown),
            "x",
            color=colour,
            markersize=5.5,
            markeredgewidth=1.6,
            clip_on=False,
            transform=axes.get_xaxis_transform(),
            label=marks.label,
            zorder=5,
        )
        return
    for i, step in enumerate(shown):
        label = marks.label if i == 0 else None
        axes.axvline(step, color=colour, linewidth=1.4, linestyle=(0, (1, 1.2)), label=label, zorder=1)


def _draw_heat(axes: Any, table: np.ndarray, load: BinnedLoad, top: float, num_rows: int) -> None:
    extent = (load.first, load.last, num_rows - 0.5, -0.5)  # a row's number is at its middle
    # "none": each value is one pixel of the picture, and the browser enlarges it without blurring.
    axes.imshow(_rgba(table, top), extent=extent, aspect="auto", interpolation="none")
    axes.yaxis.set_major_locator(_integers(5))
    _frame(axes)
    _step_axis(axes)


def _rgba(values: np.ndarray, top: float) -> np.ndarray:
    """Colour values blue below the mean, white at it and red above; transparent where nothing is known."""
    import matplotlib
    from matplotlib.colors import TwoSlopeNorm

    norm = TwoSlopeNorm(vmin=0, vcenter=1, vmax=top)
    colours = matplotlib.colormaps["RdBu_r"](norm(np.nan_to_num(np.clip(values, 0, top), nan=1.0)), bytes=True)
    colours[..., 3] = np.where(np.isfinite(values), 255, 0)
    return colours


def _style(axes: Any, logarithmic: bool) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    _frame(axes)
    _step_axis(axes)
    axes.grid(axis="y", color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    if 0 <= axes.dataLim.width < 2:  # a run of one step still has whole numbers below it; -inf: nothing is drawn
        axes.set_xlim(axes.dataLim.x0 - 1, axes.dataLim.x1 + 1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: short(value, value if logarithmic else axes.get_ylim()[1]))
    )
    if logarithmic:
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(_nice(5))


def _frame(axes: Any) -> None:
    axes.tick_params(colors=COLOURS["muted"], labelsize=TEXT, length=3, width=0.8, which="major")
    axes.tick_params(length=0, which="minor")
    for spine in axes.spines.values():
        spine.set_color(COLOURS["muted"])
        spine.set_linewidth(0.8)


def _step_axis(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.xaxis.set_major_locator(_integers(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value, value)))
    axes.set_xlabel("step", color=COLOURS["muted"], fontsize=TEXT, loc="right", labelpad=1)


def _integers(num: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(num, integer=True, steps=[1, 2, 5, 10])


def _nice(num: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(num, steps=[1, 2, 2.5, 5, 10])


def short(value: float | int, largest: float | int) -> str:
    """Format a number for an axis that ends at ``largest``: 19500 is 19.5k; where all are small, 0.00025 is 2.5e-4."""
    if value and (abs(largest) < 5e-3 or abs(value) >= 1e15):
        digits, power = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.5g}"


def _svg(name: str, height: float, draw: Any) -> str:
    """Draw a figure and return its SVG element, without ids and namespaces that a page has no use for."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": TEXT, "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(settings):
        layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03)
        figure = Figure(figsize=(WIDTH, height), layout=layout, facecolor="none")
        draw(figure)
        for axes in figure.axes:
            axes.set_facecolor("none")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    head, body = text.split(">", 1)
    (view,) = re.findall(r'viewBox="[^"]*"', head)
    body = re.sub(r' id="[^"]*_\d+"', "", body)  # those of clip paths and marks, which are referred to, are hashes
    for variable, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{variable})")
    return f'<svg {view} aria-hidden="true">{body.strip()}'
