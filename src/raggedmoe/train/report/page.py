"""The HTML of the report: its style and its few elements. Every text goes through ``escape``."""

import math
from collections.abc import Iterable, Sequence
from html import escape

NOTHING = "–"  # a number that is not known

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --muted: #5d6670; --grid: #dfe3e8; --paper: #ffffff; --card: #f5f7f9;
  --blue: #1f6feb; --orange: #c2570c; --green: #1a7f4b; --red: #c62828; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --muted: #9aa4ae; --grid: #333b44; --paper: #14181c;
  --card: #1e242a; --blue: #6cabff; --orange: #f0924b; --green: #56c288; --red: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1140px; padding: 20px 16px 48px; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere;
  -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 40px 0 8px; padding-top: 12px; border-top: 1px solid var(--grid); }
h3 { font-size: 1rem; margin: 0 0 2px; font-weight: 600; }
p { margin: 0 0 10px; max-width: 75ch; }
.lead, figcaption, .sub { color: var(--muted); }
figcaption { font-size: .85rem; line-height: 1.4; margin-top: 2px; }
.columns { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 24px 28px;
  margin-bottom: 18px; }
figure { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; max-width: 560px; }
svg text { font-family: inherit !important; }
.scale { max-width: 540px; margin: 0 0 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 10px; margin: 18px 0; }
.tile { background: var(--card); border-radius: 8px; padding: 10px 12px; margin: 0; }
.tile dt { font-size: .8rem; color: var(--muted); }
.tile dd { margin: 0; }
.tile .value { font-size: 1.45rem; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile .sub { font-size: .8rem; line-height: 1.35; display: block; }
.bad .value { color: var(--red); }
.missing { color: var(--muted); border-left: 3px solid var(--orange); padding: 2px 0 2px 10px; }
.box { overflow-x: auto; border: 1px solid var(--grid); border-radius: 8px; margin: 0 0 14px; }
.sample { white-space: pre-wrap; font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: 7px 12px; border-bottom: 1px solid var(--grid); }
tr:last-child > td { border-bottom: 0; }
th { color: var(--muted); font-weight: 600; white-space: nowrap; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.key { white-space: nowrap; color: var(--muted); }
.beside td { min-width: 6.5em; }
.beside td.key { white-space: normal; min-width: 7em; }
.pairs td { padding-top: 4px; padding-bottom: 4px; }
code { font: .86em/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.badge { display: inline-block; font-size: .75rem; line-height: 1.5; padding: 0 7px; border-radius: 9px;
  border: 1px solid var(--green); color: var(--green); white-space: nowrap; }
.badge.weaker { border-color: var(--orange); color: var(--orange); }
details summary { cursor: pointer; color: var(--blue); padding: 3px 0; }
ul { margin: 4px 0 12px; padding-left: 20px; }
footer { font-size: .85rem; margin-top: 32px; }
@media (max-width: 640px) {
  .stacked thead { display: none; }
  .stacked tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--grid); }
  .stacked tr:last-child { border-bottom: 0; }
  .stacked td { display: block; border: 0; padding: 2px 12px; }
  .pairs tr { display: flex; flex-wrap: wrap; justify-content: space-between; padding: 3px 0; }
  .pairs td.key { white-space: normal; }
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .tile .value { font-size: 1.25rem; }
  .tile:last-child:nth-child(odd) { grid-column: span 2; }
}
@media print { .columns { grid-template-columns: 1fr 1fr; } figure { break-inside: avoid; } }
"""


def page(title: str, body: Iterable[str]) -> str:
    """Make the whole page, whose content security policy forbids the browser to load anything."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style></head>",
            "<body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def section(heading: str, *parts: str) -> str:
    """Make a section with a heading; empty parts are left out."""
    return "\n".join([f"<section><h2>{escape(heading)}</h2>", *(part for part in parts if part), "</section>"])


def paragraph(text: str) -> str:
    """Make a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def missing(text: str) -> str:
    """Say what the page lacks, and why."""
    return f'<p class="missing">{escape(text)}</p>'


def tiles(entries: Iterable[tuple[str, str, str, bool]]) -> str:
    """Make tiles of the most important figures: name, value, a line below it, and whether it is bad news."""
    cells = [
        f'<div class="tile{" bad" if bad else ""}"><dt>{escape(name)}</dt>'
        f'<dd><span class="value">{escape(value)}</span><span class="sub">{escape(below)}</span></dd></div>'
        for name, value, below, bad in entries
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def figure(heading: str, svg: str, caption: str = "") -> str:
    """Make a picture with its heading and caption, by which screen readers know it."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(heading)}</h3>{svg}{below}</figure>"


def columns(figures: Iterable[str]) -> str:
    """Put figures side by side where there is room."""
    return f'<div class="columns">{"".join(figures)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, name: str, stacked: bool = False) -> str:
    """Make a table of cells that are HTML, in a box that scrolls; ``stacked`` puts each cell on a line on a phone."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    kind = f"{name} stacked" if stacked else name
    return f'<div class="box"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(html: str) -> str:
    return html if html.startswith("<td") else f"<td>{html}</td>"


def key_values(values: Iterable[tuple[str, str]], *, name: str) -> str:
    """Make a table of names and values, both plain text."""
    return table(
        ("Setting", "Value"),
        [(f'<td class="key">{code(key)}</td>', code(value)) for key, value in values],
        name=f"{name} pairs",
        stacked=True,
    )


def code(text: str) -> str:
    """Make plain text monospaced."""
    return f"<code>{escape(text)}</code>"


def details(summary: str, html: str) -> str:
    """Make a summary that shows more HTML when it is opened."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def bullets(entries: Iterable[str]) -> str:
    """Make a list of HTML entries."""
    return f"<ul>{''.join(f'<li>{entry}</li>' for entry in entries)}</ul>"


def number(value: float | int) -> str:
    """Format a loss, with three decimals."""
    return f"{value:,.3f}" if math.isfinite(value) else NOTHING


def count(num: int, what: str) -> str:
    """Format a number of things, with an s for the plural."""
    return f"{num:,} {what}" if num == 1 else f"{num:,} {what}s"


def whole(value: float | int) -> str:
    """Format a number without decimals."""
    return f"{value:,.0f}" if math.isfinite(value) else NOTHING


def percent(share: float | int) -> str:
    """Format a share as a percentage."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else NOTHING


def compact(value: float | int) -> str:
    """Format a large number with three digits, such as 1.64 M."""
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (1 - 5e-4):  # 999,600 is 1.00 M
            scaled = value / size
            return f"{scaled:.{max(0, 2 - (scaled >= 9.995) - (scaled >= 99.95))}f} {name}"
    return whole(value)


def duration(seconds: float | int) -> str:
    """Format seconds in at most two units: 210 ms, 2.5 s, 3 min 20 s, 5 h 3 min, 2 d 4 h."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours, days = round(seconds) // 60, round(seconds) // 3600, round(seconds) // 86400
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{days} d {hours % 24} h"
