"""One of several processes of a run: joining the others, and ending with them.

`raggedmoe launch` sets the variables below for the processes that it starts; on a cluster RAGGEDMOE_COORDINATOR=auto
leaves the search to JAX (GKE, Slurm, Open MPI). Without them a run is one process, and nothing here does anything.
"""

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
from raggedmoe.parallel.peers import FAILED_PATIENCE, Hub, Member

COORDINATOR = "RAGGEDMOE_COORDINATOR"  # host:port of process 0, or auto
NUM_PROCESSES = "RAGGEDMOE_NUM_PROCESSES"
PROCESS_ID = "RAGGEDMOE_PROCESS_ID"
CPU_DEVICES = "RAGGEDMOE_CPU_DEVICES"  # host devices of each process
LAUNCHER = "RAGGEDMOE_LAUNCHER"  # a file descriptor that is at its end when the launcher is gone
AUTO = "auto"

# Exit codes, as sysexits has them.
CANNOT_WRITE = 74  # a file could not be written, of which the other processes may know nothing
LOST = 76  # another process ended: a remote error in protocol
JOIN_SECONDS = 300.0  # until all processes have to be there; on a cluster some start minutes later
# JAX's own limits, for what a closed connection does not tell: a process that is stopped, or hangs in the system.
# Its default of 100 s would be past the minute that a run may outlive one of its processes.
HEARTBEAT_SECONDS = 25
SHUTDOWN_SECONDS = 60
WAIT_MILLISECONDS = 24 * 3600 * 1000
LAUNCHER_GRACE = 20.0  # seconds for saving, after the launcher was killed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which process of how many this is; None: JAX finds out."""

    coordinator: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self) -> None:
        given = (self.coordinator, self.num_processes, self.process_id)
        if self.coordinator is None and given != (None, None, None):
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


def place_in(environment: Mapping[str, str]) -> Place | None:
    """What the variables say; None: this is the only process."""
    coordinator = environment.get(COORDINATOR)
    if not coordinator:
        return None
    if coordinator == AUTO:
        return Place()
    numbers = [environment.get(name, "") for name in (NUM_PROCESSES, PROCESS_ID)]
    for name, number in zip((NUM_PROCESSES, PROCESS_ID), numbers):
        if not number.isdigit():
            raise ValueError(f"{COORDINATOR}={coordinator}: expected {name} to be a whole number, got {number!r}")
    return Place(coordinator=coordinator, num_processes=int(numbers[0]), process_id=int(numbers[1]))


class _Membership:
    """This process among the others, from `join` to `leave`."""

    def __init__(self, service: compat.Coordination) -> None:
        self.service = service
        self.failed = False
        self.peers = _watch(service, self.lost)

    def lost(self, text: str) -> None:
        """Ends this process at once: what it waits for, a collective, will not come. Unless it ends by itself."""
        if not self.failed:
            _say(text)
            os._exit(LOST)


_membership: _Membership | None = None


def join(place: Place | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Join the run that ``place`` or the environment names; nothing, if none does. Before any device is used."""
    global _membership
    environment = os.environ if environment is None else environment
    if LAUNCHER in environment:
        _follow_launcher(int(environment[LAUNCHER]))
    if CPU_DEVICES in environment:
        jax.config.update("jax_num_cpu_devices", int(environment[CPU_DEVICES]))
    place = place or place_in(environment)
    if place is None or place.num_processes == 1:
        return
    assert _membership is None, "joined already"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's service for preemptions takes SIGTERM away from the trainer, which saves on it.
    jax.config.update("jax_enable_preemption_service", False)
    local = place.coordinator is not None and place.coordinator.startswith("127.0.0.1:")
    with _limited(place), _found(place):
        jax.distributed.initialize(
            coordinator_address=place.coordinator,
            num_processes=place.num_processes,
            process_id=place.process_id,
            cluster_detection_method=None if place.coordinator is None else "deactivate",
            coordinator_bind_address=place.coordinator if local else None,
            initialization_timeout=round(JOIN_SECONDS) + 10,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    _membership = _Membership(compat.coordination())
    sys.excepthook = _unhandled


@contextlib.contextmanager
def _found(place: Place) -> Iterator[None]:
    """Where JAX knows of no cluster, it says which of its arguments it misses, which no user gave."""
    try:
        yield
    except ValueError as error:
        if place.coordinator is not None:
            raise
        raise ValueError(
            f"{COORDINATOR}={AUTO}: expected a cluster that JAX knows (GKE, Slurm, Open MPI), found none ({error}); "
            f"set it to host:port of process 0, with {NUM_PROCESSES} and {PROCESS_ID}, or leave it out"
        ) from error


@contextlib.contextmanager
def _limited(place: Place) -> Iterator[None]:
    """Joining ends in time or with a sentence: JAX would abort, with a stack."""

    def give_up() -> None:
        where = place.coordinator or "the place that JAX found"
        _say(
            f"{place.num_processes or 'all'} processes did not come together at {where} within {JOIN_SECONDS:.0f} s; "
            "expected each to be started, and process 0 to be reachable there"
        )
        os._exit(LOST)

    timer = threading.Timer(JOIN_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_first() -> bool:
    """Whether this process is the one that writes and talks: process 0, or the only one."""
    return _membership is None or _membership.service.process == 0


def agreed_stop(step: int, wanted: bool) -> bool:
    """Whether all processes stop after this step, as one of them wants; the answer is the same everywhere.

    Each asks after every step, when it has seen the result of the step before. Process 0 decides, for the step after
    the next: nobody asks about step n + 2 without the result of n + 1, which process 0 began after it had written down
    what it decided after step n.
    """
    if _membership is None:
        return wanted
    client, request, decision = _membership.service.client, "raggedmoe/stop/wanted", "raggedmoe/stop/after"
    after = compat.key_value(client, decision)
    if after is not None:
        return step >= int(after)
    wanted = wanted or (is_first() and compat.key_value(client, request) is not None)
    if wanted and is_first():
        client.key_value_set(decision, str(step + 2))
    elif wanted:
        client.key_value_set(request, "1", allow_overwrite=True)
    return False


# Places where processes wait for each other, counted in each of them: all come by in the same order.
_meetings = itertools.count()


def num_joined() -> int:
    """Processes of this run. Starts no backend, unlike `jax.process_count`."""
    return 1 if _membership is None else _membership.service.num_processes


def wait_for_all(what: str) -> None:
    """Until all processes are here.

    Before collectives that some reach later than others: Gloo gives the last process 30 s to come ("Gloo context
    initialization failed: DEADLINE_EXCEEDED"), orbax 300 s. This waits on no device; a lost process ends it.
    """
    if jax.process_count() > 1:
        compat.coordination().client.wait_at_barrier(f"raggedmoe/{what}/{next(_meetings)}", WAIT_MILLISECONDS)


def as_first_says(value: Any) -> Any:
    """Process 0's value, which JSON can say, in all processes; they wait for it, on no device."""
    if jax.process_count() == 1:
        return value
    client, key = compat.coordination().client, f"raggedmoe/said/{next(_meetings)}"
    if jax.process_index() == 0:
        client.key_value_set(key, json.dumps(value))
        return value
    return json.loads(client.blocking_key_value_get(key, WAIT_MILLISECONDS))


def leave(code: int, *, failed: bool = False) -> None:
    """End together with the others, with an exit code; returns only to a process that ends well, or is alone.

    In order: wait for the others, however long process 0 still writes. Failed: they get some seconds to find the same
    mistake, and are stopped then. JAX's own shutdown, at exit, waits for processes that are no more and aborts.
    """
    if _membership is None:
        return
    _membership.failed = failed or code != 0
    peers = _membership.peers
    if peers is not None:
        peers.end(code, failed=failed)
        peers.all_ended.wait(FAILED_PATIENCE + 1 if failed else None)
        if code == 0:
            peers.close()
        else:
            peers.all_gone.wait(FAILED_PATIENCE)  # process 0 takes JAX's service with it
    if code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _unhandled(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """The end by an exception. One that a collective raises mostly means that a process is lost: then say only that."""
    if issubclass(kind, jax.errors.JaxRuntimeError):
        time.sleep(2.0)
    sys.__excepthook__(kind, error, traceback)
    leave(1, failed=True)


def _say(text: str) -> None:
    """Past Python's buffers, which a thread that is stuck may hold; nothing, if there is nobody to read it."""
    with contextlib.suppress(OSError):
        os.write(2, f"raggedmoe: {text}\n".encode())


def _watch(service: compat.Coordination, lost: Callable[[str], None]) -> Hub | Member | None:
    """The connection to the other processes; None, with a warning, where process 0 cannot be reached."""
    host = service.address.rpartition(":")[0].strip("[]")  # brackets are around IPv6
    peers: Hub | Member | None = None
    if service.process == 0:
        token = secrets.token_hex(16)
        peers = Hub(num_processes=service.num_processes, token=token, host=host, lost=lost)
        service.client.key_value_set("raggedmoe/peers", f"{peers.port} {token}")
    else:
        port, token = service.client.blocking_key_value_get("raggedmoe/peers", 60_000).split(" ")
        try:
            peers = Member(
                process=service.process,
                num_processes=service.num_processes,
                token=token,
                address=(host, int(port)),
                lost=lost,
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
    """Stop as if by SIGTERM when the launcher is gone, and if that takes too long, at once."""

    def follow() -> None:
        if os.read(descriptor, 1):
            raise AssertionError("the launcher writes nothing")
        _say("the launcher has ended; the run stops")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LAUNCHER_GRACE)
        os._exit(LOST)

    threading.Thread(target=follow, name="raggedmoe-launcher", daemon=True).start()
