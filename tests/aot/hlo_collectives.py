"""The collectives of a compiled program, read off its text."""

import math
import re
from collections import Counter

import numpy as np

RAGGED = "ragged-all-to-all"
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", RAGGED, "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
_OPERATION = re.compile(rf"= (?P<result>.*?) (?P<kind>{'|'.join(KINDS)})(?:-start)?\((?P<operands>.*)")
_DEFINED = re.compile(r"^\s*(?:ROOT )?(%\S+) = (\S+) ")
_ARRAY = re.compile(r"\b([a-z]\w+)\[([\d,]*)\]")
# {{0,1},{2,3}}, or [groups, size]<=[shape]T(transposed), or mesh['a'=2,'b'=4], device_ids=([shape]T(transposed)) {'b'}
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<listed>[\d,]+)\}|\[(?P<groups>\d+),\d+\]<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
    r"|mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\(\[(?P<ids>[\d,]+)\](?:T\((?P<turned>[\d,]+)\))?\))? \{(?P<axes>.*?)\})"
)


def array_bytes(text):
    """Count the bytes of all arrays that a type names."""
    return sum(
        BYTES[dtype] * math.prod(int(size) for size in dims.split(",") if size)
        for dtype, dims in _ARRAY.findall(text)
        if dtype in BYTES
    )


def _numbers(text):
    return [int(number) for number in text.split(",")]


def _numbered(shape, order):
    """Device ids in the order that a shape, turned, gives them."""
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids if order is None else ids.transpose(_numbers(order))).reshape(-1)


def group(line):
    """The devices that take part in a collective together: those of the first group."""
    groups = _GROUPS.search(line)
    assert groups is not None, line
    if groups["listed"]:
        return _numbers(groups["listed"])
    if groups["shape"]:
        return _numbered(_numbers(groups["shape"]), groups["order"]).reshape(int(groups["groups"]), -1)[0].tolist()
    sizes = dict(entry.split("=") for entry in groups["mesh"].split(","))
    shape = [int(size) for size in sizes.values()]
    ids = _numbered(_numbers(groups["ids"]) if groups["ids"] else shape, groups["turned"]).reshape(shape)
    axes = groups["axes"].split(",")
    return ids[tuple(slice(None) if axis in axes else 0 for axis in sizes)].reshape(-1).tolist()


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
        size = len(group(line))
        if size > 1:
            kind = match["kind"]
            if kind == RAGGED:
                sides = re.findall(r"%[\w.\-]+", match["operands"])[:2]
                found[kind, size] += min(array_bytes(defined[side]) for side in sides)
            else:
                found[kind, size] += array_bytes(match["result"]) * (size if kind == "reduce-scatter" else 1)
    return found


def arrays_across(hlo, devices_per_slice):
    """The bytes of each array that is summed over devices of several slices, by how many devices; no single numbers."""
    found = Counter()
    for line in hlo.splitlines():
        match = _OPERATION.search(line)
        if match is None or len({device // devices_per_slice for device in group(line)}) == 1:
            continue
        assert match["kind"] == "all-reduce", line
        for dtype, dims in _ARRAY.findall(match["result"]):
            if dims not in ("", "1"):
                found[len(group(line))] += array_bytes(f"{dtype}[{dims}]")
    return found
