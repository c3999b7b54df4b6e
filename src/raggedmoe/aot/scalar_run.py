"""How often each bundle of a program runs: its scalar unit executed, with the values of its scalar operands.

The scalar unit steers everything else, and its program is small: executing it gives the exact path, whatever the group
sizes, in a fraction of a second. A value that is not known (an operand whose values nobody gave, what comes out of a
vector unit) is None and spreads; a branch that depends on one is decided by the caller's ``trips`` and ``taken``, else
assumed, and reported as assumed.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from raggedmoe.aot.bundles import Branch, BundleProgram, Instruction, Predicate

WORD = 2**32
# Addresses are integers far above all 32-bit values: an allocation's number times this, plus an offset.
ALLOCATION_STRIDE = 2**40
GRANULE_BYTES = 32  # the unit of a DMA's size
MAX_STEPS = 30_000_000

Value = int | None


def _to_signed(value: int) -> int:
    return value - WORD if WORD > value >= WORD // 2 else value


def _wrap(value: int) -> int:
    return value % WORD if abs(value) < ALLOCATION_STRIDE // 2 else value


def _unsigned_shift(value: int, by: int) -> int:
    return (value % WORD) >> by if value < ALLOCATION_STRIDE // 2 else value


ARITHMETIC: dict[str, Callable[..., int]] = {
    "smov": lambda *parts: sum(parts),  # more than one: an address and an offset, [#allocation4 + $0x10]
    "pmov": lambda a: a,
    "int_to_ptr": lambda a: a,
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    # A shift of an address changes its unit, words or granules or bytes, not what it points to.
    "sshll": lambda a, by: a << by if a < ALLOCATION_STRIDE // 2 else a,
    "sshrl": _unsigned_shift,
    "sshra": lambda a, by: _to_signed(a) >> by if a < ALLOCATION_STRIDE // 2 else a,
    "sdiv": lambda a, b: a // b,
    "srem": lambda a, b: a % b,
    "spop": lambda a: a,
    "scalar_lea": operator.add,
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
LOGIC: dict[str, Callable[..., bool]] = {
    "pneg": lambda a: not a,
    "pnand": lambda a, b: not (a and b),
    "por": lambda a, b: bool(a or b),
    "pand": lambda a, b: bool(a and b),
    "pxor": operator.xor,
}


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The DMAs of one kind and size."""

    kind: str  # "hbm_to_vmem", "vmem_to_hbm", …
    num_bytes: int | None  # of one; None: known at run time only
    runs: int


@dataclass(frozen=True, kw_only=True)
class ScalarRun:
    """One execution of a program."""

    counts: tuple[int, ...]  # how often each bundle ran
    transfers: tuple[Transfer, ...]
    assumed: frozenset[int]  # regions whose branches were decided by nobody
    outputs: Mapping[int, Sequence[Value]]  # what it wrote from SMEM, by the operand's number


@dataclass
class _Machine:
    program: BundleProgram
    delay: int
    trips: Mapping[int, int]
    taken: Mapping[int, float]
    values: dict[str, Value] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)  # when, for the phis
    memory: dict[int, Value] = field(default_factory=dict)
    sources: dict[int, Sequence[Value]] = field(default_factory=dict)  # values behind an operand's address
    outputs: dict[int, dict[int, Value]] = field(default_factory=dict)
    output_at: dict[int, int] = field(default_factory=dict)  # an output operand's address: its number
    dmas: dict[tuple[str, int | None], int] = field(default_factory=dict)
    assumed: set[int] = field(default_factory=set)
    entered: dict[int, int] = field(default_factory=dict)  # times a given branch was decided
    allocations: dict[str, int] = field(default_factory=dict)
    step: int = 0

    def value(self, operand: str | int) -> Value:
        if isinstance(operand, int):
            return operand
        if operand.startswith("#"):
            number = self.allocations.setdefault(operand, len(self.allocations) + 1)
            return number * ALLOCATION_STRIDE
        return self.values.get(operand)

    def holds(self, predicate: Predicate | None) -> bool | None:
        if predicate is None:
            return True
        value = self.values.get(predicate.name)
        return None if value is None else bool(value) != predicate.negated

    def write(self, name: str, value: Value) -> None:
        self.values[name] = value
        self.written[name] = self.step

    def execute(self, slots: tuple[Instruction, ...]) -> None:
        """Execute one bundle: what is read is read before anything is stored."""
        stores: list[tuple[int, Value]] = []
        for slot in slots:
            holds = self.holds(slot.predicate)
            if slot.opcode == "sst":
                if holds is not False:
                    place = self.address(slot.operands[:-1])
                    stores.append((place, self.value(slot.operands[-1]) if holds else None))
            elif slot.opcode.startswith("dma."):
                if holds is not False:
                    self.copy(slot)
            elif slot.otherwise is not None:
                kept = self.value(_value(slot.otherwise))
                new = self.result(slot)
                self.write(slot.target, new if holds else kept if holds is False else None)
            elif holds is not False:
                self.write(slot.target, self.result(slot) if holds else None)
        for place, stored in stores:
            self.memory[place] = stored

    def result(self, slot: Instruction) -> Value:
        name, _, kind = slot.opcode.partition(".")
        if name == "sphi":
            latest = max(slot.operands, key=lambda operand: self.written.get(str(operand), -1))
            return self.value(latest)
        if name == "sld":
            return self.memory.get(self.address(slot.operands))
        operands = [self.value(operand) for operand in slot.operands]
        if name == "scalar_select":
            if operands[0] is None:
                return operands[1] if operands[1] == operands[2] else None
            return operands[1] if operands[0] else operands[2]
        if name in LOGIC:
            return _logic(name, operands)
        if None in operands:
            return None
        if name == "scmp":
            relation, dtype = kind.split(".")[:2]
            known = [_to_signed(v) if dtype == "s32" else v for v in operands if v is not None]
            return int(COMPARISONS[relation](*known))
        if name in ("smin", "smax"):
            signed = sorted((v for v in operands if v is not None), key=_to_signed if kind == "s32" else int)
            return signed[0] if name == "smin" else signed[-1]
        if name == "scalar_lea":
            return sum(v for v in operands[:2] if v is not None)
        return _wrap(ARITHMETIC[name](*operands)) if name in ARITHMETIC else None

    def address(self, parts: Sequence[str | int]) -> int:
        """Compute an address in SMEM; -1 where it is not known."""
        values = [self.value(part) for part in parts]
        return -1 if None in values else sum(v for v in values if v is not None)

    def copy(self, slot: Instruction) -> None:
        """Count a DMA; one between an operand and SMEM is also done."""
        kind = slot.opcode.removeprefix("dma.")
        source, size, target = (*(self.value(operand) for operand in slot.operands[:3]), None, None, None)[:3]
        num_bytes = None if size is None else size * GRANULE_BYTES
        self.dmas[kind, num_bytes] = self.dmas.get((kind, num_bytes), 0) + 1
        if source is None or target is None:
            return
        words = range((num_bytes or 0) // 4)
        if kind.endswith("_to_smem"):
            values = self.sources.get(source)
            for i in words:
                self.memory[target + i] = values[i] if values is not None and i < len(values) else None
        elif kind.startswith("smem_to_") and target in self.output_at:
            kept = self.outputs.setdefault(self.output_at[target], {})
            kept.update({i: self.memory.get(source + i) for i in words})

    def jumps(self, branch: Branch) -> bool:
        """Decide whether a branch is taken: as the caller says, as the program computes, or as assumed."""
        times = self.entered.get(branch.region, 0)
        if branch.repeats and branch.region in self.trips:
            again = times + 1 < self.trips[branch.region]
            self.entered[branch.region] = times + 1 if again else 0
            return again
        if not branch.repeats and branch.region in self.taken:
            self.entered[branch.region] = times + 1
            share = self.taken[branch.region]
            return int((times + 1) * share) == int(times * share)  # the jump skips the region
        holds = self.holds(branch.predicate)
        if holds is None:
            self.assumed.add(branch.region)
            return False  # a loop ends, a region is entered
        return holds


def _logic(name: str, operands: list[Value]) -> Value:
    """Compute the logic of predicates, as far as it is known even if one of them is not."""
    unknown_as = [[bool(v)] if v is not None else [False, True] for v in operands]
    if len(unknown_as) == 1:
        results = {LOGIC[name](a) for a in unknown_as[0]}
    else:
        results = {LOGIC[name](a, b) for a in unknown_as[0] for b in unknown_as[1]}
    return int(results.pop()) if len(results) == 1 else None


def _value(text: str) -> str | int:
    return int(text) if text.isdigit() else text.strip("[]")


def run_program(
    program: BundleProgram,
    *,
    delay: int,
    operands: Mapping[int, Sequence[Value]] | None = None,
    trips: Mapping[int, int] | None = None,
    taken: Mapping[int, float] | None = None,
) -> ScalarRun:
    """Execute a program's scalar unit.

    Args:
      program: from `read_program`.
      delay: bundles after a branch that still run.
      operands: values of integer operands, by number, flat.
      trips: how often the body of a loop runs each time it is entered, by region; overrides what is computed.
      taken: the share of times that a conditional region is entered, by region; overrides what is computed.
    """
    machine = _Machine(program, delay, trips or {}, taken or {})
    for operand in program.operands:
        address = (operand.number + 1) * ALLOCATION_STRIDE * 2**20
        values = (operands or {}).get(operand.number)
        by_value = operand.shape in ((), (1,)) and not operand.is_output
        machine.values[operand.name] = address
        if values is not None:
            machine.sources[address] = [None if value is None else value % WORD for value in values]
        if by_value:
            machine.values[operand.name] = None if values is None else machine.sources[address][0]
        if operand.is_output:
            machine.output_at[address] = operand.number
    counts = _count_bundles(machine)
    return ScalarRun(
        counts=tuple(counts),
        transfers=tuple(
            Transfer(kind=kind, num_bytes=num_bytes, runs=runs) for (kind, num_bytes), runs in machine.dmas.items()
        ),
        assumed=frozenset(machine.assumed),
        outputs={
            operand.number: [machine.outputs[operand.number].get(i) for i in range(math.prod(operand.shape))]
            for operand in program.operands
            if operand.number in machine.outputs
        },
    )


def _count_bundles(machine: _Machine) -> list[int]:
    """Follow the program from its first bundle to its last, and count how often each ran."""
    program = machine.program
    stops = sorted(set(program.instructions) | set(program.branches))
    next_stop = _next_stops(stops, program.num_bundles)
    changes = [0] * (program.num_bundles + 1)  # of the count, where a stretch of bundles begins and after it ends
    begin = at = 0
    jump: tuple[int, int] | None = None  # the last bundle before it takes effect, and where to
    while at < program.num_bundles or jump is not None:
        if jump is not None and at > jump[0]:
            changes[begin] += 1
            changes[jump[0] + 1] -= 1
            begin = at = jump[1]
            jump = None
            continue
        machine.step += 1
        if machine.step > MAX_STEPS:
            raise ValueError(f"the program did not end within {MAX_STEPS:,} steps; give --trip for its loops")
        if at in program.instructions:
            machine.execute(program.instructions[at])
        if at in program.branches and machine.jumps(program.branches[at]):
            if jump is not None:
                raise ValueError(
                    f"bundle {at:#x}: a branch before the one at most {machine.delay} bundles earlier took effect"
                )
            jump = (min(at + machine.delay, program.num_bundles - 1), program.branches[at].to)
        at = next_stop[at + 1] if jump is None else min(next_stop[at + 1], jump[0] + 1)
    changes[begin] += 1
    changes[program.num_bundles] -= 1
    counts, running = [], 0
    for change in changes[:-1]:
        running += change
        counts.append(running)
    return counts


def _next_stops(stops: list[int], end: int) -> list[int]:
    """Find for each bundle the first from it on at which something is to be done."""
    following = [end] * (end + 2)
    wanted = set(stops)
    for at in range(end - 1, -1, -1):
        following[at] = at if at in wanted else following[at + 1]
    return following
