"""Which tiles are the fastest for a grouped matmul on a chip, by the compiler's schedule of each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from raggedmoe.aot.case import CompileCase, CompileOutcome, JitProgram
from raggedmoe.aot.subjects import find_example, with_integers
from raggedmoe.aot.topology import find_chip
from raggedmoe.aot.worker import compile_cases
from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.grouped_matmul import pallas_tpu
from raggedmoe.kernels.grouped_matmul.api import group_bounds
from raggedmoe.kernels.grouped_matmul.tiles import (
    Problem,
    TileChoice,
    choice_of,
    output_widths,
    shape_bucket,
    tiles_for,
    tiles_of_choice,
)
from raggedmoe.kernels.grouped_matmul.tpu_operands import operand_of

OPERATION = "grouped_matmul"


@dataclass(frozen=True, kw_only=True)
class TileTrial:
    """One choice of tiles and what the compiler makes of it."""

    choice: TileChoice
    is_rule: bool  # what the rule takes
    outcome: CompileOutcome

    @property
    def cycles(self) -> float:
        """Predicted: the larger of issue and transfers; infinite if it does not compile."""
        schedule = self.outcome.schedule
        return float("inf") if schedule is None else schedule.estimate

    @property
    def issue(self) -> float:
        return float("inf") if self.outcome.schedule is None else self.outcome.schedule.issue


@dataclass(frozen=True, kw_only=True)
class TiledCall:
    """Our kernel on an example call of `grouped_matmul`, with the tiles of one choice."""

    call: str
    dtype: str
    rows: int  # this and what follows: the fields of a `TileChoice`
    step: int
    out: int
    inner: int
    paired: bool

    def program(self) -> JitProgram:
        """Make the kernel's program."""
        example = find_example(OPERATION, self.call, self.dtype)
        arrays, transpose = with_integers(dict(example.arrays)), example.options["transpose_rhs"]
        choice = TileChoice(rows=self.rows, step=self.step, out=self.out, inner=self.inner, paired=self.paired)

        def function(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
            hardware = target_hardware()
            tiles = tiles_of_choice(_problem(example, hardware), hardware, choice)
            bounds = group_bounds(group_sizes, rhs.shape[0], lhs.shape[0])
            return pallas_tpu.forward(
                lhs, rhs, bounds, transpose_rhs=transpose, out_dtype=lhs.dtype, hardware=hardware, tiles=tiles
            )

        return JitProgram(function=lambda arrays: function(**arrays), args=(arrays,))


def _problem(example: Any, hardware: Hardware) -> Problem:
    lhs, rhs, transpose = example.arrays["lhs"], example.arrays["rhs"], example.options["transpose_rhs"]
    return pallas_tpu.problem_of(operand_of(lhs), operand_of(rhs), transpose, lhs.dtype, hardware)


def choices(problem: Problem, hardware: Hardware) -> Iterator[TileChoice]:
    """Yield the rule's tiles, then its neighbours: other rows, steps, columns, parts of I, alone or in pairs."""
    tiles = tiles_for(problem, hardware)
    if tiles is None:
        raise ValueError(f"no tiles of {problem} fit the VMEM of a {hardware.name}; pad O to a multiple of 128")
    rule = choice_of(tiles)
    yield rule
    seen = {rule}
    narrower = [width for width in output_widths(problem.out) if width < rule.out][:1]
    changes: tuple[dict[str, Any], ...] = (
        {"step": 32},
        {"step": 64},
        {"step": 128},
        {"rows": 256},
        {"rows": 256, "step": 64},
        {"paired": not rule.paired},
        {"inner": rule.inner // 2},
        *({"out": width} for width in narrower),
    )
    for change in changes:
        choice = replace(rule, **change)
        if choice not in seen and tiles_of_choice(problem, hardware, choice) is not None:
            seen.add(choice)
            yield choice


def choices_for(call: str, dtype: str, topology: str) -> list[TileChoice]:
    """List the choices that `tune` will try."""
    chip = find_chip(topology)
    return list(choices(_problem(find_example(OPERATION, call, dtype), chip), chip))


def tune(call: str, dtype: str, topology: str, timeout: float = 1800.0) -> Iterator[TileTrial]:
    """Compile each choice, and yield it with its schedule."""
    tried = choices_for(call, dtype, topology)
    cases = [
        CompileCase(
            title=str(choice),
            subject=TiledCall(call=call, dtype=dtype, **vars(choice)),
            topology=topology,
            scheduled=True,
        )
        for choice in tried
    ]
    for choice, outcome in zip(tried, compile_cases(cases, timeout=timeout)):
        yield TileTrial(choice=choice, is_rule=choice == tried[0], outcome=outcome)


def table_line(call: str, dtype: str, topology: str, choice: TileChoice) -> str:
    """Write a line for the table of tuned tiles."""
    chip = find_chip(topology)
    bucket = shape_bucket(_problem(find_example(OPERATION, call, dtype), chip), chip)
    return f"    {bucket!r}: {choice!r},"
