"""The lock of a folder in an object store: a lease, which its owner renews and which lapses when the owner is gone.

The lock is one object that names its owner, written under conditions that the server keeps (If-None-Match, If-Match):
of several who want it one gets it. A killed owner leaves it behind. On the same machine the next run sees that the
process is gone and takes the lock at once. Elsewhere it waits until the lock is `LEASE_SECONDS` old by the server's
clock, or is renewed, which means that its owner lives.

An owner that was stopped for longer than the lease may wake up as another run has the folder. It finds out before it
writes what counts: lines of metrics and the commit of a checkpoint, which call `check_lease`.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from raggedmoe.storage.object_path import ObjectPath
from raggedmoe.storage.object_store import ChangedObjectError, ObjectInfo

LEASE_SECONDS = 60.0  # without a renewal, until another may take it
RENEWAL_SECONDS = 15.0  # from one renewal to the next
POLL_SECONDS = 1.0  # between two looks at another's lease

logger = logging.getLogger("raggedmoe")
_leases: dict[ObjectPath, "Lease"] = {}  # of this process, by folder


class LostLeaseError(OSError):
    """Another run has the folder now."""


def check_lease(path: ObjectPath) -> None:
    """Require that this process still has the lease of the folder that a path is in, if it ever had."""
    for folder, lease in tuple(_leases.items()):
        if path.bucket_name == folder.bucket_name and path.key.startswith(folder.prefix):
            lease.check()


class Lease:
    """The lock of a folder, from its construction to `release`. A folder that another run has is a BlockingIOError.

    A server that does not keep the conditions of writes, as some that call themselves compatible do, is refused.
    """

    def __init__(self, folder: ObjectPath) -> None:
        self._folder, self._lock = folder, folder / ".lock"
        self._token, self._count = secrets.token_hex(16), 0
        self._is_lost, self._renewing, self._released = False, threading.Lock(), threading.Event()
        self._check_server()
        self._valid_until = _clock() + LEASE_SECONDS
        self._version = self._acquire()
        _leases[folder] = self
        self._thread = threading.Thread(target=self._renew_in_background, name="raggedmoe-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Require that the lease is ours, and renew it if it may have lapsed."""
        if not self._is_lost and _clock() > self._valid_until - RENEWAL_SECONDS:
            self._renew()
        if self._is_lost:
            raise LostLeaseError(
                f"{self._folder}: another run has taken the folder, as this one did not renew its lock for "
                f"{LEASE_SECONDS:.0f} s; it goes on there, so this one ends"
            )

    def release(self) -> None:
        """Give the folder back. A lock that cannot be deleted lapses by itself."""
        self._released.set()
        _leases.pop(self._folder, None)
        with self._renewing:
            if self._is_lost:
                return
            try:
                self._lock.bucket.delete([self._lock.key])
            except OSError as error:
                logger.warning("%s stays, and lapses in %.0f s: %s", self._lock, LEASE_SECONDS, error)

    def _check_server(self) -> None:
        """Require that the server refuses to create what is there, and to update what has changed."""
        probe = self._lock.with_name(f".lock.{self._token}")
        store = probe.bucket
        old = store.create(probe.key, b"1")
        store.update(probe.key, b"2", old)
        for write in (lambda: store.create(probe.key, b"3"), lambda: store.update(probe.key, b"4", old)):
            with contextlib.suppress(FileExistsError, ChangedObjectError):
                write()
                raise ValueError(
                    f"{self._folder}: expected a server that keeps the conditions of writes (If-None-Match, If-Match), "
                    "got one that overwrote what was there: two runs could write to one folder; use another server"
                )
        info = store.info(probe.key)
        assert info is not None
        self._server_seconds = info.written.timestamp() - time.monotonic()
        store.delete([probe.key])

    def _acquire(self) -> str:
        while True:
            try:
                return self._lock.bucket.create(self._lock.key, self._content())
            except FileExistsError:
                held = self._lock.bucket.info(self._lock.key)
                if held is None:  # released in this moment
                    continue
            self._wait_for_end(held)
            try:
                return self._lock.bucket.update(self._lock.key, self._content(), held.version)
            except FileNotFoundError:
                continue
            except ChangedObjectError:
                raise self._taken_error("another process") from None

    def _wait_for_end(self, held: ObjectInfo) -> None:
        """Wait until the owner's lease has lapsed. Raise an error if the owner lives."""
        if held.size == 0:  # copied from a disk, where the lock is an empty file
            return
        owner = self._read_owner()
        name = f"process {owner.get('pid')} on {owner.get('host')}"
        if owner.get("machine") == _machine() is not None:
            if _start_of_process(owner.get("pid")) == owner.get("started"):
                raise self._taken_error(name)
            return
        lapses = LEASE_SECONDS + held.written.timestamp() - self._server_seconds  # by this machine's clock
        if time.monotonic() < lapses:
            logger.warning("%s: %s had it and may be gone; waiting until that is known", self._folder, name)
        while time.monotonic() < lapses:
            time.sleep(POLL_SECONDS)
            now = self._lock.bucket.info(self._lock.key)
            if now is None:
                return
            if now.version != held.version:
                raise self._taken_error(name)

    def _read_owner(self) -> dict[str, Any]:
        try:
            owner = json.loads(self._lock.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _taken_error(self, owner: str) -> BlockingIOError:
        return BlockingIOError(f"{self._folder}: {owner} trains into it; wait for it, or use another run_name")

    def _content(self) -> bytes:
        """Describe the owner, otherwise at every renewal: the version of the object is a hash of its content."""
        pid = os.getpid()
        owner = {
            "token": self._token,
            "renewals": self._count,
            "host": socket.gethostname(),
            "pid": pid,
            "machine": _machine(),
            "started": _start_of_process(pid),
        }
        return json.dumps(owner).encode()

    def _renew(self) -> None:
        with self._renewing:
            if self._is_lost or self._released.is_set():
                return
            begun = _clock()
            self._count += 1
            try:
                self._version = self._lock.bucket.update(self._lock.key, self._content(), self._version)
            except (ChangedObjectError, FileNotFoundError):
                self._is_lost = True
                return
            self._valid_until = begun + LEASE_SECONDS

    def _renew_in_background(self) -> None:
        while not self._released.wait(RENEWAL_SECONDS) and not self._is_lost:
            try:
                self._renew()
            except OSError as error:  # the server is away: `check` tries again before anything counts
                logger.warning("%s could not be renewed: %s", self._lock, error)


def _clock() -> float:
    """Return a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _machine() -> str | None:
    """Name the boot of this machine and the space of its process numbers; None where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _start_of_process(pid: Any) -> str | None:
    """Return when a process started, which tells it from a later one of the same number; None if there is none."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, TypeError, ValueError):
        return None
