"""The collectives of a compiled program, read off its text."""

import math
import re
from collections import Counter

RAGGED = "ragged-all-to-all"
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", RAGGED, "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
_OPERATION = re.compile(rf"= (?P<result>.*?) (?P<kind>{'|'.join(KINDS)})(?:-start)?\((?P<operands>.*)")
_DEFINED = re.compile(r"^\s*(?:ROOT )?(%\S+) = (\S+) ")
_ARRAY = re.compile(r"\b([a-z]\w+)\[([\d,]*)\]")
# {{0,1},{2,3}}, or [groups, size]<=…, or mesh['data'=2,'expert'=4] {'expert'}
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|mesh\[(.*?)\] \{(.*?)\})")


def array_bytes(text):
    """Of all arrays that a type names."""
    return sum(
        BYTES[dtype] * math.prod(int(size) for size in dims.split(",") if size)
        for dtype, dims in _ARRAY.findall(text)
        if dtype in BYTES
    )


def group_size(line):
    """Devices that take part in a collective together."""
    groups = _GROUPS.search(line)
    assert groups is not None, line
    listed, size, mesh, axes = groups.groups()
    if mesh is not None:
        sizes = dict(entry.split("=") for entry in mesh.split(","))
        return math.prod(int(sizes[axis]) for axis in axes.split(","))
    return len(listed.split(",")) if listed else int(size)


def collectives(hlo):
    """Bytes of each kind of collective over groups of each size: of what is gathered, scattered, summed or exchanged.

    Those over a single device communicate nothing and are left out. Of a ragged exchange, the rows of the device's own
    tokens: the smaller of what is sent and of what is received into, as one of them has room for all that may come.
    """
    found, defined = Counter(), dict(_DEFINED.match(line).groups() for line in hlo.splitlines() if _DEFINED.match(line))
    for line in hlo.splitlines():
        match = _OPERATION.search(line)
        if match is None:
            continue
        size = group_size(line)
        if size > 1:
            kind = match["kind"]
            if kind == RAGGED:
                sides = re.findall(r"%[\w.\-]+", match["operands"])[:2]
                found[kind, size] += min(array_bytes(defined[side]) for side in sides)
            else:
                found[kind, size] += array_bytes(match["result"]) * (size if kind == "reduce-scatter" else 1)
    return found
