"""One process of a run of several: how it joins the others, agrees with them on when to stop, and ends with them.

`raggedmoe launch` sets the variables below for the processes that it starts; on a cluster RAGGEDMOE_COORDINATOR=auto
leaves the search to JAX (GKE, Slurm, Open MPI). Without them a run is one process, and these functions do nothing.
"""

import atexit
import contextlib
import itertools
import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax

from raggedmoe import compat
from raggedmoe.launch.peers import FAILED_GRACE_SECONDS, Hub, Member

COORDINATOR = "RAGGEDMOE_COORDINATOR"  # host:port of process 0, or auto
NUM_PROCESSES = "RAGGEDMOE_NUM_PROCESSES"
PROCESS_ID = "RAGGEDMOE_PROCESS_ID"
CPU_DEVICES = "RAGGEDMOE_CPU_DEVICES"  # number of CPU devices of each process
LAUNCHER = "RAGGEDMOE_LAUNCHER"  # a file descriptor that is at its end when the launcher is gone
AUTO = "auto"

# Exit codes, as sysexits has them.
CANNOT_WRITE = 74  # a file could not be written, of which the other processes may know nothing
PEER_LOST = 76  # another process ended: a remote error in protocol
JOIN_SECONDS = 300.0  # until all processes have to be there; on a cluster some start minutes later
# JAX's own limits, for what a closed connection does not tell: a process that is stopped, or hangs in the system.
# Its default of 100 s would be past the minute that a run may outlive one of its processes.
HEARTBEAT_SECONDS = 25
SHUTDOWN_SECONDS = 60
WAIT_MILLISECONDS = 24 * 3600 * 1000
LAUNCHER_GRACE = 20.0  # seconds for saving, after the launcher was killed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """The arguments of `jax.distributed.initialize` for this process; where all are None, JAX finds them itself."""

    coordinator: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self) -> None:
        fields = (self.coordinator, self.num_processes, self.process_id)
        if self.coordinator is None and fields != (None, None, None):
            raise ValueError(f"expected the coordinator's host:port beside {self}, got none; set {COORDINATOR}")
        if self.coordinator is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{COORDINATOR}: expected host:port of process 0, or {AUTO}, got {self.coordinator!r}")
        if self.num_processes is None or self.process_id is None:
            raise ValueError(f"{COORDINATOR}={self.coordinator}: expected {NUM_PROCESSES} and {PROCESS_ID} as well")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"expected 0 <= {PROCESS_ID} < {NUM_PROCESSES}, got {self.process_id}, {self.num_processes}"
            )


def read_process_info(environment: Mapping[str, str]) -> ProcessInfo | None:
    """Read which process this is from the environment; None if it is the only one."""
    coordinator = environment.get(COORDINATOR)
    if not coordinator:
        return None
    if coordinator == AUTO:
        return ProcessInfo()
    numbers = [environment.get(name, "") for name in (NUM_PROCESSES, PROCESS_ID)]
    for name, number in zip((NUM_PROCESSES, PROCESS_ID), numbers):
        if not number.isdigit():
            raise ValueError(f"{COORDINATOR}={coordinator}: expected {name} to be a whole number, got {number!r}")
    return ProcessInfo(coordinator=coordinator, num_processes=int(numbers[0]), process_id=int(numbers[1]))


class _Membership:
    """The connections of this process to the others, from `join` to `leave`."""

    def __init__(self, service: compat.Coordination) -> None:
        self.service = service
        self.failed = False
        self.left = False  # this process has said how it ends
        self.peers = _connect_to_peers(service, self.on_lost)

    def on_lost(self, text: str) -> None:
        """End this process at once, as the collective it waits for will not come, unless it is ending by itself."""
        if not self.failed:
            _print_error(text)
            os._exit(PEER_LOST)


_membership: _Membership | None = None
_has_looked = False  # whether this process has joined a run, or found that it is alone
_joining = threading.RLock()


def join(process_info: ProcessInfo | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Join the run that ``process_info`` or the environment names, if any. Call this before any device is used."""
    global _has_looked
    with _joining:
        _join(process_info, environment)
        _has_looked = True  # not after an error: whoever calls again would go on alone


def _join(process_info: ProcessInfo | None, environment: Mapping[str, str] | None) -> None:
    """Join a run, if any is named."""
    global _membership
    environment = os.environ if environment is None else environment
    if LAUNCHER in environment:
        _follow_launcher(int(environment[LAUNCHER]))
    if CPU_DEVICES in environment:
        jax.config.update("jax_num_cpu_devices", int(environment[CPU_DEVICES]))
    process_info = process_info or read_process_info(environment)
    if process_info is None or process_info.num_processes == 1:
        return
    assert _membership is None, "joined already"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's service for preemptions takes SIGTERM away from the trainer, which saves on it.
    jax.config.update("jax_enable_preemption_service", False)
    local = process_info.coordinator is not None and process_info.coordinator.startswith("127.0.0.1:")
    with _join_deadline(process_info), _explain_missing_cluster(process_info):
        jax.distributed.initialize(
            coordinator_address=process_info.coordinator,
            num_processes=process_info.num_processes,
            process_id=process_info.process_id,
            cluster_detection_method=None if process_info.coordinator is None else "deactivate",
            coordinator_bind_address=process_info.coordinator if local else None,
            initialization_timeout=round(JOIN_SECONDS) + 10,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    _membership = _Membership(compat.coordination())
    sys.excepthook = _handle_uncaught


def join_processes() -> None:
    """Join the other processes of a run that the environment names, from a script that trains with Python.

    It must be called before JAX uses a device. `raggedmoe.train` calls it, so a script has to call it only if it uses
    JAX before that. A process that is alone, or has joined, goes on. At its end a process waits for the others.
    """
    with _joining:
        if _has_looked:
            return
        join()
        if _membership is not None:
            atexit.register(_leave_at_exit)


_failure_code = 0  # that of the last training here, if it failed


def note_end(code: int, *, failed: bool) -> None:
    """Remember how a training ended, for the end of a script, which goes on after it."""
    global _failure_code
    _failure_code = (code or 1) if failed else 0


def _leave_at_exit() -> None:
    """End a script together with the other processes: in order, unless its last training failed.

    Those may wait in a collective for a process whose training failed, whatever the script has made of the error.
    """
    leave(_failure_code, failed=_failure_code != 0)


@contextlib.contextmanager
def _explain_missing_cluster(process_info: ProcessInfo) -> Iterator[None]:
    """Replace JAX's error about arguments that no user gave by one that says that no cluster was found."""
    try:
        yield
    except ValueError as error:
        if process_info.coordinator is not None:
            raise
        raise ValueError(
            f"{COORDINATOR}={AUTO}: expected a cluster that JAX knows (GKE, Slurm, Open MPI), found none ({error}); "
            f"set it to host:port of process 0, with {NUM_PROCESSES} and {PROCESS_ID}, or leave it out"
        ) from error


@contextlib.contextmanager
def _join_deadline(process_info: ProcessInfo) -> Iterator[None]:
    """End the process with one sentence if joining takes too long; JAX would abort with a stack of C++ frames."""

    def give_up() -> None:
        where = process_info.coordinator or "the place that JAX found"
        _print_error(
            f"{process_info.num_processes or 'all'} processes did not come together at {where} "
            f"within {JOIN_SECONDS:.0f} s; expected each to be started, and process 0 to be reachable there"
        )
        os._exit(PEER_LOST)

    timer = threading.Timer(JOIN_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_first_process() -> bool:
    """Tell whether this is the process that writes files and prints: process 0, or the only one."""
    return _membership is None or _membership.service.process == 0


def agree_to_stop(step: int, stop_requested: bool) -> bool:
    """Tell whether all processes stop after this step, because one was asked to. All processes get the same answer.

    Each process calls this after every step, when it has seen the result of the step before. Process 0 decides, for the
    step after the next: nobody asks about step n + 2 without the result of n + 1, which process 0 began after it had
    written down what it decided after step n.
    """
    if _membership is None:
        return stop_requested
    client, request, decision = _membership.service.client, "raggedmoe/stop/wanted", "raggedmoe/stop/after"
    stop_step = compat.get_key_value(client, decision)
    if stop_step is not None:
        return step >= int(stop_step)
    stop_requested = stop_requested or (is_first_process() and compat.get_key_value(client, request) is not None)
    if stop_requested and is_first_process():
        client.key_value_set(decision, str(step + 2))
    elif stop_requested:
        client.key_value_set(request, "1", allow_overwrite=True)
    return False


# Numbers of the barriers and broadcasts, counted in each process: all processes reach them in one order.
_barrier_numbers = itertools.count()


def process_count() -> int:
    """Count the processes of this run. Unlike `jax.process_count`, this starts no backend."""
    return 1 if _membership is None else _membership.service.num_processes


def wait_for_all(what: str) -> None:
    """Wait at a barrier until all processes are here.

    It belongs before collectives that some processes reach later than others: Gloo gives the last process 30 s to come
    ("Gloo context initialization failed: DEADLINE_EXCEEDED"), orbax 300 s. The barrier waits on no device,
    and a lost process ends it.
    """
    if jax.process_count() > 1:
        compat.coordination().client.wait_at_barrier(f"raggedmoe/{what}/{next(_barrier_numbers)}", WAIT_MILLISECONDS)


def broadcast_from_first(value: Any) -> Any:
    """Return process 0's value, which JSON can hold, in all processes. They wait for it, but use no device."""
    if jax.process_count() == 1:
        return value
    client, key = compat.coordination().client, f"raggedmoe/said/{next(_barrier_numbers)}"
    if jax.process_index() == 0:
        client.key_value_set(key, json.dumps(value))
        return value
    return json.loads(client.blocking_key_value_get(key, WAIT_MILLISECONDS))


def leave(code: int, *, failed: bool = False) -> None:
    """End together with the other processes. This returns only to a process that ends with code 0, or is alone.

    A process that ends in order waits for the others, however long process 0 still writes. After a failure the others
    get some seconds to find the same mistake, and are then stopped. JAX's own shutdown, at exit, would wait for
    processes that have ended, and abort.
    """
    if _membership is None or _membership.left:
        return
    _membership.left = True
    _membership.failed = failed or code != 0
    peers = _membership.peers
    if peers is not None:
        peers.end(code, failed=failed)
        peers.all_ended.wait(FAILED_GRACE_SECONDS + 1 if failed else None)
        if code == 0:
            peers.close()
        else:
            peers.all_gone.wait(FAILED_GRACE_SECONDS)  # process 0 takes JAX's service with it
    if code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _handle_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """End after an uncaught exception. If a collective raised it, a process is mostly lost: wait until that is said."""
    if issubclass(kind, jax.errors.JaxRuntimeError):
        time.sleep(2.0)
    sys.__excepthook__(kind, error, traceback)
    leave(1, failed=True)


def _print_error(text: str) -> None:
    """Write a line to standard error past Python's buffers, whose lock a stuck thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"raggedmoe: {text}\n".encode())


def _connect_to_peers(service: compat.Coordination, on_lost: Callable[[str], None]) -> Hub | Member | None:
    """Connect to the other processes; return None, with a warning, where process 0 cannot be reached."""
    host = service.address.rpartition(":")[0].strip("[]")  # brackets are around IPv6
    peers: Hub | Member | None = None
    if service.process == 0:
        token = secrets.token_hex(16)
        peers = Hub(num_processes=service.num_processes, token=token, host=host, on_lost=on_lost)
        service.client.key_value_set("raggedmoe/peers", f"{peers.port} {token}")
    else:
        port, token = service.client.blocking_key_value_get("raggedmoe/peers", 60_000).split(" ")
        try:
            peers = Member(
                process=service.process,
                num_processes=service.num_processes,
                token=token,
                address=(host, int(port)),
                on_lost=on_lost,
            )
        except OSError as error:
            logger.warning(
                "process %d cannot reach process 0 at %s:%s (%s); that a process has died is noticed by its missing "
                "heartbeats, after up to %d s",
                service.process, host, port, error, HEARTBEAT_SECONDS,
            )  # fmt: skip
    # From here on, process 0 knows all whom it will hear: nobody else has any business on its port.
    service.client.wait_at_barrier("raggedmoe/peers", 60_000)
    if isinstance(peers, Hub):
        peers.close_port()
    return peers


def _follow_launcher(descriptor: int) -> None:
    """Watch the launcher in a thread. When it is gone, stop as by SIGTERM, or at once if that takes too long."""

    def follow() -> None:
        if os.read(descriptor, 1):
            raise AssertionError("the launcher writes nothing")
        _print_error("the launcher has ended; the run stops")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LAUNCHER_GRACE)
        os._exit(PEER_LOST)

    threading.Thread(target=follow, name="raggedmoe-launcher", daemon=True).start()
