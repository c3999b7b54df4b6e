"""What `raggedmoe compile` prints."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from raggedmoe.aot.baselines import ExampleCall
from raggedmoe.aot.case import NO_FIT, CompileCase, CompileOutcome
from raggedmoe.aot.compiled import Compiled
from raggedmoe.aot.lowered import Lowered
from raggedmoe.aot.overlap import KINDS as COLLECTIVES
from raggedmoe.aot.overlap import Move
from raggedmoe.aot.program_text import LOWERED, OPTIMIZED, ProgramCounts
from raggedmoe.aot.schedule import OpSchedule, Schedule, ScheduleSection
from raggedmoe.aot.sparsecore_schedule import SparseCoreProgram
from raggedmoe.aot.subjects import SplitOverDevices, find_example
from raggedmoe.aot.topology import find_chip
from raggedmoe.aot.whole_model import WholeModel
from raggedmoe.hardware import GIB, MIB
from raggedmoe.kernels.chosen import ChosenKernel
from raggedmoe.kernels.registry import BACKWARD

SMALL_OP = 0.01  # share of a program's cycles below which an op is not listed


def outcome_lines(outcomes: list[CompileOutcome]) -> Iterator[str]:
    """Write what came of each case."""
    for outcome in outcomes:
        colour = "green" if outcome.passed else "red"
        seconds = ""
        if outcome.compiled is not None:
            seconds = f", {outcome.compiled.trace_seconds + outcome.compiled.compile_seconds:.1f} s"
        yield f"[{colour}]{outcome.verdict}[/] [bold]{outcome.case.title}[/]{seconds}"
        if outcome.needed is not None and outcome.available is not None:
            yield f"  HBM: {_fit(outcome.needed, outcome.available)}{_parts(outcome.compiled)}"
        if outcome.error is not None:
            yield f"  {outcome.error}"
        if outcome.verdict == NO_FIT and isinstance(outcome.case.subject, SplitOverDevices):
            yield "  less is needed with remat=full, a smaller per_device_batch_size, or more devices"
        if outcome.schedule is not None:
            limit = find_chip(outcome.case.topology).vmem_bytes or 0
            yield f"  VMEM: {outcome.schedule.vmem_bytes / MIB:.2f} of {limit // MIB} MiB in the op that takes most"
        if outcome.compiled is not None:
            cost = outcome.compiled.cost
            yield f"  cost: {cost.flops / 1e9:,.1f} GFLOP, {cost.bytes_accessed / 1e9:,.2f} GB accessed"
            kernels = _kernels(outcome.compiled.kernels, _direction(outcome.case))
            yield f"  kernels: {kernels or 'none of ours'}"
        if outcome.counts is not None and outcome.case.hlo is not None:
            yield from _program_lines(outcome.case.hlo, outcome.counts)


def _program_lines(folder: str, counts: ProgramCounts) -> Iterator[str]:
    """Write where the programs are, and what is in the optimised one."""
    yield f"  written: {Path(folder) / LOWERED} and {Path(folder) / OPTIMIZED}, of which the second has"
    run = f", run {counts.executed:,} times" if counts.executed != counts.written else ""
    number = sum(counts.kernels.values())
    kernels = f" ({', '.join(f'{calls} × {target}' for target, calls in counts.kernels.items())})" if number else ""
    length = f", {counts.open_loops} of them as long as the data says" if counts.open_loops else ""
    yield f"  {counts.written} dots{run}; {number} custom calls{kernels}; {counts.loops} loops{length}"
    yield f"  collectives: {collectives_line(counts)}"


def collectives_line(counts: ProgramCounts) -> str:
    """Write what a device exchanges, by kind."""
    kinds = (f"{traffic.number:,} × {kind}, {_size(traffic.num_bytes)}" for kind, traffic in counts.collectives.items())
    return "; ".join(kinds) or "none"


def _fit(needed: int, available: int) -> str:
    word = "fits" if needed <= available else "[red]does not fit[/]"
    return f"{word}, {_size(needed)} of the {_size(available)} of one device ({needed:,} of {available:,} bytes)"


def _parts(compiled: Compiled | None) -> str:
    if compiled is None:
        return ""
    memory = compiled.memory
    fresh = memory.outputs - memory.aliased
    return (
        f": arguments {_size(memory.arguments)}, outputs {_size(fresh)}, temporaries {_size(memory.temporaries)}, "
        f"code {_size(memory.code)}"
    )


def whole_model_line(whole: WholeModel) -> str:
    """Write what a model needs of which a few layers were compiled."""
    fixed, more = whole.arguments, whole.num_layers - whole.compiled_layers
    return (
        f"whole model, {whole.num_layers} layers, by the compiled {whole.compiled_layers}: HBM: "
        f"{_fit(whole.num_bytes, whole.available)}: state and batch {_size(fixed)}, by their shapes; the rest "
        f"{_size(whole.rest)} + {more} × {_size(whole.rest_per_layer)}, the difference that the last layer made"
    )


def _direction(case: CompileCase) -> str | None:
    """Return the direction of an operation's call that the case compiles; None: it compiles something else."""
    return case.subject.direction if isinstance(case.subject, ExampleCall) else None


def _kernels(kernels: tuple[ChosenKernel, ...], direction: str | None) -> str:
    """Name each operation's implementations; for a program of one direction, those of that direction alone."""
    names: dict[str, list[str]] = {}
    for kernel in kernels:
        if direction in (None, kernel.direction) and kernel.name not in names.setdefault(kernel.operation, []):
            names[kernel.operation].append(kernel.name)
    return ", ".join(f"{operation}/{'+'.join(chosen)}" for operation, chosen in names.items())


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB // 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB"


HEADINGS = ("issue", "hbm", "of peak", "MXU", "load", "store", "fills", "spills", "others", "µs")
WIDTHS = (11, 11, 8, 7, 6, 6, 8, 8, 8, 9)


def schedule_table(outcomes: list[CompileOutcome]) -> Iterator[str]:
    """Write the cases' schedules side by side."""
    scheduled = [(outcome, outcome.schedule) for outcome in outcomes if outcome.schedule is not None]
    width = max(len(_label(outcome.case)) for outcome, _ in scheduled)
    heading = "".join(f"{title:>{columns}}" for title, columns in zip(HEADINGS, WIDTHS))
    yield f"[dim]{'compiler-predicted':<{width}}{heading}[/]"
    for outcome, schedule in scheduled:
        if schedule.main is not None:
            cells = _schedule_cells(outcome.case, schedule, schedule.main)
            yield f"{_label(outcome.case):<{width}}" + "".join(f"{c:>{n}}" for c, n in zip(cells, WIDTHS))


def _label(case: CompileCase) -> str:
    """Name a case beside others of one operation."""
    call = case.subject
    if not isinstance(call, ExampleCall):
        return case.title
    return f"{call.contender} {call.direction if call.gradient is None else f'd{call.gradient}'}"


def _schedule_cells(case: CompileCase, schedule: Schedule, main: OpSchedule) -> tuple[str, ...]:
    steady, flops = main.steady, _useful_flops(case)
    assumed = "?" if any(op.assumed for op in schedule.ops) else ""
    return (
        f"{schedule.issue:,}{assumed}",
        f"{schedule.hbm:,}",
        f"{schedule.clock.of_peak(flops // 2, schedule.issue):.1%}" if flops else "",
        f"{steady.mxu:.1%}",
        f"{steady.loads:.0%}",
        f"{steady.stores:.0%}",
        f"{main.fills:,}",
        f"{main.spills:,}",
        f"{schedule.issue - main.issue:,}",
        f"{schedule.estimate / schedule.clock.hertz * 1e6:.1f}",
    )


def _useful_flops(case: CompileCase) -> int:
    """Count the FLOPs of an operation's call; 0 for other cases, where they are not known.

    A backward pass has twice as many, unless one gradient alone is asked for.
    """
    call = case.subject
    if not isinstance(call, ExampleCall):
        return 0
    example = find_example(call.operation, call.call, call.dtype)
    both = call.direction == BACKWARD and call.gradient is None
    return example.flops * (2 if both else 1)


ASSUMPTIONS = (
    "issue: cycles of the path that runs with the call's own integers, DMA waits not counted (?: a branch was assumed)."
    "\nhbm: cycles of its own DMAs at peak bandwidth. of peak: useful multiply-adds in the issue cycles."
    "\nMXU, load, store: units busy where most cycles are. fills, spills: of the main op, in all. others: issue of the "
    "other ops. µs: of the larger of issue and hbm.\nNot seen: bank conflicts, latencies, throttling, links."
)


def schedule_lines(outcomes: list[CompileOutcome]) -> Iterator[str]:
    """Write the loops of every op that matters."""
    yield f"[dim]{ASSUMPTIONS}[/]"
    for outcome in outcomes:
        schedule = outcome.schedule
        if schedule is None:
            continue
        yield f"\n[bold]{outcome.case.title}[/]"
        for op in sorted(schedule.ops, key=lambda op: -op.issue):
            if op.issue >= SMALL_OP * schedule.issue:
                yield from _op_lines(op)
        for program in schedule.sparse_core:
            yield from _sparse_core_lines(program)


def _op_lines(op: OpSchedule) -> Iterator[str]:
    unsized = f" and {op.unsized_transfers} transfers of run-time size" if op.unsized_transfers else ""
    yield (
        f"{op.name}: issue {op.issue:,}, {op.bundles:,} bundles, MXU {op.mxu:.1%}, VMEM {op.vmem_bytes / MIB:.2f} MiB, "
        f"HBM {op.hbm_bytes / 1e6:.1f} MB{unsized}"
    )
    for section in op.sections:
        if section.runs and (section.kind == "loop" or section.bundles >= 32):
            yield _section_line(section)


def _section_line(section: ScheduleSection) -> str:
    times = f"{section.runs:,}{'?' if section.assumed else ''}"
    return (
        f"{'  ' * (section.depth + 1)}{section.kind} r{section.region} × {times}: {section.bundles:,} bundles, MXU "
        f"{section.mxu:.1%}, load {section.loads:.0%}, store {section.stores:.0%}, fills {section.fills}, "
        f"spills {section.spills}"
    )


def _sparse_core_lines(program: SparseCoreProgram) -> Iterator[str]:
    yield f"SparseCore {program.name} {program.unit}: {program.cycles:,} cycles of code"
    for loop in program.loops:
        counter = "" if loop.limit is None or loop.step is None else f", its counter to {loop.limit} by {loop.step}"
        streams = ", ".join(f"{s.count} × {s.kind} of {s.num_bytes} B" for s in loop.streams) or "no streams"
        yield f"{'  ' * (loop.depth + 1)}loop {loop.label}{counter}: {loop.cycles} cycles an iteration; {streams}"


def lowered_lines(case: CompileCase, lowered: Lowered) -> Iterator[str]:
    """Write what lowering on this machine found."""
    products = lowered.products
    yield f"[bold]{case.title}[/]: lowered in {lowered.seconds:.1f} s, nothing allocated"
    yield f"  arguments {_size(lowered.argument_bytes)}, outputs {_size(lowered.output_bytes)}"
    yield (
        f"  {products.written} dots, run {products.executed} times: {products.flops / 1e12:.3f} TFLOP, "
        f"{products.bytes_touched / 1e9:.2f} GB of operands and results"
    )
    if products.open_loops:
        yield f"  {products.open_loops} loops run as often as the data says: counted once each"
    yield f"  kernels: {_kernels(lowered.kernels, _direction(case)) or 'none of ours'}"
    compiled = lowered.compiled
    if compiled is not None and case.hlo is not None:
        yield (
            f"  compiled for this machine's CPU in {compiled.compile_seconds:.1f} s: temporaries "
            f"{_size(compiled.memory.temporaries)}; loops' bodies once: {compiled.cost.flops / 1e12:.3f} TFLOP, "
            f"{compiled.cost.bytes_accessed / 1e9:.2f} GB accessed"
        )
        yield from _program_lines(case.hlo, compiled.counts)


def move_lines(moves: Sequence[Move]) -> Iterator[str]:
    """Write what moves between devices, and what the TensorCore has to do meanwhile."""
    yield "moves between devices, in the order of the schedule: what the TensorCore does between start and wait"
    for move in moves:
        if move.between_devices:
            direction = BACKWARD if move.backward else "forward"
            by = "TensorCore" if not move.cores else f"SparseCore {', '.join(map(str, move.cores))}"
            yield f"  {direction:8} {move.scope or '-'}: {move.kind}, {by}: {_meanwhile(move)}"
    others = [move for move in moves if not move.between_devices]
    if others:
        met = sum(any(kind in COLLECTIVES for kind in move.beside) for move in others)
        yield f"  and {len(others)} gathers on SparseCores, {met} of them while a move is under way on the same core"


def _meanwhile(move: Move) -> str:
    if move.synchronous:
        return "nothing, it is waited for at once"
    kernels = ", ".join(f"{count} × {name}" for name, count in Counter(move.kernels).items())
    others = [f"{move.cycles:,} cycles of XLA's operations"] if move.cycles else []
    return "; ".join([*([kernels] if kernels else []), *others]) or "nothing"
