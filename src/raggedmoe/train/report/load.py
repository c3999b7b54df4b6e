"""The section on expert load: heat maps of it, and the balance over steps."""

import math

import numpy as np

from raggedmoe.train.loop.metrics import LOAD
from raggedmoe.train.loop.record import DEAD_LINES, LoadHistory, RunRecord, is_number
from raggedmoe.train.report import page as html
from raggedmoe.train.report.curves import smoothed_curves
from raggedmoe.train.report.figures import (
    MAX_BINS,
    MAX_ROWS,
    BinnedLoad,
    busiest_svg,
    curves_svg,
    expert_load_svg,
    scale_svg,
    top_of_scale,
)

MAX_LAYERS = 12  # with a heat map of their own
MAX_NAMED = 20  # dead experts that are listed


def load_section(run: RunRecord) -> str:
    """Draw heat maps where the load was recorded, then entropy and the busiest expert."""
    balance = _balance_figures(run)
    parts = _heat_maps(run.load) if run.load is not None else []
    if run.load is None:
        parts.append(html.missing(f"No heat map of the experts' load: the run has no {LOAD}, or it is empty."))
    if balance:
        parts.append(html.columns(balance))
    else:
        parts.append(html.missing("No curve of the balance: no training step has entropy or max_violation."))
    return html.section("Expert load", *parts)


def _heat_maps(history: LoadHistory) -> list[str]:
    load = history.in_bins(MAX_BINS)
    top = top_of_scale(load)
    shown = _select_layers(load)
    parts = [
        html.paragraph(
            "Colours say how many tokens an expert got, as a multiple of the mean in its layer: white is the mean, "
            "red more, blue less."
        ),
        html.paragraph(_dead_text(history)),
        f'<div class="scale">{scale_svg(top)}</div>',
        *(html.paragraph(text) for text in _what_is_left_out(history, load, len(shown))),
    ]
    figures = []
    if len(history.layers) > 1:
        svg = busiest_svg("busiest", load, history.layers, top)
        figures.append(html.figure("The busiest expert of each layer", svg))
    for layer in shown:
        svg = expert_load_svg(f"layer{layer}", load, layer, top)
        figures.append(html.figure(f"Layer {history.layers[layer]}", svg, _caption(history, layer)))
    return [*parts, html.columns(figures)]


def _select_layers(load: BinnedLoad) -> list[int]:
    """Select all layers, or some at equal distances and the least balanced one."""
    num_layers = load.relative.shape[1]
    if num_layers <= MAX_LAYERS:
        return list(range(num_layers))
    chosen = {round(place) for place in np.linspace(0, num_layers - 1, MAX_LAYERS - 1)}
    return sorted(chosen | {int(np.nan_to_num(load.relative).max(axis=(0, 2)).argmax())})


def _what_is_left_out(history: LoadHistory, load: BinnedLoad, num_shown: int) -> list[str]:
    """Say where the picture is coarser than the record."""
    num_lines, num_layers, num_experts = history.counts.shape
    texts = []
    if num_shown < num_layers:
        texts.append(
            f"{num_shown} of {num_layers} layers are drawn: some at equal distances, and the least balanced one. "
            "The first picture has all of them."
        )
    if num_lines > len(load.relative):
        texts.append(f"{num_lines} records are summed into {len(load.relative)} columns.")
    if num_experts > MAX_ROWS:
        texts.append(f"{num_experts} experts are drawn as {MAX_ROWS} rows: the mean of neighbours.")
    if history.num_left_out:
        texts.append(
            f"{history.num_left_out} lines of {LOAD} are left out: they are no counts in the last line's shape."
        )
    return texts


def _caption(history: LoadHistory, layer: int) -> str:
    """Name the busiest and the idlest expert of the last records."""
    last = history.counts[-DEAD_LINES:, layer].sum(axis=0)
    if last.sum() == 0:
        return "No token in the last records."
    relative = last / last.mean()
    busiest, idlest = int(relative.argmax()), int(relative.argmin())
    return (
        f"Last {_recent(history)}: most for expert {busiest} ({relative[busiest]:.2f} times "
        f"the mean), least for expert {idlest} ({relative[idlest]:.2f})."
    )


def _recent(history: LoadHistory) -> str:
    return html.count(min(DEAD_LINES, len(history.steps)), "record")


def _dead_text(history: LoadHistory) -> str:
    dead = history.dead_experts
    since = f"in the last {_recent(history)}, up to step {int(history.steps[-1]):,}"
    if not dead:
        return f"No expert is dead: each got tokens {since}."
    names = ", ".join(f"layer {layer} expert {expert}" for layer, expert in dead[:MAX_NAMED])
    more = f" and {len(dead) - MAX_NAMED} more" if len(dead) > MAX_NAMED else ""
    return f"Dead, with no token {since}: {names}{more}."


def _balance_figures(run: RunRecord) -> list[str]:
    figures = []
    if run.series("entropy").finite.size:
        num_experts = run.model.get("num_experts")
        perfect = None
        if is_number(num_experts) and num_experts > 0:
            perfect = (math.log(num_experts), f"log {num_experts}, perfect")
        svg = curves_svg("entropy", smoothed_curves(run, "entropy", "each step", "blue"), reference=perfect)
        figures.append(html.figure("Entropy of the load (nats)", svg, "The mean over the MoE layers."))
    if run.series("max_violation").finite.size:
        svg = curves_svg("violation", smoothed_curves(run, "max_violation", "each step", "orange"), from_zero=True)
        caption = "The busiest expert's load over the mean, minus 1, in the worst layer."
        figures.append(html.figure("Largest violation of balance", svg, caption))
    return figures
