"""What a contender is: one function that prepares a case, run in a process of its own. A new one is one function.

The function is found by the decorator `contender`, imports what it needs inside, and returns a `Prepared` call.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from raggedmoe.bench.case import Case

OURS, PEER, LIMIT, SECOND_LIMIT, NOTE = "ours", "peer", "limit", "second limit", "note"
# The files with contenders, in the order of the tables.
MODULES = tuple(
    f"raggedmoe.bench.{name}"
    for name in ("ours", "peers_jax", "peers_torch", "peers_transformers", "whole_models", "limits")
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A compiled call, with its arrays in memory. It returns when it has computed everything."""

    run: Callable[[], Any]
    arrays: Callable[[Any], Mapping[str, Any]] | None = None  # the results by name, for NumPy; None: nothing to compare
    seconds: Callable[[Any], float] | None = None  # of a run that measures a part of itself


def can_run(case: Case) -> None:
    """Give no reason against any case."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A name in the tables, and how to prepare its calls."""

    name: str
    subjects: tuple[str, ...]
    role: str
    prepare: Callable[[Case], Prepared]
    process: str  # contenders with the same one share a process
    needs: tuple[str, ...] = ()  # packages, without which it is left out
    environment: Mapping[str, str] = field(default_factory=dict)
    why_not: Callable[[Case], str | None] = can_run  # why it cannot, or should not, run a case
    weights: str | None = None  # the format of its weights; None: the type of the case

    @property
    def address(self) -> tuple[str, str, str]:
        """Where a process finds it."""
        return self.prepare.__module__, self.name, self.subjects[0]

    def reason(self, case: Case) -> str | None:
        """Say why it does not run the case here; None: it does."""
        missing = [name for name in self.needs if find_spec(name) is None]
        return f"{' and '.join(missing)} not installed" if missing else self.why_not(case)


_registered: dict[tuple[str, str, str], Contender] = {}


def contender(
    name: str, *subjects: str, role: str = PEER, process: str = "", **rest: Any
) -> Callable[[Callable[[Case], Prepared]], Callable[[Case], Prepared]]:
    """Make the function a contender for these subjects. The other arguments are `Contender`'s."""

    def register(prepare: Callable[[Case], Prepared]) -> Callable[[Case], Prepared]:
        made = Contender(name=name, subjects=subjects, role=role, prepare=prepare, process=process or name, **rest)
        _registered[made.address] = made
        return prepare

    return register


def contenders(subject: str, modules: Iterable[str] = MODULES) -> list[Contender]:
    """List all contenders for a subject, in the order of the modules."""
    modules = tuple(modules)
    for module in modules:
        importlib.import_module(module)
    mine = [c for c in _registered.values() if subject in c.subjects and c.address[0] in modules]
    return sorted(mine, key=lambda c: modules.index(c.address[0]))


def find_contender(address: Iterable[str]) -> Contender:
    """Import the contender that has this address."""
    module, name, subject = address
    importlib.import_module(module)
    return _registered[module, name, subject]
