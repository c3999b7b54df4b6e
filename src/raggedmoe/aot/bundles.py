"""A TensorCore program as the compiler schedules it: VLIW bundles, one a cycle, read from the compiler's text.

Of each bundle only the scalar unit's instructions, the branches and the DMAs are kept as instructions: they decide what
runs how often. What the vector units do is in the table of utilisation beside it, bundle by bundle.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Predicate(NamedTuple):
    """The condition under which an instruction takes effect."""

    name: str
    negated: bool


class Instruction(NamedTuple):
    """One slot of a bundle. Operands are names (``%s3_s1``), allocations (``#allocation4``), or integers."""

    target: str
    opcode: str
    predicate: Predicate | None
    otherwise: str | None  # the value that a predicated move keeps
    operands: tuple[str | int, ...]


class Branch(NamedTuple):
    """A jump, which takes effect after the chip's delay slots."""

    at: int
    to: int
    region: int  # the compiler's number of the region that it repeats or skips
    predicate: Predicate | None

    @property
    def repeats(self) -> bool:
        return self.to <= self.at


class Operand(NamedTuple):
    """An array that a program is called with, or writes to."""

    name: str
    number: int
    dtype: str
    shape: tuple[int, ...]
    is_output: bool


@dataclass(frozen=True, kw_only=True)
class BundleProgram:
    """One op's bundles."""

    num_bundles: int
    instructions: dict[int, tuple[Instruction, ...]]  # of the bundles that have some, in textual order, phis first
    branches: dict[int, Branch]  # by bundle
    operands: tuple[Operand, ...]


_BUNDLE = re.compile(r"(?m)^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: ?")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_OPERAND = re.compile(r"(%\w+) = inlined_call_operand[^\[]*\[shape: (\w+)\[([\d,]*)\][^\]]*?index: (\d+), kind: (\w+)")
_BRANCH = re.compile(r"sbr\.\w+ (?:\((!?)(%\w+)\) )?target bundleno = (\d+) [^,]*, region = (\d+)")
_INSTRUCTION = re.compile(r"(%\w+) = ([a-z_]+(?:\.[a-z0-9_]+)*)\s*(.*)", re.DOTALL)
# A conditional move, `(!%p1, %s2)`, and any other predicated instruction, `(!%p1)`.
_PREDICATE = re.compile(r"\((!?)(%\w+)(?:, (%\w+|\d+|\[#\w+\]))?\),? ?")
_VALUE = re.compile(r"%\w+|#\w+|\$0x[0-9a-f]+|(?<![\w#%$])\d+(?!\w)")
_KNOWN_ZERO = re.compile(r"(core id|logical chip id|core index)")
# Vector instructions, synchronisation and checks: they decide nothing that is counted here.
_IGNORED = re.compile(r"v|sfence|shalt|dma\.done|set|inlined_call_operand|sbr")


def read_program(text: str) -> BundleProgram:
    """Read the program from a dump of `packed-bundles-post-ra`."""
    parts = _BUNDLE.split(text)[1:]
    instructions: dict[int, tuple[Instruction, ...]] = {}
    branches: dict[int, Branch] = {}
    operands: list[Operand] = []
    for address, body in zip(parts[::2], parts[1::2]):
        at = int(address, 16)
        operands += _operands(body)
        if branch := _BRANCH.search(body):
            predicate = Predicate(branch[2], bool(branch[1])) if branch[2] else None
            branches[at] = Branch(at, int(branch[3]), int(branch[4]), predicate)
        slots = tuple(_instructions(body))
        if slots:
            # A phi names what a register holds as the bundle begins, whatever its place in the text.
            instructions[at] = tuple(sorted(slots, key=lambda slot: slot.opcode != "sphi"))
    num_bundles = int(parts[-2], 16) + 1 if parts else 0
    return BundleProgram(
        num_bundles=num_bundles,
        instructions=instructions,
        branches=branches,
        operands=tuple(sorted(operands, key=lambda operand: operand.number)),
    )


def _operands(body: str) -> Iterator[Operand]:
    for name, dtype, sizes, number, kind in _OPERAND.findall(body):
        shape = tuple(int(size) for size in sizes.split(",") if size)
        yield Operand(name, int(number), dtype, shape, kind == "output")


def _instructions(body: str) -> Iterator[Instruction]:
    inside = body[body.find("{") + 1 : body.rfind("}")]
    for slot in inside.split(";;"):
        match = _INSTRUCTION.match(slot.strip())
        if match is None or _IGNORED.match(match[2]) or match[1].startswith("%v"):
            continue
        yield _instruction(match[1], match[2], match[3])


def _instruction(target: str, opcode: str, rest: str) -> Instruction:
    if opcode == "sld" and _KNOWN_ZERO.search(rest):  # which core of which chip: the first
        return Instruction(target, "smov", None, None, (0,))
    if opcode.startswith("sdivrem"):
        opcode = "srem" if "kRem" in rest else "sdiv"
    if opcode == "dma.general" and (direction := re.search(r"/\* (\w+)-to-(\w+) \*/", rest)):
        opcode = f"dma.{direction[1]}_to_{direction[2]}"
    plain = _COMMENT.sub("", rest).replace("[thread:$0]", "")
    predicate = otherwise = None
    if match := _PREDICATE.search(plain):
        predicate = Predicate(match[2], bool(match[1]))
        otherwise = match[3]
        plain = plain[: match.start()] + plain[match.end() :]
    return Instruction(target, opcode, predicate, otherwise, tuple(_value(text) for text in _VALUE.findall(plain)))


def _value(text: str) -> str | int:
    if text.startswith("$"):
        return int(text[1:], 16)
    return int(text) if text.isdigit() else text


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """The numbers of units of each kind that each bundle keeps busy."""

    capacity: dict[str, int]  # units of a kind in the core
    busy: tuple[dict[str, int], ...]  # by bundle


def read_utilisation(text: str) -> Utilisation:
    """Read the table from a dump of `hlo-static-per-bundle-utilization`."""
    head, _, rows = text.partition("== UTILIZATION:\n")
    lines = head.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    busy = tuple(dict(zip(names, map(int, row.split()))) for row in rows.splitlines() if row.strip())
    return Utilisation(capacity=dict(zip(names, map(int, lines[2].split()))), busy=busy)


_ALLOCATION = re.compile(r"space=(\w+), size = (\w+), offset = (\w+), scoped")


def scoped_bytes(text: str) -> dict[str, int]:
    """Read the bytes of each memory space that a program allocates from a dump of `post-delay-converter`."""
    sizes: dict[str, int] = {}
    for space, size, offset in _ALLOCATION.findall(text):
        sizes[space] = max(sizes.get(space, 0), int(size, 0) + int(offset, 0))
    return sizes
