"""What is to be compiled, described so that another process can make it, and what came of it; both as JSON."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from jax.sharding import AbstractMesh, Mesh

from raggedmoe.aot.compiled import Compiled, Cost, Memory
from raggedmoe.aot.overlap import Move, move_from_json
from raggedmoe.aot.program_text import ProgramCounts, counts_from_json
from raggedmoe.aot.schedule import Schedule, schedule_from_json, schedule_to_json
from raggedmoe.kernels.chosen import ChosenKernel
from raggedmoe.train.settings.config import Source, TrainConfig, config_of

SETTINGS, SOURCE = "settings", "source"  # the keys of a run's settings in the JSON of a case, and of who set them


@dataclass(frozen=True, kw_only=True)
class JitProgram:
    """A function and the arguments that it is compiled for."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # arrays or `jax.ShapeDtypeStruct`
    donate: tuple[int, ...] = ()
    mesh: Mesh | AbstractMesh | None = None  # of the topology's devices; None: it is for one of them


class Subject(Protocol):
    """The subject of a case: a frozen dataclass that a worker can import, with fields that JSON can hold."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def program(self) -> JitProgram:
        """Make the program, with the case's topology as the target."""


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One compilation."""

    title: str
    subject: Subject
    topology: str
    options: Mapping[str, str] = field(default_factory=dict)  # the compiler's
    scheduled: bool = False  # read the schedule as well
    overlaps: bool = False  # and what is done while devices communicate
    trips: Mapping[str, int] = field(default_factory=dict)  # runs of a loop's body, by region, where it must be said
    taken: Mapping[str, float] = field(default_factory=dict)  # share of times that a region is entered
    hlo: str | None = None  # the folder that the lowered and the optimised program are written to, and counted


def case_to_json(case: CompileCase) -> dict[str, Any]:
    """Describe a case as JSON can hold it: its subject by the class, ``package.module:Class``, and its fields."""
    kind = type(case.subject)
    subject = {"build": f"{kind.__module__}:{kind.__qualname__}", "arguments": _to_plain(case.subject)}
    plain = {name: value for name, value in vars(case).items() if name != "subject"}
    return {"title": case.title, **subject, **plain}


def _to_plain(subject: Subject) -> dict[str, Any]:
    """Return a subject's fields; the configuration of a run as its settings that are not the default ones.

    What a user typed goes along: errors in the worker name it, and what was typed is chosen, if it is the default too.
    """
    arguments = {name: getattr(subject, name) for name in subject.__dataclass_fields__}
    return {
        name: {SETTINGS: value.changes(), SOURCE: _source_to_plain(value.source)}
        if isinstance(value, TrainConfig)
        else value
        for name, value in arguments.items()
    }


def _source_to_plain(source: Source) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in vars(source).items()}


def _source_from_plain(plain: Mapping[str, Any]) -> Source:
    return Source(
        words=plain["words"],
        typed=frozenset(plain["typed"]),
        translated=frozenset(plain["translated"]),
        notes=tuple(plain["notes"]),
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return config_of(value[SETTINGS], _source_from_plain(value[SOURCE]))
    return tuple(value) if isinstance(value, list) else value  # JSON has made lists of tuples


def case_from_json(plain: Mapping[str, Any]) -> CompileCase:
    """Make the case that `case_to_json` described."""
    module, _, name = plain["build"].partition(":")
    arguments = {key: _from_plain(value) for key, value in plain["arguments"].items()}
    subject = getattr(importlib.import_module(module), name)(**arguments)
    return CompileCase(
        subject=subject, **{key: value for key, value in plain.items() if key not in ("build", "arguments")}
    )


PASSED, REFUSED, NO_FIT, FAILED, CRASHED, TIMED_OUT = "pass", "refused", "no fit", "fail", "crash", "time-out"


@dataclass(frozen=True, kw_only=True)
class CompileOutcome:
    """The outcome of a case: whether it compiled, and what the compiler said of it."""

    case: CompileCase
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


def outcome_to_json(outcome: CompileOutcome) -> dict[str, Any]:
    """Describe an outcome as JSON can hold it, without the executable."""
    compiled = outcome.compiled
    schedule = None if outcome.schedule is None else schedule_to_json(outcome.schedule)
    moves = None if outcome.moves is None else [asdict(move) for move in outcome.moves]
    counts = None if outcome.counts is None else asdict(outcome.counts)
    plain = {
        **vars(outcome),
        "case": case_to_json(outcome.case),
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


def outcome_from_json(plain: Mapping[str, Any]) -> CompileOutcome:
    """Make the outcome that `outcome_to_json` described."""
    compiled = None
    if plain["compiled"] is not None:
        stored = plain["compiled"]
        compiled = Compiled(
            **{
                **stored,
                "memory": Memory(**stored["memory"]),
                "cost": Cost(**stored["cost"]),
                "kernels": tuple(ChosenKernel(**kernel) for kernel in stored["kernels"]),
            }
        )
    schedule = None if plain["schedule"] is None else schedule_from_json(plain["schedule"])
    moves = None if plain["moves"] is None else tuple(move_from_json(move) for move in plain["moves"])
    counts = None if plain["counts"] is None else counts_from_json(plain["counts"])
    parts = {
        "case": case_from_json(plain["case"]),
        "compiled": compiled,
        "schedule": schedule,
        "moves": moves,
        "counts": counts,
    }
    return CompileOutcome(**{**plain, **parts})
