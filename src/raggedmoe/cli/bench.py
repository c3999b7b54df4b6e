"""`raggedmoe bench`: how fast, against the limit and against others."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from json import dumps
from pathlib import Path

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from raggedmoe import compat
from raggedmoe.bench.cases import Timing, layer_timings, operation_timings, sweep_timings
from raggedmoe.hardware import target_hardware
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.names import unknown

SUBJECTS = (*OPERATIONS, "layer", "sweep")


def bench(
    subjects: tyro.conf.Positional[tuple[str, ...]] = ("grouped_matmul", "layer"),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    rounds: int = 7,
    case: str = "",
    json: bool = False,
    plot: Path | None = None,
) -> int:
    """Time kernels and the whole layer on this machine: the best of several interleaved rounds.

    Each is held against a limit: for matmuls, dense ones of the same useful FLOPs and type; for moves of rows, a copy.
    "sweep" fixes the routed rows and raises the number of experts.

    Args:
        subjects: operations, "layer" or "sweep".
        dtypes: types to measure.
        rounds: turns of each contender.
        case: measure only cases whose name holds this text, such as mixtral.
        json: print the figures as JSON instead of a table.
        plot: draw the shares of the limit into this PNG or SVG file.
    """
    for subject in subjects:
        if subject not in SUBJECTS:
            raise unknown("subject", subject, SUBJECTS)
    title = f"{target_hardware().name}, {os.cpu_count()} cores, JAX {compat.JAX_VERSION}"
    console = Console(stderr=json)
    console.print(f"[bold]{title}[/]; best of {rounds} interleaved rounds")
    table = Table(box=SIMPLE_HEAD)
    for column in ("contender", "ms", "GFLOP/s", "of limit"):
        table.add_column(column, justify="left" if column == "contender" else "right", no_wrap=True)
    found: list[Timing] = []
    for group in _measured(subjects, dtypes, rounds, case):
        found.extend(group)
        table.add_section()
        table.add_row(f"[bold]{group[0].case}, {group[0].dtype}[/]")
        for t in group:
            gflops = f"{t.gflops:.0f}" if t.gflops else ""
            table.add_row(f"  {t.contender}", f"{t.seconds * 1e3:.2f}", gflops, f"{t.of_limit:.2f}")
    if json:
        print(dumps({"title": title, "timings": [dataclasses.asdict(t) for t in found]}, indent=1))
    else:
        console.print(table)
    if plot is not None:
        from raggedmoe.bench.plot import plot_timings

        plot_timings(found, title, plot)
        console.print(f"plot: {plot.resolve()}")
    return 0


def _measured(subjects: tuple[str, ...], dtypes: tuple[str, ...], rounds: int, case: str) -> Iterator[list[Timing]]:
    for subject in subjects:
        for dtype in dtypes:
            print(f"measuring {subject} {dtype} ...", file=sys.stderr, flush=True)
            if subject == "layer":
                yield from layer_timings(dtype, rounds, case)
            elif subject == "sweep":
                yield from sweep_timings(dtype, rounds)
            else:
                yield from operation_timings(subject, dtype, rounds, case)
