"""The report's curves over steps: loss, learning rate, gradient norm, speed, drops."""

import numpy as np

from raggedmoe.train.metrics import METRICS
from raggedmoe.train.report import page as html
from raggedmoe.train.report.figures import Curve, Marks, curves_svg
from raggedmoe.train.report.page import duration, percent, whole
from raggedmoe.train.report.record import RunRecord, series


def loss_section(run: RunRecord) -> str:
    if not run.train:
        return html.section("Loss", html.missing(f"There is no curve: {METRICS} has no training step."))
    held_out = series(run.held_out, "loss")
    curves = smoothed(run, "loss", "training", "blue")
    notes = []
    if held_out.known.size:
        curves.append(Curve(series=held_out, label="held out", colour="orange", style="points"))
    else:
        notes.append(html.missing(f"No held-out loss: {METRICS} has no line of kind eval."))
    if not run.series("loss").known.size:
        notes.append(html.missing("No training step has a finite loss."))
    figures = [html.figure("Loss (nats per token)", curves_svg("loss", curves, marks=event_marks(run)))]
    for name, heading, colour in (("learning_rate", "Learning rate", "green"), ("grad_norm", "Gradient norm", "blue")):
        values = run.series(name)
        if not values.known.size:
            notes.append(html.missing(f"{heading}: no training step has {name}."))
        elif name == "learning_rate":
            curve = Curve(series=values, label="learning rate", colour=colour)
            figures.append(html.figure(heading, curves_svg(name, [curve], from_zero=True)))
        else:
            figures.append(html.figure(heading, _norm_svg(run)))
    if added := _added_losses(run):
        figures.append(html.figure("Auxiliary losses", curves_svg("added", added, from_zero=True)))
    return html.section("Loss", html.columns(figures), *notes)


def _norm_svg(run: RunRecord) -> str:
    known = run.series("grad_norm").known
    wide = bool(known.min() > 0 and known.max() > 30 * np.median(known))
    return curves_svg(
        "grad_norm", smoothed(run, "grad_norm", "each step", "blue"), marks=event_marks(run), logarithmic=wide
    )


def _added_losses(run: RunRecord) -> list[Curve]:
    names = {"aux_loss": ("load balance", "orange"), "z_loss": ("router z", "green"), "mtp_loss": ("MTP", "blue")}
    return [
        Curve(series=run.series(name).smoothed(smoothing_window(run)), label=label, colour=colour)
        for name, (label, colour) in names.items()
        if (run.series(name).known != 0).any()
    ]


def speed_section(run: RunRecord) -> str:
    speed, seconds, mfu = run.series("tokens_per_second"), run.series("seconds"), run.series("mfu")
    if not speed.known.size:
        return html.section("Speed", html.missing("No training step has tokens_per_second."))
    text = f"The median step handled {whole(speed.median)} tokens a second"
    text += f" and took {duration(seconds.median)}" if seconds.known.size else ""
    text += f", {percent(mfu.median)} of the hardware's peak." if mfu.known.size else "."
    if not mfu.known.size:
        text += f" No MFU: {why_no_mfu(run)}."
    if seconds.known.size and seconds.known[0] > 3 * seconds.median:
        text += f" The first took {duration(seconds.known[0])}, compilation included."
    figures = [
        html.figure(
            "Tokens per second",
            curves_svg(
                "speed",
                smoothed(run, "tokens_per_second", "each step", "blue"),
                marks=event_marks(run)[:1],
                from_zero=True,
            ),
        )
    ]
    return html.section("Speed", html.paragraph(text), html.columns(figures))


def drops_section(run: RunRecord) -> str:
    dropped = run.series("dropped")
    if not dropped.known.size:
        return html.section("Drops", html.missing("No training step says how many were dropped."))
    total = dropped.known.sum()
    if total == 0:
        text = f"None: in each of the {whole(dropped.known.size)} steps, every token reached all of its experts."
        return html.section("Drops", html.paragraph(text))
    text = (
        f"{whole(total)} routed slots (a token at one of its experts) were computed by no expert, "
        f"in {whole((dropped.known > 0).sum())} of {whole(dropped.known.size)} steps; "
        f"at worst {whole(dropped.known.max())} in one step."
    )
    svg = curves_svg("drops", smoothed(run, "dropped", "each step", "red"), from_zero=True)
    return html.section("Drops", html.paragraph(text), html.columns([html.figure("Dropped slots per step", svg)]))


def why_no_mfu(run: RunRecord) -> str:
    return "the peak FLOP/s of this hardware is not known" if not run.info.get("peak_flops") else "not recorded"


def event_marks(run: RunRecord) -> list[Marks]:
    return [
        Marks(steps=run.steps_of("resumed"), label="resumed", colour="green"),
        Marks(steps=run.skipped, label="skipped", colour="red", crosses=True),
    ]


def smoothing_window(run: RunRecord) -> int:
    """Over how many steps curves are averaged: about a twentieth of the run."""
    return int(np.clip(len(run.train) // 20, 1, 200))


def smoothed(run: RunRecord, name: str, label: str, colour: str) -> list[Curve]:
    """A value as it is, pale, and its mean over some steps."""
    raw, window = run.series(name), smoothing_window(run)
    if window < 2:
        return [Curve(series=raw, label=label, colour=colour)]
    return [
        Curve(series=raw, label=label, colour=colour, style="raw"),
        Curve(series=raw.smoothed(window), label=f"mean of {window // 2 * 2 + 1} steps", colour=colour),
    ]
