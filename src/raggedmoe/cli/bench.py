"""`raggedmoe bench`: how fast, against the limit and against others."""

import dataclasses
import os
from collections.abc import Iterator
from json import dumps
from pathlib import Path

import tyro
from rich.console import Console

from raggedmoe import compat
from raggedmoe.bench.cases import Timing, layer_timings, operation_timings, sweep_timings
from raggedmoe.bench.training import train_timings
from raggedmoe.hardware import target_hardware
from raggedmoe.kernels.arrays import FLOATS
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.names import unknown

SUBJECTS = (*OPERATIONS, "layer", "sweep", "train")


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
    Contenders that are slow take fewer turns. "sweep" fixes the routed rows and raises the number of experts; "train"
    is a whole training step of the default model.

    Args:
        subjects: operations, "layer", "sweep" or "train".
        dtypes: types to measure.
        rounds: turns of each contender.
        case: measure only cases whose name holds this text, such as mixtral.
        json: print the figures as JSON instead of a table.
        plot: draw the shares of the limit into this PNG or SVG file.
    """
    for subject in subjects:
        if subject not in SUBJECTS:
            raise unknown("subject", subject, SUBJECTS)
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise unknown("dtype", dtype, FLOATS)
    if rounds < 1:
        raise ValueError(f"expected rounds >= 1, got {rounds}")
    title = f"{target_hardware().name}, {os.cpu_count()} cores, JAX {compat.JAX_VERSION}"
    console = Console(stderr=json)
    console.print(f"[bold]{title}[/]; best of {rounds} interleaved rounds")
    console.print(f"[dim]{'':2}{'contender':<28} {'ms':>10} {'GFLOP/s':>8} {'of limit':>9}[/]")
    found: list[Timing] = []
    for group in _measured(subjects, dtypes, rounds, case):
        found.extend(group)
        console.print(f"[bold]{group[0].case}, {group[0].dtype}[/]", highlight=False)
        for t in group:
            gflops = f"{t.gflops:.0f}" if t.gflops else ""
            line = f"  {t.contender:<28} {t.seconds * 1e3:>10.2f} {gflops:>8} {t.of_limit:>9.2f}"
            console.print(line, highlight=False)
    if not found:
        raise ValueError(f"no case of {', '.join(subjects)} holds the text {case!r}; try 'mixtral' or 'backward'")
    if json:
        print(dumps({"title": title, "timings": [dataclasses.asdict(t) for t in found]}, indent=1))
    if plot is not None:
        from raggedmoe.bench.plot import plot_timings

        plot_timings(found, title, plot)
        console.print(f"plot: {plot.resolve()}")
    return 0


def _measured(subjects: tuple[str, ...], dtypes: tuple[str, ...], rounds: int, case: str) -> Iterator[list[Timing]]:
    for subject in subjects:
        for dtype in dtypes:
            if subject == "layer":
                yield from layer_timings(dtype, rounds, case)
            elif subject == "train":
                yield from train_timings(dtype, rounds, case)
            elif subject == "sweep":
                yield from sweep_timings(dtype, rounds, case)
            else:
                yield from operation_timings(subject, dtype, rounds, case)
