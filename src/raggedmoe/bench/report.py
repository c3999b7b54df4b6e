"""Results as a table on the screen, as Markdown, and as JSON."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.table import Table

from raggedmoe.bench.contender import LIMIT, NOTE, OURS, PEER, SECOND_LIMIT
from raggedmoe.bench.limits import READING
from raggedmoe.bench.machine import Machine
from raggedmoe.bench.run import Result

BEGIN, END = "<!-- raggedmoe bench: begin -->", "<!-- raggedmoe bench: end -->"


def fastest(results: Iterable[Result], role: str) -> Result | None:
    """Find the one of a role with the best time, or None."""
    return min((r for r in results if r.role == role and r.seconds), key=lambda r: r.seconds or 0, default=None)


def second_limit(results: Sequence[Result]) -> Result | None:
    """Find the matmuls with E matrices by the library whose dense matmul is the limit."""
    limit = fastest(results, LIMIT)
    library = limit.contender.partition(": ")[2] if limit else ""
    return next((r for r in results if r.role == SECOND_LIMIT and r.contender.endswith(f": {library}")), None)


def case_table(results: Sequence[Result]) -> Table:
    """Make the table of one case: contenders first, then every limit."""
    first = results[0]
    table = Table(title=f"{first.case}, {first.dtype}", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    rate, unit = _rate_of(results)
    for heading in ("contender", "ms", unit, "of limit", "peak MB", ""):
        table.add_column(heading, justify="left" if heading in ("contender", "") else "right", no_wrap=True)
    limit, second = fastest(results, LIMIT), second_limit(results)
    for result in sorted(results, key=lambda r: (OURS, PEER, LIMIT, SECOND_LIMIT, NOTE).index(r.role)):
        value = getattr(result, rate)
        table.add_row(
            result.contender,
            "–" if result.seconds is None else f"{1e3 * result.seconds:.2f}",
            "" if value is None else f"{value:.1f}",
            "" if result.of_limit is None else f"{result.of_limit:.2f}",
            _megabytes(result),
            "limit" if result is limit else "second" if result is second else "",
            style="dim" if result.role not in (OURS, PEER) and result is not limit else "",
        )
    return table


def case_reasons(results: Sequence[Result]) -> Iterator[str]:
    """Say why contenders have no time, a line each."""
    for result in results:
        if result.seconds is None:
            yield f"{result.contender}: {'FAILED: ' if result.failed else 'left out: '}{result.reason}"


def _rate_of(results: Sequence[Result]) -> tuple[str, str]:
    for field, unit in (("tokens", "tokens/s"), ("gigabytes", "GB/s"), ("gflops", "GFLOP/s")):
        if any(getattr(r, field) for r in results):
            return field, unit
    return "gflops", "GFLOP/s"


def _megabytes(result: Result) -> str:
    if result.seconds is None or result.role not in (OURS, PEER):
        return ""
    return "not measured" if result.peak is None else f"{result.peak / 1e6:.0f}"


def as_json(machine: Machine, rounds: int, groups: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """Describe all results, for a program that reads them."""
    return {
        "machine": {**vars(machine), "title": machine.title, "versions": dict(machine.versions)},
        "rounds": rounds,
        "results": [result.as_json() for group in groups for result in group],
        "growth": [asdict(growth) for columns in by_table(groups).values() for growth in growths(columns)],
    }


def from_json(plain: Any, name: str) -> tuple[Machine, int, list[list[Result]]]:
    """Read what `as_json` described: the machine, the rounds, and each case's results. ``name`` is the file's."""
    try:
        described = {f.name: plain["machine"][f.name] for f in fields(Machine)}
        machine = Machine(**described | {"features": tuple(described["features"])})
        groups: dict[tuple[str, str], list[Result]] = {}
        for row in plain["results"]:
            result = Result(**row)
            groups.setdefault((result.case, result.dtype), []).append(result)
        return machine, plain["rounds"], [*groups.values()]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name}: expected a file that `raggedmoe bench --json` wrote: {error!r}") from None


def merge(runs: Mapping[str, tuple[Machine, int, list[list[Result]]]]) -> tuple[Machine, int, list[list[Result]]]:
    """Join runs of one machine, by the names of their files: of a case that several have, the last one's results."""
    titles = {machine.title: name for name, (machine, _, _) in runs.items()}
    if len(titles) > 1:
        different = "; ".join(f"{name}: {title}" for title, name in titles.items())
        raise ValueError(f"expected results of one machine and the same versions, got {different}")
    groups = {(group[0].case, group[0].dtype): group for _, _, run in runs.values() for group in run}
    machine, _, _ = next(iter(runs.values()))
    return machine, min(rounds for _, rounds, _ in runs.values()), [*groups.values()]


def by_table(groups: Iterable[Sequence[Result]]) -> dict[tuple[str, str, str], list[Sequence[Result]]]:
    """Collect the cases that are columns of one table: by subject, direction and type."""
    tables: dict[tuple[str, str, str], list[Sequence[Result]]] = {}
    for group in groups:
        few = " of few tokens" if any(r.gigabytes for r in group) else ""
        swept = " with as many rows for ever more experts" if group[0].shape.startswith("E=") else ""
        key = (f"{group[0].subject}{few}{swept}", group[0].direction, group[0].dtype)
        tables.setdefault(key, []).append(group)
    return tables


def markdown(machine: Machine, rounds: int, command: str, groups: Sequence[Sequence[Result]]) -> str:
    """Write the tables of a page: for every subject, direction and type one, with a column for each shape."""
    lines = [
        f"Measured by `{command}` on {machine.title}: the best of {rounds} interleaved rounds. A cell has the share of "
        "the limit and the milliseconds, for whole models also the tokens a second; **bold** is the fastest.",
    ]
    for (subject, direction, dtype), columns in by_table(groups).items():
        lines += ["", f"### {subject}, {direction}, {dtype}", "", *_markdown_table(columns)]
        larger = [*growths(columns)]
        lines += ["", *(growth.sentence for growth in larger)] if larger else []
    return "\n".join(lines) + "\n"


def _markdown_table(columns: Sequence[Sequence[Result]]) -> Iterator[str]:
    yield " | ".join(["| ", *(group[0].shape for group in columns)]) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    names = dict.fromkeys(r.contender for group in columns for r in group if r.role in (OURS, PEER))
    footnotes: list[str] = []
    for name in names:
        results = [next((r for r in group if r.contender == name), None) for group in columns]
        if any(r is not None for r in results):
            yield _row(name, [_cell(r, group, footnotes) for r, group in zip(results, columns)])
    yield _row("limit", [_limit_cell(fastest(group, LIMIT)) for group in columns])
    if any(second_limit(group) for group in columns):
        yield _row("second limit: E matrices", [_share_cell(second_limit(group)) for group in columns])
    if any(r.peak is not None for group in columns for r in group if r.role in (OURS, PEER)):
        for name in names:
            peaks = [next((_megabytes(r) for r in group if r.contender == name), "") for group in columns]
            if any(peaks):
                yield _row(f"peak MB, {name}", peaks)
    if footnotes:
        yield ""
        yield "; ".join(f"({number}) {text}" for number, text in enumerate(footnotes, 1)) + "."


def _row(name: str, cells: Iterable[str]) -> str:
    return "| " + " | ".join([name, *cells]) + " |"


def _cell(result: Result | None, group: Sequence[Result], footnotes: list[str]) -> str:
    if result is None:
        return ""
    if result.seconds is None:
        reason = (result.reason or "").replace("|", "/")
        if reason not in footnotes:
            footnotes.append(reason)
        return f"({footnotes.index(reason) + 1})"
    times = [r.seconds for r in group if r.role in (OURS, PEER) and r.seconds]
    text = _share_cell(result)
    return f"**{text}**" if result.seconds == min(times) else text


def _share_cell(result: Result | None) -> str:
    if result is None or result.seconds is None:
        return ""
    share = "" if result.of_limit is None else f"{result.of_limit:.2f} · "
    tokens = "" if result.tokens is None else f" · {result.tokens:.1f}/s"
    return f"{share}{1e3 * result.seconds:.1f}{tokens}"


def _limit_cell(result: Result | None) -> str:
    if result is None or result.seconds is None:
        return "none"
    rate = f"{result.gigabytes:.1f} GB/s" if result.gigabytes else f"{result.gflops or 0:.0f} GFLOP/s"
    return f"{1e3 * result.seconds:.1f}: {result.contender}, {rate}"


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How much longer one of ours takes with the most experts than with the fewest, beyond reading the weights."""

    case: str
    dtype: str
    contender: str
    first: str  # the shapes
    last: str
    ratio: float
    read_seconds: float  # of all weights, at the last shape

    @property
    def sentence(self) -> str:
        """Say it in words."""
        return (
            f"{self.contender}: {self.ratio:.2f} times as long with {self.last} as with {self.first}, "
            f"less what reading all weights takes ({1e3 * self.read_seconds:.1f} ms)."
        )


def growths(columns: Sequence[Sequence[Result]]) -> Iterator[Growth]:
    """Compare the last column of a sweep with the first, for each of ours."""
    reads = [fastest([r for r in group if r.contender.startswith(READING)], NOTE) for group in columns]
    if len(columns) < 2 or reads[0] is None or reads[-1] is None:
        return
    for ours in (r for r in columns[0] if r.role == OURS and r.seconds):
        last = next((r for r in columns[-1] if r.contender == ours.contender), None)
        if last is None or last.seconds is None:
            continue
        base = (ours.seconds or 0) - (reads[0].seconds or 0)
        rest = last.seconds - (reads[-1].seconds or 0)
        yield Growth(
            case=f"{ours.subject} {ours.direction}",
            dtype=ours.dtype,
            contender=ours.contender,
            first=ours.shape,
            last=last.shape,
            ratio=rest / base if base > 0 else math.nan,
            read_seconds=reads[-1].seconds or 0,
        )


def insert_markdown(page: str | None, tables: str) -> str:
    """Put the tables between the marks of a page; without a page or marks they are a page of their own."""
    block = f"{BEGIN}\n\n{tables}\n{END}"
    if page is None or BEGIN not in page or END not in page:
        return block + "\n"
    return page[: page.index(BEGIN)] + block + page[page.index(END) + len(END) :]
