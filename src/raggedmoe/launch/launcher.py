"""The launcher of `raggedmoe launch`: it starts, watches and ends several processes of one run on this machine."""

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

from raggedmoe.launch.peers import FAILED_GRACE_SECONDS
from raggedmoe.launch.processes import COORDINATOR, CPU_DEVICES, LAUNCHER, NUM_PROCESSES, PEER_LOST, PROCESS_ID
from raggedmoe.launch.stop_signals import StopSignals

# Once a process has failed, the others end by themselves: at once if it was killed, or having waited for it. Those that
# have not ended after so many seconds get SIGTERM, and --grace seconds later SIGKILL.
SELF_EXIT_SECONDS = FAILED_GRACE_SECONDS + 3.0
TAIL_LINES = 10  # lines of a failed process that are shown again
# Logs of the C++ below JAX: a line for each connection, and for a lost process lines and a stack, up to the end of the
# process that logs. The launcher leaves them out, as it says itself in one sentence which process was lost.
GLOO_BEGIN = "[Gloo] Rank "
GLOO_LOG = re.compile(r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : ")
LOST_PROCESS_LOG = re.compile(r"^[EFW]\d{4} [\d:.]+ +\d+ (coordination_service|client\.h|preemption_sync)")
OUR_PREFIXES = ("raggedmoe:", "Traceback")
# Exit codes of processes that end because another did; the second is JAX's.
FOLLOW_UP_CODES = (PEER_LOST, 128 + signal.SIGABRT)


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run on this machine: the command of each process, and how many processes there are."""

    command: tuple[str, ...]  # what each process runs
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


def environments(run: LocalRun, port: int, launcher: int, parent: Mapping[str, str]) -> list[dict[str, str]]:
    """Make the environment variables of each process from those of its parent."""
    shared = {
        **parent,
        COORDINATOR: f"127.0.0.1:{port}",
        NUM_PROCESSES: str(run.num_processes),
        LAUNCHER: str(launcher),
    }
    if run.devices_per_process is not None:
        # JAX refuses a number of devices that is said in two ways.
        flags = shared.get("XLA_FLAGS", "").split()
        shared["XLA_FLAGS"] = " ".join(f for f in flags if "xla_force_host_platform_device_count" not in f)
        shared[CPU_DEVICES] = str(run.devices_per_process)
    return [{**shared, PROCESS_ID: str(process)} for process in range(run.num_processes)]


def drop_runtime_logs(lines: Iterable[str]) -> Iterator[str]:
    """Pass on lines, without their line ends and without the logs of the C++ below JAX."""
    in_loss_log, open_gloo_lines = False, 0
    for line in lines:
        line = line.rstrip("\n")
        in_loss_log = LOST_PROCESS_LOG.search(line) is not None or (in_loss_log and not line.startswith(OUR_PREFIXES))
        # Gloo's threads write a line in pieces, which may come in between those of another's: what is left of them may
        # be the number at a line's end, alone.
        open_gloo_lines += line.count(GLOO_BEGIN)
        if GLOO_LOG.search(line) or (open_gloo_lines and line.isdigit()):
            open_gloo_lines = max(open_gloo_lines - 1, 0)
        elif line and not in_loss_log:
            yield line


@dataclass(kw_only=True)
class _Output:
    """Prints the lines of all processes: every line of process 0, and from the others' errors those that are new."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    shown: deque[str] = field(default_factory=lambda: deque(maxlen=200))

    def show(self, process: int, line: str, to: Any) -> None:
        """Print a line with its process's number, unless another process has just printed it."""
        with self.lock:
            if process != 0 and line in self.shown:
                return
            self.shown.append(line)
            print(f"[process {process}] {line}", file=to, flush=True)


class _Child:
    """One process that the launcher started, with its output and its last lines."""

    def __init__(self, process: int, command: tuple[str, ...], environment: dict[str, str], launcher: int) -> None:
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
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
        """Start to read its output, once all processes were started: a thread does not survive a fork."""

        def follow(stream: Any, to: Any, shown: bool) -> None:
            with stream:
                for line in drop_runtime_logs(stream):
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
        """The exit code as a shell has it, which is 128 plus the number for a signal; None while the process runs."""
        code = self.popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)


def launch(run: LocalRun) -> int:
    """Run all processes to their end. Return their exit code or, where they differ, that of the process that failed."""
    launcher, alive = os.pipe()  # the second end is closed by the system when this process ends, however it does
    children: list[_Child] = []
    try:
        for process, environment in enumerate(environments(run, _free_port(), launcher, os.environ)):
            children.append(_Child(process, run.command, environment, launcher))
        output = _Output()
        for child in children:
            child.read(output)
        signals: list[signal.Signals] = []

        def pass_on(number: signal.Signals) -> None:
            """Pass a signal on to every process, which then saves and ends."""
            signals.append(number)
            for child in children:
                child.send(number)

        with StopSignals(pass_on):
            failed = _wait_for_children(children, run.grace, signals)
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
    print(_failure_message(failed, run.num_processes), file=sys.stderr, flush=True)
    assert failed.code is not None
    return failed.code


def _wait_for_children(children: list[_Child], grace: float, signals: list[signal.Signals]) -> _Child | None:
    """Wait until all processes have ended. Return the one that failed, or None if all ended with the same code."""
    while not any(child.code for child in children) and not _all_end_within(children, 0.02):
        if len(signals) > 1:  # asked to stop, and asked again
            break
    if any(child.code for child in children):
        time.sleep(0.3)  # those that follow the one that failed may have been seen before it
    failed = _first_failure(children)
    if not _all_end_within(children, SELF_EXIT_SECONDS):
        silent = [child for child in children if child.code is None]
        if failed is not None and failed.code in FOLLOW_UP_CODES:  # the cause still runs, but does not answer
            failed, silent[0].silent = silent[0], True
        for child in children:
            child.send(signal.SIGTERM)
        if not _all_end_within(children, grace):
            for child in children:
                child.send(signal.SIGKILL)
            _all_end_within(children, grace)
    return None if len({child.code for child in children}) == 1 else failed


def _all_end_within(children: list[_Child], seconds: float) -> bool:
    """Wait for at most so many seconds, and tell whether all processes have ended."""
    until = time.monotonic() + seconds
    while any(child.code is None for child in children):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _first_failure(children: list[_Child]) -> _Child | None:
    """Return a process that failed, preferably one that did not fail because of another; None if none did."""
    failed = [child for child in children if child.code]
    return min(failed, key=lambda child: child.code in FOLLOW_UP_CODES, default=None)


def _failure_message(child: _Child, num_processes: int) -> str:
    """Say which process failed, how, and what it printed last."""
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
