"""What an optimised program does, read off its text: matrix products, kernels, loops, and what devices exchange.

A loop of known length counts as often as it runs, one whose length is data counts once, and is counted as such. Of a
conditional's branches all count. What is counted is one device's part.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RAGGED = "ragged-all-to-all"
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", RAGGED, "all-to-all", "collective-permute")
PRODUCTS = ("dot", "convolution")  # a TPU's optimised matmuls are convolutions
LOWERED, OPTIMIZED = "lowered.mlir", "optimized.hlo"
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}  # others have them in the name


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind."""

    number: int = 0
    num_bytes: int = 0  # of what is gathered, scattered, summed or exchanged, on one device


@dataclass(frozen=True, kw_only=True)
class ProgramCounts:
    """The counts of what is in a program, or in a part of it."""

    written: int = 0  # matrix products in the text
    executed: int = 0  # with the loops that are known
    product_flops: int = 0  # of those that are dots
    kernels: Mapping[str, int] = field(default_factory=dict)  # custom calls in the text, by target
    loops: int = 0  # in the text
    open_loops: int = 0  # of those, how many run as often as the data says
    collectives: Mapping[str, Traffic] = field(default_factory=dict)  # by kind, with the loops that are known


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One instruction."""

    result: str  # its type
    operation: str
    rest: str  # operands and attributes
    lhs: str  # the type of its first operand

    @property
    def calls(self) -> Iterator[tuple[str, int]]:
        """The computations that it runs, and how often."""
        if self.operation.endswith(("-update", "-done")):  # the start has run them
            return
        trips = re.search(r"known_trip_count\D*(\d+)", self.rest)
        times = int(trips[1]) if self.operation == "while" and trips else 1
        for names in re.findall(r"(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)", self.rest):
            for name in re.findall(r"%([\w.\-]+)", names):
                yield name, times


def counts_of(hlo: str) -> ProgramCounts:
    """Count what is in an optimised program, as its executable prints it."""
    computations, entry = _computations(hlo)
    often = _how_often(computations, entry)
    lines_and_times = [(line, often.get(name, 0)) for name, lines in computations.items() for line in lines]
    products = [(line, times) for line, times in lines_and_times if line.operation in PRODUCTS]
    loops = [line for line, _ in lines_and_times if line.operation == "while"]
    targets = (re.search(r'custom_call_target="([^"]+)"', line.rest) for line, _ in lines_and_times)
    return ProgramCounts(
        written=len(products),
        executed=sum(times for _, times in products),
        product_flops=sum(times * _dot_flops(line) for line, times in products),
        kernels=dict(Counter(target[1] for target in targets if target)),
        loops=len(loops),
        open_loops=sum("known_trip_count" not in line.rest for line in loops),
        collectives=_traffic(lines_and_times),
    )


def counts_from_json(plain: Mapping[str, Any]) -> ProgramCounts:
    """Make the counts that `dataclasses.asdict` described."""
    traffic = {kind: Traffic(**entry) for kind, entry in plain["collectives"].items()}
    return ProgramCounts(**{**plain, "collectives": traffic})


def write_programs(folder: Path, lowered: str, optimized: str) -> tuple[Path, Path]:
    """Write both texts as files of a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    places = folder / LOWERED, folder / OPTIMIZED
    for place, text in zip(places, (lowered, optimized)):
        place.write_text(text)
    return places


def _computations(hlo: str) -> tuple[dict[str, list[_Line]], str]:
    """Read the instructions of each computation by its name, and the name of the one that is run."""
    lines: dict[str, list[_Line]] = {}
    types: dict[str, str] = {}
    entry = name = ""
    for text in hlo.splitlines():
        line = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?)\s([\w\-]+)\((.*)", text)
        if line and name:
            types[line[1]] = line[2]
            first = re.search(r"%([\w.\-]+)", line[4])
            lhs = types.get(first[1], "") if first else ""
            lines[name].append(_Line(result=line[2], operation=line[3], rest=line[4], lhs=lhs))
        elif text.startswith("}"):
            name = ""
        elif header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", text):
            name = header[2]
            lines[name], types = [], {}
            entry = name if header[1] else entry
    return lines, entry


def _how_often(computations: dict[str, list[_Line]], entry: str) -> dict[str, int]:
    """Count how often each computation is run."""
    often = dict.fromkeys(computations, 0)
    often[entry] = 1
    for name in reversed(computations):  # callers stand after what they call: all of one's callers come before it
        for line in computations[name]:
            for called, times in line.calls:
                if called in often:
                    often[called] += often[name] * times
    return often


def _traffic(lines_and_times: list[tuple[_Line, int]]) -> dict[str, Traffic]:
    total: dict[str, Traffic] = {}
    for line, times in lines_and_times:
        across = re.search(r'_xla_megascale_transfer_type="(\w+)"', line.rest) if line.operation == "send" else None
        if across is not None:  # by the hosts: its type has the array, a number and a token
            what, (bits, shape) = f"{across[1].lower().replace('_', '-')} across slices", next(_arrays(line.result))
            total[what] = _add_traffic(total.get(what), times, bits * math.prod(shape) // 8)
        kind = next((kind for kind in COLLECTIVES if line.operation in (kind, f"{kind}-start")), None)
        size = 1 if kind is None else _group_size(line.rest)
        if kind is not None and size > 1:
            moved = _moved_bytes(line, kind) * (size if kind == "reduce-scatter" else 1)
            total[kind] = _add_traffic(total.get(kind), times, moved)
    return total


def _add_traffic(traffic: Traffic | None, times: int, num_bytes: int) -> Traffic:
    """Count a collective that is run so often, with these bytes each time."""
    old = traffic or Traffic()
    return replace(old, number=old.number + times, num_bytes=old.num_bytes + times * num_bytes)


def _moved_bytes(line: _Line, kind: str) -> int:
    """Count the bytes of a collective's result; of a ragged exchange, those of the rows that are there to be sent."""
    if kind == RAGGED:
        return array_bytes(line.lhs)
    sizes = [bits * math.prod(shape) // 8 for bits, shape in _arrays(line.result)]
    if line.operation == "all-gather-start":  # its type has the operands first
        sizes = sizes[len(sizes) // 2 :]
    elif line.operation == "collective-permute-start":
        sizes = sizes[1:2]
    return sum(sizes)


def _group_size(rest: str) -> int:
    """Read how many devices take part in a collective together; for a permutation, any number above one."""
    groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|mesh\[([^\]]*)\][^{]*\{(.*?)\})", rest)
    if groups is None:
        return 2 if "source_target_pairs" in rest else 1
    listed, size, mesh, axes = groups.groups()
    if mesh is not None:
        sizes = dict(entry.split("=") for entry in mesh.split(","))
        return math.prod(int(sizes[axis]) for axis in axes.split(","))
    return len(listed.split(",")) if listed else int(size)


def _dot_flops(line: _Line) -> int:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
    if line.operation != "dot" or contracted is None or not line.lhs:
        return 0
    (_, lhs), (_, out) = next(_arrays(line.lhs)), next(_arrays(line.result))
    return 2 * math.prod(out) * math.prod(lhs[int(d)] for d in contracted[1].split(",") if d)


def array_bytes(text: str) -> int:
    """Sum the bytes of all arrays that a type names."""
    return sum(bits * math.prod(shape) for bits, shape in _arrays(text)) // 8


def _arrays(text: str) -> Iterator[tuple[int, list[int]]]:
    """Read the bits of an element, and the shape, of each array that a type names."""
    for dtype, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype) or (int(digits[0]) if digits else 0)  # s32, u8, s4, f8e4m3fn
        yield bits, [int(size) for size in sizes.split(",") if size]
