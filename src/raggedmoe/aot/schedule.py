"""What the compiler's schedule says of a program's speed, with no TPU: cycles issued, units busy, bytes moved.

Three figures, in cycles of one TensorCore:

- ``issue``: bundles of the path that runs, without waiting for a DMA. Exact and repeatable, as far as the values that
  steer the program are known; ``assumed`` names the branches for which they are not.
- ``hbm``: the bytes of the program's own DMAs at the chip's peak bandwidth: a floor.
- ``estimate``: the larger of the two, as if all transfers hid behind computation and nothing else were in the way.

Not seen: VMEM bank conflicts, latency of the first and last transfers, other programs' transfers, throttling, links.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raggedmoe.aot.bundles import BundleProgram, Utilisation
from raggedmoe.aot.clock import Clock
from raggedmoe.aot.scalar_run import ScalarRun, Transfer
from raggedmoe.aot.sparsecore_schedule import SparseCoreProgram, sparse_core_from_json

MATMUL = ("MATMUL", "MXU")  # how older and newer compilers name the matrix units
FILL, SPILL, LOAD, STORE = "VLOAD:FILL", "VSTORE:SPILL", "VLOAD", "VSTORE"


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """A loop's body, or a region that a branch may skip; or all that is in none of them. Inner ones are not counted."""

    kind: str  # "loop", "if", or "top"
    region: int  # the compiler's number, for --trip and --taken
    begin: int
    end: int
    depth: int
    runs: int
    bundles: int
    cycles: int  # in all runs
    mxu: float  # share of the cycles in which the matrix units are busy
    loads: float  # share of the slots used
    stores: float
    fills: int  # vector registers loaded back from where they were spilled, in one run
    spills: int
    assumed: bool  # how often it runs was decided by nobody


@dataclass(frozen=True, kw_only=True)
class OpSchedule:
    """One op of a program on the TensorCore: a Pallas kernel or one of XLA's."""

    name: str
    bundles: int
    issue: int
    mxu: float
    vmem_bytes: int
    smem_bytes: int
    fills: int  # in all
    spills: int
    transfers: tuple[Transfer, ...]
    sections: tuple[ScheduleSection, ...]
    assumed: tuple[int, ...]  # regions whose branches were decided by nobody

    @property
    def hbm_bytes(self) -> int:
        """The bytes that its own DMAs move; those of a size known only at run time are not counted."""
        return sum((t.num_bytes or 0) * t.runs for t in self.transfers if "hbm" in t.kind)

    @property
    def unsized_transfers(self) -> int:
        return sum(t.runs for t in self.transfers if "hbm" in t.kind and t.num_bytes is None)

    @property
    def steady(self) -> ScheduleSection:
        """Where most of its cycles are."""
        return max(self.sections, key=lambda section: section.cycles)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule of all ops of a compiled program."""

    ops: tuple[OpSchedule, ...]
    sparse_core: tuple[SparseCoreProgram, ...]
    clock: Clock

    @property
    def issue(self) -> int:
        return sum(op.issue for op in self.ops)

    @property
    def hbm_bytes(self) -> int:
        return sum(op.hbm_bytes for op in self.ops)

    @property
    def hbm(self) -> int:
        """Cycles that its bytes take at the peak bandwidth."""
        return round(self.hbm_bytes / self.clock.hbm_bandwidth * self.clock.hertz)

    @property
    def estimate(self) -> int:
        return max(self.issue, self.hbm)

    @property
    def vmem_bytes(self) -> int:
        return max((op.vmem_bytes for op in self.ops), default=0)

    @property
    def main(self) -> OpSchedule | None:
        """The op with most cycles."""
        return max(self.ops, key=lambda op: op.issue, default=None)

    def op(self, name: str) -> OpSchedule:
        """Find the one op whose name begins so."""
        matching = [op for op in self.ops if op.name.startswith(name)]
        if len(matching) != 1:
            raise ValueError(f"expected one op named {name}…, found {[op.name for op in self.ops]}")
        return matching[0]


def op_schedule(
    name: str,
    program: BundleProgram,
    utilisation: Utilisation,
    execution: ScalarRun,
    scoped: Mapping[str, int],
    delay: int,
) -> OpSchedule:
    """Sum up one op from its bundles, what they keep busy, and how often each ran."""
    if program.num_bundles != len(utilisation.busy):
        raise ValueError(
            f"{name}: {program.num_bundles} bundles, but {len(utilisation.busy)} lines of utilisation; this libtpu "
            "writes its dumps in another form than those that this library knows"
        )
    matmul = next(unit for unit in MATMUL if unit in utilisation.capacity)
    issue = sum(execution.counts)

    def total(unit: str) -> int:
        return sum(count * busy[unit] for count, busy in zip(execution.counts, utilisation.busy))

    return OpSchedule(
        name=name,
        bundles=program.num_bundles,
        issue=issue,
        mxu=total(matmul) / utilisation.capacity[matmul] / max(issue, 1),
        vmem_bytes=scoped.get("vmem", 0),
        smem_bytes=scoped.get("smem", 0),
        fills=total(FILL),
        spills=total(SPILL),
        transfers=execution.transfers,
        sections=tuple(_sections(program, utilisation, execution, matmul, delay)),
        assumed=tuple(sorted(execution.assumed)),
    )


def _sections(
    program: BundleProgram, utilisation: Utilisation, execution: ScalarRun, matmul: str, delay: int
) -> list[ScheduleSection]:
    """Cut the program at its branches, outermost first."""
    spans = [("top", 0, 0, program.num_bundles)]
    for branch in program.branches.values():
        after = branch.at + 1 + delay
        if branch.repeats:
            spans.append(("loop", branch.region, branch.to, after))
        elif branch.to > after:
            spans.append(("if", branch.region, after, branch.to))
    spans.sort(key=lambda span: (span[2], -span[3], span[0] == "loop"))
    bundles_of_span: list[list[int]] = [[] for _ in spans]
    for at in range(program.num_bundles):
        inside = max(i for i, (_, _, begin, end) in enumerate(spans) if begin <= at < end)
        bundles_of_span[inside].append(at)
    sections = []
    for (kind, region, begin, end), bundles in zip(spans, bundles_of_span):
        cycles = sum(execution.counts[at] for at in bundles)

        def share(unit: str, bundles: list[int] = bundles, cycles: int = cycles) -> float:
            used = sum(execution.counts[at] * utilisation.busy[at][unit] for at in bundles)
            return used / utilisation.capacity[unit] / max(cycles, 1)

        sections.append(
            ScheduleSection(
                kind=kind,
                region=region,
                begin=begin,
                end=end,
                depth=sum(b <= begin and end <= e and (b, e) != (begin, end) for _, _, b, e in spans),
                runs=execution.counts[begin] if begin < len(execution.counts) else 0,
                bundles=len(bundles),
                cycles=cycles,
                mxu=share(matmul),
                loads=share(LOAD),
                stores=share(STORE),
                fills=sum(utilisation.busy[at][FILL] for at in bundles),
                spills=sum(utilisation.busy[at][SPILL] for at in bundles),
                assumed=region in execution.assumed,
            )
        )
    return sections


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """Describe a schedule as JSON can hold it."""
    return asdict(schedule)


def schedule_from_json(plain: Mapping[str, Any]) -> Schedule:
    """Make the schedule that `schedule_to_json` described."""
    ops = []
    for op in plain["ops"]:
        transfers = tuple(Transfer(**transfer) for transfer in op["transfers"])
        sections = tuple(ScheduleSection(**section) for section in op["sections"])
        ops.append(OpSchedule(**{**op, "transfers": transfers, "sections": sections, "assumed": tuple(op["assumed"])}))
    return Schedule(
        ops=tuple(ops),
        sparse_core=tuple(sparse_core_from_json(program) for program in plain["sparse_core"]),
        clock=Clock(**plain["clock"]),
    )
