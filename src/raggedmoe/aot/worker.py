"""Compiling in a process of its own: the TPU compiler may abort, and reads its flags only when it is loaded.

`compile_cases` starts one worker, which compiles case after case. One that dies takes only its own case with it: the
next begins in a new worker. ``python -m raggedmoe.aot.worker`` is that process: a case a line on its standard input,
an outcome a line on what was its standard output.
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import jax

from raggedmoe.aot.case import (
    CRASHED,
    FAILED,
    NO_FIT,
    PASSED,
    REFUSED,
    TIMED_OUT,
    CompileCase,
    CompileOutcome,
    JitProgram,
    Subject,
    case_from_json,
    case_to_json,
    outcome_from_json,
    outcome_to_json,
)
from raggedmoe.aot.compiled import Compiled, OutOfHBMError, compile_for
from raggedmoe.aot.dumps import Steering, clear_dumps, dump_flags, read_schedule
from raggedmoe.aot.overlap import moves
from raggedmoe.aot.program_text import counts_of, write_programs
from raggedmoe.aot.schedule import Schedule
from raggedmoe.aot.topology import ENVIRONMENT, check_compiler, check_topology_name, find_topology, target_topology
from raggedmoe.hardware import Hardware
from raggedmoe.kernels.registry import CannotRunError, implementations

DUMP_FOLDER = "RAGGEDMOE_DUMP_FOLDER"  # where the compiler writes its schedules, for a worker that reads them


def compile_cases(cases: Iterable[CompileCase], *, timeout: float = 900.0) -> Iterator[CompileOutcome]:
    """Compile the cases, in order, and yield each outcome. A mistake in a name is an error before any is tried.

    Args:
      cases: which; all with a schedule, or none, share a worker.
      timeout: seconds for one case, after which its worker is ended.
    """
    cases = list(cases)
    for case in cases:
        check_topology_name(case.topology)
    check_compiler()
    worker: _Worker | None = None
    try:
        for case in cases:
            if worker is not None and worker.scheduled != case.scheduled:
                worker.stop()
                worker = None
            worker = worker or _Worker(case.scheduled)
            outcome = worker.outcome(case, timeout)
            if outcome.verdict in (CRASHED, TIMED_OUT):
                worker.stop()
                worker = None
            yield outcome
    finally:
        if worker is not None:
            worker.stop()


def schedule(
    subject: Subject,
    topology: str,
    *,
    trips: Mapping[int, int] | None = None,
    taken: Mapping[int, float] | None = None,
) -> Schedule:
    """Compile a subject and read its schedule; its own integers steer it, and where they cannot the caller's.

    ``trips``: how often a loop's body runs each time it is entered. ``taken``: the share of times that a region is
    entered. Both by the compiler's number of the region, which a schedule's sections have.
    """
    title = type(subject).__name__
    case = CompileCase(
        title=title,
        subject=subject,
        topology=topology,
        scheduled=True,
        trips={str(region): count for region, count in (trips or {}).items()},
        taken={str(region): share for region, share in (taken or {}).items()},
    )
    (outcome,) = compile_cases([case])
    if outcome.schedule is None:
        raise ValueError(f"{title} on {topology}: {outcome.verdict}: {outcome.error}")
    return outcome.schedule


class _Worker:
    """A running process, its pipes, and what it says on standard error."""

    def __init__(self, scheduled: bool) -> None:
        self.scheduled = scheduled
        self._folder = tempfile.TemporaryDirectory(prefix="raggedmoe-aot-")
        self._log = Path(self._folder.name) / "stderr"
        environment = {
            **os.environ,
            **ENVIRONMENT,
            # What this process can import, so can that one.
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        if scheduled:
            dumps = Path(self._folder.name) / "dumps"
            environment[DUMP_FOLDER] = str(dumps)
            flags = (os.environ.get("LIBTPU_INIT_ARGS", ""), *dump_flags(dumps))
            environment["LIBTPU_INIT_ARGS"] = " ".join(flags).strip()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "raggedmoe.aot.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # so that a Ctrl-C is ours to handle, and stopping ends its children too
            )

    def outcome(self, case: CompileCase, timeout: float) -> CompileOutcome:
        """Have a case compiled; that it ended the worker is an outcome too."""
        assert self._process.stdin is not None
        said = self._log.stat().st_size
        try:
            self._process.stdin.write(json.dumps(case_to_json(case)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # it died between two cases
            return self._death(case, said)
        line = self._line(timeout)
        if line is None:
            error = f"not compiled after {timeout:g} seconds"
            return CompileOutcome(case=case, verdict=TIMED_OUT, error=error)
        return outcome_from_json(json.loads(line)) if line.endswith(b"\n") else self._death(case, said)

    def _line(self, timeout: float) -> bytes | None:
        """Read the next line of its answers; an unfinished one if it died; None if it takes too long."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return self._process.stdout.readline() if selector.select(timeout) else None

    def _death(self, case: CompileCase, said: int) -> CompileOutcome:
        code = self._process.wait()
        with self._log.open("rb") as log:
            log.seek(said)
            detail = log.read().decode(errors="replace")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return CompileOutcome(case=case, verdict=CRASHED, error=f"{first_error(detail)} ({how})", detail=detail)

    def stop(self) -> None:
        """End it and remove what it wrote."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._folder.cleanup()


def first_error(text: str) -> str:
    """Find the first line of what ended a compiler: fatal, a failed check, an exception; else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    for pattern in (r"F\d{4} ", r".*Check fail", r"\w+(\.\w+)*(Error|Exception)\b"):
        for line in lines:
            if re.match(pattern, line):
                return line.strip()
    return lines[-1].strip() if lines else "no message"


def compile_here(case: CompileCase) -> CompileOutcome:
    """Compile a case in this process."""
    implementations.cache_clear()  # an earlier case may have lifted one's guard
    try:
        if case.scheduled:
            clear_dumps(Path(os.environ[DUMP_FOLDER]))
        topology = find_topology(case.topology)
        with target_topology(topology):
            program = case.subject.program()
        compiled = compile_for(
            program.function,
            program.args,
            topology,
            mesh=program.mesh,
            donate=program.donate,
            options=dict(case.options) or None,
        )
        schedule = _schedule(case, topology.hardware, program, compiled) if case.scheduled else None
        if case.hlo is not None:
            write_programs(Path(case.hlo), compiled.lowered.as_text(), compiled.hlo())
    except CannotRunError as error:
        return _failure(case, REFUSED, error)
    except OutOfHBMError as error:
        outcome = _failure(case, NO_FIT, error)
        return CompileOutcome(**{**vars(outcome), "needed": error.needed, "available": error.available})
    except Exception as error:  # of whatever kind: it is this case's outcome, and the others are still to be tried
        return _failure(case, FAILED, error)
    return CompileOutcome(
        case=case,
        verdict=PASSED,
        compiled=compiled,
        needed=compiled.memory.total,
        available=topology.device_bytes,
        schedule=schedule,
        moves=tuple(moves(compiled.hlo())) if case.overlaps else None,
        counts=None if case.hlo is None else counts_of(compiled.hlo()),
    )


def _schedule(case: CompileCase, hardware: Hardware, program: JitProgram, compiled: Compiled) -> Schedule:
    return read_schedule(
        Path(os.environ[DUMP_FOLDER]),
        hardware,
        traced=compiled.traced,
        arguments=jax.tree.leaves(program.args),
        steering=Steering(
            trips={int(region): count for region, count in case.trips.items()},
            taken={int(region): share for region, share in case.taken.items()},
        ),
    )


def _failure(case: CompileCase, verdict: str, error: Exception) -> CompileOutcome:
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0] if verdict != REFUSED else " ".join(text.split())
    named = first if isinstance(error, ValueError | CannotRunError) else f"{type(error).__name__}: {first}"
    return CompileOutcome(case=case, verdict=verdict, error=named, detail="".join(traceback.format_exception(error)))


def serve(cases: IO[str], outcomes: IO[str]) -> None:
    """Compile the case of each line, and write its outcome as a line."""
    for line in cases:
        outcome = compile_here(case_from_json(json.loads(line)))
        outcomes.write(json.dumps(outcome_to_json(outcome)) + "\n")
        outcomes.flush()


def _end_with(parent: int) -> None:
    """Do not outlive a parent that was killed: a compilation can take minutes and hears nothing of a closed pipe."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Answer the parent on its pipe; all else that is printed, libtpu's words among it, goes to standard error."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "w") as outcomes:
        os.dup2(2, 1)
        serve(sys.stdin, outcomes)


if __name__ == "__main__":
    main()
