"""Several processes of one run on this machine: started, watched and ended together."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from raggedmoe.parallel.peers import FAILED_PATIENCE
from raggedmoe.parallel.processes import COORDINATOR, CPU_DEVICES, LAUNCHER, LOST, NUM_PROCESSES, PROCESS_ID
from raggedmoe.parallel.stop_signals import StopSignals

# Once one has failed, the others end by themselves: at once if it was killed, or having waited for it. If they do not,
# they are asked to (SIGTERM) after so many seconds, and get --grace more.
BY_THEMSELVES = FAILED_PATIENCE + 3.0
TAIL = 10  # lines of a failed process that are shown again
# What the C++ below JAX says: of connections, a line each; of a lost process, lines and a stack up to its own end. For
# that the launcher has a sentence.
CONNECTIONS = re.compile(r"^$|^\[Gloo\]|is connected to \d+ peer ranks")
LOSSES = re.compile(r"^[EFW]\d{4} [\d:.]+ +\d+ (coordination_service|client\.h|preemption_sync)")
OURS = ("raggedmoe:", "Traceback")
CONSEQUENCES = (LOST, 128 + signal.SIGABRT)  # codes of those that end because another has; the second is JAX's


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """What is started, and how often."""

    command: tuple[str, ...]  # of each process
    num_processes: int
    devices_per_process: int | None = None  # host devices; None: as many as the command makes
    grace: float = 10.0  # seconds between SIGTERM and SIGKILL once one has failed

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ValueError(f"expected --processes >= 1, got {self.num_processes}")
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise ValueError(f"expected --devices-per-process >= 1, got {self.devices_per_process}")
        if not 0 <= self.grace <= 45:
            raise ValueError(f"expected --grace between 0 and 45 seconds, got {self.grace}")


def environments(run: LocalRun, port: int, launcher: int, given: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables of each process, made of this process's own."""
    common = {**given, COORDINATOR: f"127.0.0.1:{port}", NUM_PROCESSES: str(run.num_processes), LAUNCHER: str(launcher)}
    if run.devices_per_process is not None:
        # JAX refuses a number of devices that is said in two ways.
        flags = common.get("XLA_FLAGS", "").split()
        common["XLA_FLAGS"] = " ".join(f for f in flags if "xla_force_host_platform_device_count" not in f)
        common[CPU_DEVICES] = str(run.devices_per_process)
    return [{**common, PROCESS_ID: str(process)} for process in range(run.num_processes)]


def worth_reading(lines: Iterable[str]) -> Iterator[str]:
    """Lines without their ends, and without those of the C++ below."""
    losing = False
    for line in lines:
        line = line.rstrip("\n")
        losing = LOSSES.search(line) is not None or (losing and not line.startswith(OURS))
        if not losing and not CONNECTIONS.search(line):
            yield line


@dataclass(kw_only=True)
class _Output:
    """What the processes print, a line at a time: all of process 0's, and of the others' errors what is new."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    shown: deque[str] = field(default_factory=lambda: deque(maxlen=200))

    def show(self, process: int, line: str, to: Any) -> None:
        with self.lock:
            if process != 0 and line in self.shown:
                return
            self.shown.append(line)
            print(f"[process {process}] {line}", file=to, flush=True)


class _Child:
    """One process, its output, and its last lines."""

    def __init__(self, process: int, command: tuple[str, ...], environment: dict[str, str], launcher: int) -> None:
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.silent = False  # the others lost it, and it runs
        self.popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(launcher,),
            process_group=0,  # Ctrl-C in a terminal reaches the launcher only, which passes it on once
            text=True,
            errors="replace",
        )
        self.readers: list[threading.Thread] = []

    def read(self, output: _Output) -> None:
        """Read what it prints from now on. After all processes were started: a thread does not survive a fork."""

        def follow(stream: Any, to: Any, shown: bool) -> None:
            with stream:
                for line in worth_reading(stream):
                    self.tail.append(line)
                    if shown:
                        output.show(self.process, line, to)

        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        for stream, to, shown in (
            (self.popen.stdout, sys.stdout, self.process == 0),
            (self.popen.stderr, sys.stderr, True),
        ):
            reader = threading.Thread(target=follow, args=(stream, to, shown), daemon=True)
            reader.start()
            self.readers.append(reader)

    @property
    def code(self) -> int | None:
        """As a shell says it: a signal's number and 128; None: it runs."""
        found = self.popen.poll()
        return found if found is None or found >= 0 else 128 - found

    def send(self, number: signal.Signals) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)


def launch(run: LocalRun) -> int:
    """Run all processes to their end. The exit code is theirs, or of those that differ that of the one that failed."""
    launcher, alive = os.pipe()  # the second end is closed by the system when this process ends, however it does
    children: list[_Child] = []
    try:
        for process, environment in enumerate(environments(run, _free_port(), launcher, os.environ)):
            children.append(_Child(process, run.command, environment, launcher))
        output = _Output()
        for child in children:
            child.read(output)
        asked: list[signal.Signals] = []

        def pass_on(number: signal.Signals) -> None:
            """To every process: they save, and end."""
            asked.append(number)
            for child in children:
                child.send(number)

        with StopSignals(pass_on):
            failed = _watched(children, run.grace, asked)
        for child in children:
            for reader in child.readers:
                reader.join(timeout=2.0)  # a grandchild may hold the pipe
    finally:
        for child in children:
            child.send(signal.SIGKILL)
            child.popen.wait()
        os.close(alive)
        os.close(launcher)
    if failed is None:
        assert children[0].code is not None
        return children[0].code
    print(_failure(failed, run.num_processes), file=sys.stderr, flush=True)
    assert failed.code is not None
    return failed.code


def _watched(children: list[_Child], grace: float, asked: list[signal.Signals]) -> _Child | None:
    """Wait for all; None: they ended alike, otherwise the one that failed, and the others have ended with it."""
    while not any(child.code for child in children) and not _all_ended(children, 0.02):
        if len(asked) > 1:  # asked to stop, and asked again
            break
    if any(child.code for child in children):
        time.sleep(0.3)  # those that follow the one that failed may have been seen before it
    failed = _cause(children)
    if not _all_ended(children, BY_THEMSELVES):
        silent = [child for child in children if child.code is None]
        if failed is not None and failed.code in CONSEQUENCES:  # of a process that still runs, but does not answer
            failed, silent[0].silent = silent[0], True
        for child in children:
            child.send(signal.SIGTERM)
        if not _all_ended(children, grace):
            for child in children:
                child.send(signal.SIGKILL)
            _all_ended(children, grace)
    return None if len({child.code for child in children}) == 1 else failed


def _all_ended(children: list[_Child], seconds: float) -> bool:
    """Whether they have, within so many seconds."""
    until = time.monotonic() + seconds
    while any(child.code is None for child in children):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _cause(children: list[_Child]) -> _Child | None:
    """One of the processes that failed, and did not do so because of another."""
    failed = [child for child in children if child.code]
    return min(failed, key=lambda child: child.code in CONSEQUENCES, default=None)


def _failure(child: _Child, num_processes: int) -> str:
    code = child.code or 0
    how = f"was ended by {signal.Signals(code - 128).name}" if _is_signal(code) else f"ended with code {code}"
    if child.silent:
        how = "no longer answered, and was ended"
    lines = [f"raggedmoe: process {child.process} of {num_processes} {how}; the others were stopped."]
    if child.tail:
        lines += ["Its last lines:", *(f"  {line}" for line in child.tail)]
    lines.append("The same command goes on from the last checkpoint, also with fewer --processes.")
    return "\n".join(lines)


def _is_signal(code: int) -> bool:
    return code > 128 and code - 128 in set(signal.Signals)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
