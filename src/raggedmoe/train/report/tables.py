"""The report's tables: which kernels ran and why, what happened when, the settings."""

import json
from html import escape
from typing import Any

from raggedmoe.train.loop.record import RunRecord, get_typed
from raggedmoe.train.report import page as html


def kernels_section(run: RunRecord) -> str:
    """List the kernels that ran, and why none of the others did."""
    kernels = [kernel for kernel in get_typed(run.info, "kernels", list) if isinstance(kernel, dict)]
    if not kernels:
        return html.section("Kernels", html.missing("run.json does not say which kernels ran."))
    text = (
        "For each operation, direction and set of shapes: the kernel that ran, how far it is proven on this hardware, "
        "and why none of the others did."
    )
    heads = ("Operation", "Kernel", "Why")
    rows = [_kernel_row(kernel) for kernel in kernels]
    return html.section("Kernels", html.paragraph(text), html.table(heads, rows, name="kernels", stacked=True))


def _kernel_row(kernel: dict[str, Any]) -> tuple[str, str, str]:
    operation = f"<strong>{_text(kernel, 'operation')}</strong> {_text(kernel, 'direction', '')}"
    if kernel.get("shapes"):
        operation += f"<br>{html.code(str(kernel['shapes']))}"
    strength = "" if kernel.get("level") == "run" else " weaker"
    chosen = f'<strong>{_text(kernel, "chosen")}</strong> <span class="badge{strength}">{_text(kernel, "level")}</span>'
    why = _text(kernel, "shown_by")
    others = [other for other in get_typed(kernel, "others", list) if isinstance(other, dict)]
    if others:
        reasons = [f"<strong>{_text(other, 'name')}</strong>: {_text(other, 'reason')}" for other in others]
        why += html.details(
            f"Why not {', '.join(str(other.get('name', '?')) for other in others)}", html.bullets(reasons)
        )
    return operation, chosen, why


def _text(values: dict[str, Any], name: str, otherwise: str = "not recorded") -> str:
    return escape(str(values.get(name) or otherwise))


MAX_SAMPLES = 8


def samples_section(run: RunRecord) -> list[str]:
    """List how the model continued its prompt at evaluations: at the first, the last and some between; or nothing."""
    samples = [line for line in run.samples if isinstance(line.get("text"), str)]
    if not samples:
        return []
    last = len(samples) - 1
    places = sorted({round(number * last / max(1, MAX_SAMPLES - 1)) for number in range(MAX_SAMPLES)})
    text = f"What the model wrote after {html.count(len(samples), 'evaluation')}"
    text += "." if len(places) == len(samples) else f", of which {len(places)} are shown."
    rows = [
        (
            f'<td class="number">{samples[place]["step"]:,}</td>',
            f'<td class="sample"><span class="sub">{_text(samples[place], "prompt", "")}</span>'
            f"{_text(samples[place], 'text', '')}</td>",
        )
        for place in places
    ]
    return [html.section("Samples", html.paragraph(text), html.table(("Step", "Text"), rows, name="samples"))]


def events_section(run: RunRecord) -> str:
    """List the events of the run; checkpoints are only counted."""
    if not run.events:
        return html.section(
            "Events", html.paragraph("None was recorded: no checkpoint, no interruption, no resumption.")
        )
    checkpoints = run.steps_of("checkpoint")
    others = [event for event in run.events if event.get("what") != "checkpoint"]
    text = "No checkpoint was written."
    if checkpoints:
        text = f"{html.count(len(checkpoints), 'checkpoint')}, the last at step {checkpoints[-1]:,}."
    rows = [
        (
            f'<td class="number">{event["step"]:,}</td>',
            f'<td class="number">{_text(event, "what")}</td>',
            _text(event, "text", ""),
        )
        for event in others[-200:]
    ]
    if len(others) > len(rows):
        text += f" Of {len(others)} other events, the last {len(rows)} are shown."
    listed = html.table(("Step", "What", "Text"), rows, name="events") if rows else ""
    return html.section("Events", html.paragraph(text), listed)


def settings_section(run: RunRecord) -> str:
    """List the settings of the run, and the sizes of its model."""
    settings = flat(get_typed(run.info, "settings", dict))
    model = flat(run.model)
    notes = [str(note) for note in get_typed(run.info, "notes", list)]
    return html.section(
        "Settings",
        html.bullets(escape(note) for note in notes) if notes else "",
        html.key_values(settings, name="settings") if settings else html.missing("run.json has no settings."),
        html.details("The model in numbers", html.key_values(model, name="model")) if model else "",
    )


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested settings to dotted names, each with its value as text."""
    pairs = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            pairs.extend(flat(value, f"{prefix}{key}."))
        else:
            pairs.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return pairs
