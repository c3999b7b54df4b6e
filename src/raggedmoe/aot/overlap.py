"""What a compiled program does while it communicates: read off its schedule, the order of the optimised program's text.

A move between devices that is started and waited for later leaves the TensorCore free in between. How much it has to do
there is counted: kernels, and the cycles that XLA expects of its own operations. How long a move takes is not known
here, so this shows that there is something to hide it behind, not that it is hidden.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "ragged-all-to-all", "all-to-all", "collective-permute")
GATHERS = ("gather_offload", "scatter_offload", "ragged_gather", "ragged_row_dots")  # what else SparseCores are given
NO_SCOPES = ("shard_map", "while", "body", "closed_call", "checkpoint", "")


@dataclass(frozen=True, kw_only=True)
class Move:
    """One move between devices, or one program of the SparseCores, in the order of the schedule."""

    kind: str  # of KINDS or GATHERS
    name: str  # the instruction's
    scope: str  # where in the model, "experts/dispatch"
    backward: bool
    cores: tuple[int, ...]  # the SparseCores that carry it out; none: the TensorCore does
    synchronous: bool = False  # the TensorCore does nothing else meanwhile
    kernels: tuple[str, ...] = ()  # that the TensorCore runs before it waits
    cycles: int = 0  # that XLA expects of its own operations there
    beside: tuple[str, ...] = ()  # kinds of what the same SparseCores are given meanwhile

    @property
    def between_devices(self) -> bool:
        return self.kind in KINDS


@dataclass(frozen=True, kw_only=True)
class _Instruction:
    name: str
    operation: str
    operands: str
    rest: str

    @property
    def scope(self) -> str:
        return _text(r'op_name="([^"]*)"', self.rest)

    @property
    def kind(self) -> str | None:
        """The kind of collective that it is; None: none. An asynchronous one keeps the name of what it was."""
        what = self.operation if self.operation.startswith(KINDS) else self.name
        return next((kind for kind in (*KINDS, *GATHERS) if what.startswith(kind)), None)


def move_from_json(plain: Mapping[str, Any]) -> Move:
    """Make the move that `dataclasses.asdict` described."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    return Move(**fields)


def moves(hlo: str) -> list[Move]:
    """List every move of an optimised program, in the order of its schedule."""
    called = set(re.findall(r" (?:call|async)-start\(.*?(?:to_apply|calls)=%([\w.\-]+)", hlo))
    return [move for name, body in _computations(hlo) if name not in called for move in _moves_of(body)]


def _computations(hlo: str) -> Iterator[tuple[str, list[_Instruction]]]:
    """Split a program into computations: the name and the instructions of each, in the order of the schedule."""
    name, body = "", list[_Instruction]()
    for line in hlo.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([\w\-]+)\(([^)]*)\)(.*)", line)
        if match:
            body.append(_Instruction(name=match[1], operation=match[2], operands=match[3], rest=match[4]))
        elif line.startswith("}"):
            yield name, body
        elif not line.startswith(" "):
            name, body = _text(r"%([\w.\-]+)", line), []


def _moves_of(body: list[_Instruction]) -> list[Move]:
    moves: list[tuple[Move, range]] = []
    # By the name of the instruction that began it: a start, and after it an update, which gives it its arguments.
    begun: dict[str, tuple[_Instruction, int]] = {}
    for place, instruction in enumerate(body):
        if instruction.operation.endswith("-start"):
            begun[instruction.name] = (instruction, place)
        elif instruction.operation.endswith("-update"):
            earlier = begun.get(_first_operand(instruction))
            if earlier is not None:
                begun[instruction.name] = (earlier[0], place)
        elif instruction.operation.endswith("-done"):
            start, since = begun.get(_first_operand(instruction), (None, 0))
            if start is not None and start.kind is not None:
                moves.append((_move(start, body[since + 1 : place]), range(since, place)))
        elif instruction.operation in KINDS:
            moves.append((replace(_move(instruction, []), synchronous=True), range(place, place)))
    return [replace(move, beside=tuple(_beside(move, span, moves))) for move, span in moves]


def _beside(move: Move, span: range, moves: list[tuple[Move, range]]) -> Iterator[str]:
    """Yield the kinds of what is under way at the same time on the same SparseCore."""
    for other, then in moves:
        at_once = max(span.start, then.start) < min(span.stop, then.stop)
        if other is not move and at_once and set(move.cores) & set(other.cores):
            yield other.kind


def _first_operand(instruction: _Instruction) -> str:
    return _text(r"%([\w.\-]+)", instruction.operands)


def _move(start: _Instruction, between: list[_Instruction]) -> Move:
    assert start.kind is not None
    kernels = tuple(
        re.sub(r"\.\d+$", "", instruction.name)
        for instruction in between
        if 'custom_call_target="tpu_custom_call"' in instruction.rest
    )
    return Move(
        kind=start.kind,
        name=start.name,
        scope=_plain_scope(start.scope),
        backward="transpose(" in start.scope,
        cores=_cores(start.rest),
        kernels=kernels,
        cycles=sum(int(_text(r'"estimated_cycles":"(\d+)"', instruction.rest) or 0) for instruction in between),
    )


def _plain_scope(op_name: str) -> str:
    """Shorten ``jit(f)/transpose(jvp(experts))/dispatch/shard_map/all_gather`` to ``experts/dispatch``."""
    parts = [re.sub(r"^(?:\w+\()+|\)+$", "", part) for part in op_name.split("/")[1:-1] if not part.startswith("jit(")]
    return "/".join(part for part in parts if part not in NO_SCOPES)


def _cores(rest: str) -> tuple[int, ...]:
    """Read which SparseCores an instruction is given to."""
    return tuple(map(int, re.findall(r"\d+", _text(r'"core_type":"CORE_TYPE_SC".*?"core_ids":\[([^\]]*)\]', rest))))


def _text(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
