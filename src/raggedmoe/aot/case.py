"""What is to be compiled, described so that another process can make it, and what came of it; both as JSON."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jax.sharding import Mesh

from raggedmoe.aot.compiled import ChosenKernel, Compiled, Cost, Memory
from raggedmoe.aot.overlap import Move, move_from_json
from raggedmoe.aot.program_text import ProgramCounts, counts_from_json
from raggedmoe.aot.schedule import Schedule, schedule_from_json, schedule_to_json


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function and the arguments that it is compiled for."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # arrays or `jax.ShapeDtypeStruct`
    donate: tuple[int, ...] = ()
    mesh: Mesh | None = None  # of the topology's devices; None: it is for one of them


@dataclass(frozen=True, kw_only=True)
class Case:
    """One compilation."""

    title: str
    build: str  # "package.module:function", which makes the `Program`, with the topology as the target
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of that function, as JSON can hold them
    topology: str
    options: Mapping[str, str] = field(default_factory=dict)  # the compiler's
    scheduled: bool = False  # read the schedule as well
    overlaps: bool = False  # and what is done while devices communicate
    trips: Mapping[str, int] = field(default_factory=dict)  # runs of a loop's body, by region, where it must be said
    taken: Mapping[str, float] = field(default_factory=dict)  # share of times that a region is entered
    hlo: str | None = None  # the folder that the lowered and the optimised program are written to, and counted

    def program(self) -> Program:
        """What `build` makes."""
        module, _, name = self.build.partition(":")
        return getattr(importlib.import_module(module), name)(**self.arguments)


PASSED, REFUSED, NO_FIT, FAILED, CRASHED, TIMED_OUT = "pass", "refused", "no fit", "fail", "crash", "time-out"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a case."""

    case: Case
    verdict: str  # PASSED; or REFUSED by the library, NO_FIT in HBM, FAILED by an error, CRASHED, TIMED_OUT
    error: str | None = None  # its first line, the compiler's own where it has one
    detail: str | None = None  # all of it
    compiled: Compiled | None = None  # if it passed
    needed: int | None = None  # bytes of HBM, if the compiler said
    available: int | None = None
    schedule: Schedule | None = None
    moves: tuple[Move, ...] | None = None
    counts: ProgramCounts | None = None  # of the optimised program, if it was written

    @property
    def passed(self) -> bool:
        return self.verdict == PASSED


def as_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON can hold it, without the executable."""
    compiled = outcome.compiled
    schedule = None if outcome.schedule is None else schedule_to_json(outcome.schedule)
    moves = None if outcome.moves is None else [asdict(move) for move in outcome.moves]
    counts = None if outcome.counts is None else asdict(outcome.counts)
    plain = {
        **vars(outcome),
        "case": asdict(outcome.case),
        "compiled": None,
        "schedule": schedule,
        "moves": moves,
        "counts": counts,
    }
    if compiled is not None:
        plain["compiled"] = {
            **vars(compiled),
            "memory": asdict(compiled.memory),
            "cost": asdict(compiled.cost),
            "kernels": [asdict(kernel) for kernel in compiled.kernels],
        }
        for not_json in ("executable", "traced", "lowered"):
            del plain["compiled"][not_json]
    return plain


def from_json(plain: Mapping[str, Any]) -> Outcome:
    """The outcome that `as_json` described."""
    compiled = None
    if plain["compiled"] is not None:
        found = plain["compiled"]
        compiled = Compiled(
            **{
                **found,
                "memory": Memory(**found["memory"]),
                "cost": Cost(**found["cost"]),
                "kernels": tuple(ChosenKernel(**kernel) for kernel in found["kernels"]),
            }
        )
    schedule = None if plain["schedule"] is None else schedule_from_json(plain["schedule"])
    moves = None if plain["moves"] is None else tuple(move_from_json(move) for move in plain["moves"])
    counts = None if plain["counts"] is None else counts_from_json(plain["counts"])
    found = {
        "case": Case(**plain["case"]),
        "compiled": compiled,
        "schedule": schedule,
        "moves": moves,
        "counts": counts,
    }
    return Outcome(**{**plain, **found})
