"""`raggedmoe tune`: the fastest tiles of our grouped matmul for a shape and a chip, by the compiler's schedule."""

import sys
from json import dumps

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from raggedmoe.aot.shapes import SHAPE_FORMS
from raggedmoe.aot.topology import check_compiler, check_topology_name
from raggedmoe.aot.tuning import OPERATION, TileTrial, choices_for, table_line, tune


def tune_(
    shape: str = "R=8192,I=2048,O=1408,G=16,sizes=skewed",
    topology: str = "tpu7x:2x2x1",
    dtype: str = "bfloat16",
    timeout: float = 1800.0,
    json: bool = False,
) -> int:
    """Compile our grouped matmul with several choices of tiles, and rank them by the cycles that the compiler predicts.

    Nothing is run and no TPU is needed. A choice's figure is the larger of its issue cycles and of its transfers at
    peak bandwidth; where transfers rule, the fewer issue cycles win. If another choice than the rule's is the fastest,
    its line for the table in kernels/grouped_matmul/tiles.py is printed. Each choice takes up to half a minute.

    Args:
        shape: the call, in the letters of `raggedmoe compile`; skewed groups show what uneven sizes cost.
        topology: one of the chip's, such as v6e:2x2 or tpu7x:2x2x1.
        dtype: bfloat16 or float32.
        timeout: seconds for one choice.
        json: print JSON instead of a table.
    """
    check_topology_name(topology)
    check_compiler()
    if "=" not in shape:
        raise ValueError(f"shape: expected sizes such as {SHAPE_FORMS[OPERATION][0]}, got {shape!r}")
    total = len(choices_for(shape, dtype, topology))
    trials: list[TileTrial] = []
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(f"tune {topology}", total=total)
        for trial in tune(shape, dtype, topology, timeout):
            trials.append(trial)
            progress.advance(task)
    ranked = sorted(trials, key=lambda trial: (trial.cycles, trial.issue))
    if json:
        print(
            dumps([{**vars(trial.choice), "issue": trial.issue, "cycles": trial.cycles} for trial in ranked], indent=1)
        )
    else:
        _print(ranked)
        if not ranked[0].is_rule and ranked[0].outcome.passed:
            print(table_line(shape, dtype, topology, ranked[0].choice))
    return 0 if ranked[0].outcome.passed else 1


def _print(ranked: list[TileTrial]) -> None:
    table = Table("rows", "step", "out", "inner", "paired", "issue", "cycles", "", title="compiler-predicted")
    for trial in ranked:
        cells = [str(value) for value in vars(trial.choice).values()]
        figures = [f"{trial.issue:,.0f}", f"{trial.cycles:,.0f}"] if trial.outcome.passed else ["", ""]
        remark = trial.outcome.error or ("the rule's" if trial.is_rule else "")
        table.add_row(*cells, *figures, remark)
    Console().print(table)
