"""What the compiler's bundles say of a SparseCore program: cycles of each loop, the streams that it starts, bytes.

Streams run beside the bundles, and each has a cost of its own that no dump tells: compare programs first by streams and
bytes, then by cycles. There is no executor here: how often a loop runs is for the caller to say; what its counter is
compared with is shown beside it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

WORD_BYTES = 4
UNITS = ("scs", "tac", "tec")  # the sequencer; a tile's access core; a tile's execute core, which does the work


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Streams of one kind and size that a loop's body starts in one iteration."""

    kind: str  # "stream.indirect.gather", …
    num_bytes: int  # of each: for an indirect one, of each row
    count: int


@dataclass(frozen=True, kw_only=True)
class SparseCoreLoop:
    """One loop of a unit's program."""

    label: str
    depth: int  # loops around it
    cycles: int  # of one iteration, inner loops not counted
    streams: tuple[Stream, ...]  # of one iteration, inner loops' not counted
    limit: int | None  # the constant that its counter is compared with, if it is one
    step: int | None  # of the counter

    @property
    def stream_bytes(self) -> int:
        return sum(stream.num_bytes * stream.count for stream in self.streams)


@dataclass(frozen=True, kw_only=True)
class SparseCoreProgram:
    """The program of one unit of a SparseCore."""

    name: str
    unit: str  # of UNITS
    cycles: int  # of its code, each bundle once
    loops: tuple[SparseCoreLoop, ...]  # in the order of the code

    def loop(self, label: str) -> SparseCoreLoop:
        return next(loop for loop in self.loops if loop.label == label)


class _Bundle(NamedTuple):
    cycles: int
    text: str


class _Loop(NamedTuple):
    label: str
    begin: int
    end: int
    predicate: str | None


_LABEL_OR_BUNDLE = re.compile(r"(?ms)^(\.L\w+):|^0x[0-9a-f]+: \{(.*?)\}\s*$")
_BRANCH = re.compile(r"sbr\.rel (?:@!?(p\d+) )?(\.LBB\w+)-\.L\w+(?:, \$(\d+))?")
# Bundles after a branch that still run, where the dump does not say: v5p's and v6e's. Of the eight stores of a gather's
# inner loop there, the last two are in the two bundles behind the branch.
BRANCH_DELAY = 2
_DELAY = re.compile(r"sdelay \$0x(\w+)")
_STREAM = re.compile(r"=\t(stream\.[\w.]+)(?: @!?p\d+)? \[.*?\](?:, \[[^\]]*\])*, \$0x(\w+)")


def read_sparse_core(name: str, text: str) -> list[SparseCoreProgram]:
    """Read the units' programs from a dump of SparseCore bundles."""
    units = "|".join(UNITS)
    bodies = re.findall(rf"(?ms)^({units})\n(.*?)(?=^(?:{units})\n|\Z)", text)
    return [_program(name, unit, body) for unit, body in bodies]


def _program(name: str, unit: str, text: str) -> SparseCoreProgram:
    bundles: list[_Bundle] = []
    places: dict[str, int] = {}
    loops: dict[str, _Loop] = {}
    for match in _LABEL_OR_BUNDLE.finditer(text):
        if match[1]:
            places[match[1]] = len(bundles)
            continue
        waited = sum(int(cycles, 16) for cycles in _DELAY.findall(match[2]))
        bundles.append(_Bundle(1 + waited, match[2]))
        branch = _BRANCH.search(match[2])
        if branch and branch[2] in places:  # backwards: a loop, with as many bundles after the branch as it says
            label = branch[2]  # jumps back to one place are one loop, which ends with the last of them
            delay = int(branch[3]) if branch[3] else BRANCH_DELAY
            loops[label] = _Loop(label, places[label], len(bundles) + delay, branch[1])
    nested = sorted(loops.values(), key=lambda loop: (loop.begin, -loop.end))
    return SparseCoreProgram(
        name=name,
        unit=unit,
        cycles=sum(bundle.cycles for bundle in bundles),
        loops=tuple(_describe_loop(loop, nested, bundles) for loop in nested),
    )


def _describe_loop(loop: _Loop, loops: list[_Loop], bundles: list[_Bundle]) -> SparseCoreLoop:
    inner = [other for other in loops if other != loop and loop.begin <= other.begin and other.end <= loop.end]
    outside_inner = [
        bundle
        for at, bundle in enumerate(bundles[loop.begin : loop.end], loop.begin)
        if not any(other.begin <= at < other.end for other in inner)
    ]
    counted = Counter(_streams(outside_inner))
    limit, step = _counter(loop, outside_inner)
    return SparseCoreLoop(
        label=loop.label,
        depth=sum(o != loop and o.begin <= loop.begin and loop.end <= o.end for o in loops),
        cycles=sum(bundle.cycles for bundle in outside_inner),
        streams=tuple(Stream(kind=kind, num_bytes=size, count=count) for (kind, size), count in counted.items()),
        limit=limit,
        step=step,
    )


def _streams(bundles: list[_Bundle]) -> Iterator[tuple[str, int]]:
    for bundle in bundles:
        for kind, words in _STREAM.findall(bundle.text):
            yield kind, int(words, 16) * WORD_BYTES


def _counter(loop: _Loop, bundles: list[_Bundle]) -> tuple[int | None, int | None]:
    """Read the constant that the loop's test compares its counter with, and what is added to it."""
    if loop.predicate is None:
        return None, None
    text = "\n".join(bundle.text for bundle in bundles)
    tests = re.findall(rf"\b{loop.predicate} =\ts(?:lt|le|gt|ge|ne)\.[su]32 (s\d+), \$0x(\w+)", text)
    if not tests:
        return None, None
    counter, limit = tests[-1]
    steps = re.findall(rf"\b{counter} =\tsadd\.s32 \$0x(\w+), {counter}\b", text)
    return int(limit, 16), int(steps[0], 16) if steps else None


def program_cycles(program: SparseCoreProgram, trips: Mapping[str, int]) -> int:
    """Sum the cycles of all loops, with so many iterations by label, and each bundle of the rest of the code once."""
    total, around = 0, [1]
    for loop in program.loops:
        if loop.label not in trips:
            raise ValueError(f"{program.name}: trips has no count for the loop {loop.label}; give one")
        count = trips[loop.label]
        around = [*around[: loop.depth + 1], around[loop.depth] * count]
        total += loop.cycles * around[-1]
    return total + program.cycles - sum(loop.cycles for loop in program.loops)


def sparse_core_from_json(plain: Mapping[str, Any]) -> SparseCoreProgram:
    """Make the program that `dataclasses.asdict` described."""
    loops = tuple(
        SparseCoreLoop(**{**loop, "streams": tuple(Stream(**stream) for stream in loop["streams"])})
        for loop in plain["loops"]
    )
    return SparseCoreProgram(**{**plain, "loops": loops})
