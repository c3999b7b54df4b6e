"""The report's curves over steps: loss, learning rate, gradient norm, speed, drops."""

import itertools

import numpy as np

from raggedmoe.train.loop.metrics import METRICS
from raggedmoe.train.loop.record import RunRecord, Series, series
from raggedmoe.train.report import page as html
from raggedmoe.train.report.figures import Curve, Marks, curves_svg
from raggedmoe.train.report.page import duration, number, percent, whole

SET_COLOURS = ("orange", "blue", "green", "red")


def loss_section(run: RunRecord) -> str:
    """Draw the training and held-out loss, the learning rate, the gradient norm and the auxiliary losses."""
    if not run.train:
        return html.section("Loss", html.missing(f"There is no curve: {METRICS} has no training step."))
    figures, notes = [html.figure("Loss (nats per token)", _loss_svg(run))], []
    if any(run.loss_on(name).finite.size for name in run.named_sets):
        last = ", ".join(f"{name} {number(run.loss_on(name).last)}" for name in run.named_sets)
        figures.append(html.figure("Loss by held-out set (nats per token)", _named_sets_svg(run), f"At last: {last}."))
    if not run.series("loss").finite.size:
        notes.append("No training step has a finite loss.")
    if not series(run.held_out, "loss").finite.size:
        notes.append(f"No held-out loss: {METRICS} has no finite one in a line of kind eval.")
    rate, norm = run.series("learning_rate"), run.series("grad_norm")
    if rate.finite.size:
        curve = Curve(series=rate, label="learning rate", colour="green")
        figures.append(html.figure("Learning rate", curves_svg("rate", [curve], from_zero=True)))
    else:
        notes.append("No curve of the learning rate: no training step has learning_rate.")
    if norm.finite.size:
        curves = smoothed_curves(run, "grad_norm", "each step", "blue")
        svg = curves_svg("norm", curves, marks=event_marks(run), logarithmic=spikes(norm))
        figures.append(html.figure("Gradient norm", svg))
    else:
        notes.append("No curve of the gradient norm: no training step has grad_norm.")
    if added := _auxiliary_losses(run):
        heading = "Auxiliary losses" if len(added) > 1 else f"Auxiliary loss: {added[0].label}"
        figures.append(html.figure(heading, curves_svg("added", added, from_zero=True)))
    return html.section("Loss", html.columns(figures), *(html.missing(note) for note in notes))


def _loss_svg(run: RunRecord) -> str:
    curves, held_out = smoothed_curves(run, "loss", "training", "blue"), series(run.held_out, "loss")
    if held_out.finite.size:
        curves.append(Curve(series=held_out, label="held out", colour="orange", style="points"))
    return curves_svg("loss", curves, marks=event_marks(run), logarithmic=spikes(run.series("loss")))


def _named_sets_svg(run: RunRecord) -> str:
    """Draw the loss on each set that has a name."""
    curves = [
        Curve(series=run.loss_on(name), label=name, colour=colour, style="points", dashed=place >= len(SET_COLOURS))
        for place, (name, colour) in enumerate(zip(run.named_sets, itertools.cycle(SET_COLOURS)))
        if run.loss_on(name).finite.size
    ]
    return curves_svg("sets", curves, marks=event_marks(run))


def spikes(values: Series) -> bool:
    """Tell whether a few steps are so far above the rest that only a logarithmic axis shows both."""
    known = values.finite
    return bool(known.size and known.min() > 0 and known.max() > 30 * np.median(known))


def _auxiliary_losses(run: RunRecord) -> list[Curve]:
    names = {"aux_loss": ("load balance", "orange"), "z_loss": ("router z", "green"), "mtp_loss": ("MTP", "blue")}
    return [
        Curve(series=run.series(name).smooth(smoothing_window(run)), label=label, colour=colour)
        for name, (label, colour) in names.items()
        if (run.series(name).finite != 0).any()
    ]


def speed_section(run: RunRecord) -> str:
    """Draw the tokens per second, and say how they compare with the peak."""
    speed, seconds, mfu = run.series("tokens_per_second"), run.series("seconds"), run.series("mfu")
    if not speed.finite.size:
        return html.section("Speed", html.missing("No training step has tokens_per_second."))
    text = f"The median step handled {whole(speed.median)} tokens a second"
    text += f" and took {duration(seconds.median)}" if seconds.finite.size else ""
    text += f", {percent(mfu.median)} of the hardware's peak." if mfu.finite.size else "."
    if not mfu.finite.size:
        text += f" There is no MFU: {why_no_mfu(run)}."
    if seconds.finite.size and seconds.finite[0] > 3 * seconds.median:
        text += f" The first took {duration(seconds.finite[0])}."
    figures = [
        html.figure(
            "Tokens per second",
            curves_svg(
                "speed",
                smoothed_curves(run, "tokens_per_second", "each step", "blue"),
                marks=event_marks(run)[:1],
                from_zero=True,
            ),
        )
    ]
    return html.section("Speed", html.paragraph(text), html.columns(figures))


def drops_section(run: RunRecord) -> str:
    """Draw how many routed slots were dropped."""
    dropped = run.series("dropped")
    if not dropped.finite.size:
        return html.section("Drops", html.missing("No training step says how many were dropped."))
    total = dropped.finite.sum()
    if total == 0:
        text = f"None: in each of the {whole(dropped.finite.size)} steps, every token reached all of its experts."
        return html.section("Drops", html.paragraph(text))
    text = (
        f"{whole(total)} routed slots (a token at one of its experts) were computed by no expert, "
        f"in {whole(int((dropped.finite > 0).sum()))} of {whole(dropped.finite.size)} steps; "
        f"at worst {whole(dropped.finite.max())} in one step."
    )
    svg = curves_svg("drops", smoothed_curves(run, "dropped", "each step", "red"), from_zero=True)
    return html.section("Drops", html.paragraph(text), html.columns([html.figure("Dropped slots per step", svg)]))


def why_no_mfu(run: RunRecord) -> str:
    """Say why a run has no MFU."""
    unknown = "peak_flops" in run.info and not run.info["peak_flops"]
    return "the peak FLOP/s of this hardware is not known" if unknown else "not recorded"


def event_marks(run: RunRecord) -> list[Marks]:
    """Mark the steps at which the run was resumed, and those that were skipped."""
    return [
        Marks(steps=run.steps_of("resumed"), label="resumed", colour="green"),
        Marks(steps=run.skipped_steps, label="skipped", colour="red", crosses=True),
    ]


def smoothing_window(run: RunRecord) -> int:
    """Return over how many steps curves are averaged, about a twentieth of the run."""
    return int(np.clip(len(run.train) // 20, 1, 200))


def smoothed_curves(run: RunRecord, name: str, label: str, colour: str) -> list[Curve]:
    """Make the curves of a value: as it is, in a pale colour, and its mean over some steps."""
    raw, window = run.series(name), smoothing_window(run)
    if window < 2:
        return [Curve(series=raw, label=label, colour=colour)]
    return [
        Curve(series=raw, label=label, colour=colour, style="raw"),
        Curve(series=raw.smooth(window), label=f"mean of {window // 2 * 2 + 1} steps", colour=colour),
    ]
