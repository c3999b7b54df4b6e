"""The compiler's dumps: the flags that make it write them, and from its files to a schedule."""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.extend.core import ClosedJaxpr

from raggedmoe.aot.bundles import BundleProgram, read_program, read_utilisation, scoped_bytes
from raggedmoe.aot.clock import Clock, clock_of
from raggedmoe.aot.known_values import CustomCalls, KernelCall, Values, kernel_calls
from raggedmoe.aot.scalar_run import ScalarRun, run_program
from raggedmoe.aot.schedule import OpSchedule, Schedule, op_schedule
from raggedmoe.aot.sparsecore_schedule import read_sparse_core
from raggedmoe.hardware import Hardware

# A bundle of the final dump is not a cycle, as delays are folded into it; after register allocation it still is.
BUNDLES, UTILISATION, REGIONS = (
    "packed-bundles-post-ra",
    "pre-delay_hlo-static-per-bundle-utilization",
    "post-delay-converter",
)
_FILE = re.compile(rf"(\d+)-(.+)-\d\d-({BUNDLES}|{UTILISATION}|{REGIONS})\.txt")


def dump_flags(folder: Path) -> tuple[str, ...]:
    """Make the folder, which the SparseCore's compiler wants to be there, and the flags for LIBTPU_INIT_ARGS."""
    sparse_core = folder / "sparse_core"
    sparse_core.mkdir(parents=True, exist_ok=True)
    return (
        f"--xla_jf_dump_to={folder}",
        "--xla_jf_dump_llo_text=true",
        f"--xla_jf_dump_llo_pass_label_regex=.*({BUNDLES}|{UTILISATION}|{REGIONS}).*",
        f"--xla_sc_dump_bundles_to={sparse_core}",
    )


def clear_dumps(folder: Path) -> None:
    """Remove what an earlier compilation wrote."""
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    shutil.rmtree(folder / "sparse_core")
    (folder / "sparse_core").mkdir()


@dataclass(frozen=True, kw_only=True)
class Steering:
    """The caller's decisions for branches that a program's own constants do not decide."""

    trips: Mapping[int, int]
    taken: Mapping[int, float]


class _Ops:
    """The TensorCore ops of one compilation, each executed once, when its figures are first asked for."""

    def __init__(
        self, folder: Path, clock: Clock, calls: list[KernelCall], arguments: Sequence[Any], steering: Steering
    ):
        self._files: dict[str, dict[str, Path]] = {}
        for path in sorted(folder.iterdir()):
            match = _FILE.fullmatch(path.name)
            # TLP is the program that calls the ops; what begins with < is the same in every program.
            if match and match[2] != "TLP" and not match[2].startswith("<"):
                self._files.setdefault(match[2], {})[match[3]] = path
        self._clock, self._calls, self._steering = clock, list(calls), steering
        self._programs: dict[str, BundleProgram] = {}
        self._executions: dict[str, ScalarRun] = {}
        hlo = "".join(path.read_text() for path in sorted(folder.glob("*-TLP-hlo.txt")))
        self._custom_calls = CustomCalls(hlo, arguments, lambda name: self.execution(name).outputs)

    @property
    def names(self) -> list[str]:
        return [name for name, files in self._files.items() if {BUNDLES, UTILISATION, REGIONS} <= files.keys()]

    def program(self, name: str) -> BundleProgram:
        if name not in self._programs:
            self._programs[name] = read_program(self._files[name][BUNDLES].read_text())
        return self._programs[name]

    def execution(self, name: str) -> ScalarRun:
        if name not in self._files:
            return ScalarRun(counts=(), transfers=(), assumed=frozenset(), outputs={})
        if name not in self._executions:
            program = self.program(name)
            self._executions[name] = run_program(
                program,
                delay=self._clock.branch_delay,
                operands={**self._custom_calls.operands(name), **self._kernel_operands(name, program)},
                trips=self._steering.trips,
                taken=self._steering.taken,
            )
        return self._executions[name]

    def _kernel_operands(self, name: str, program: BundleProgram) -> Mapping[int, Values]:
        """Take the known operands of the first kernel call left that has this program's shapes, if it is a kernel's."""
        if name not in self._custom_calls:
            return {}
        outputs = [operand.number for operand in program.operands if operand.is_output]
        for call in self._calls:
            # Outputs are numbered after all operands, also those that the program does not use.
            if call.values and outputs and min(outputs) == len(call.shapes) and _same_shapes(program, call):
                self._calls.remove(call)
                return call.values
        return {}

    def schedule(self, name: str) -> OpSchedule:
        files = self._files[name]
        return op_schedule(
            name,
            self.program(name),
            read_utilisation(files[UTILISATION].read_text()),
            self.execution(name),
            scoped_bytes(files[REGIONS].read_text()),
            self._clock.branch_delay,
        )


def _same_shapes(program: BundleProgram, call: KernelCall) -> bool:
    shapes = {operand.number: operand.shape for operand in program.operands if not operand.is_output}
    # A scalar operand of the kernel is an array of one in the compiled program.
    return all(shape == call.shapes[n] or (shape == (1,) and call.shapes[n] == ()) for n, shape in shapes.items())


def read_schedule(
    folder: Path,
    hardware: Hardware,
    *,
    traced: ClosedJaxpr | None = None,
    arguments: Sequence[Any] = (),
    steering: Steering | None = None,
) -> Schedule:
    """Read the schedule of the one program whose dumps are in a folder.

    Args:
      folder: given to `dump_flags`.
      hardware: the chip that it was compiled for.
      traced: the program before it was compiled, and
      arguments: its flat arguments. Those that are arrays of integers are known: what they steer is counted exactly.
      steering: run counts for what remains.
    """
    clock = clock_of(hardware)
    calls = [] if traced is None else kernel_calls(traced, arguments)
    ops = _Ops(folder, clock, calls, arguments, steering or Steering(trips={}, taken={}))
    programs = [
        program
        for path in sorted((folder / "sparse_core").glob("*.txt"))
        for program in read_sparse_core(re.sub(r"_\d+_bundles\.txt$", "", path.name), path.read_text())
    ]
    return Schedule(ops=tuple(ops.schedule(name) for name in ops.names), sparse_core=tuple(programs), clock=clock)
