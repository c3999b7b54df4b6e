"""The lock of a folder in an object store: one run has it, and a killed one's does not stay."""

import json
import subprocess
import sys
import time

import pytest

from raggedmoe.storage import lease as leases
from raggedmoe.storage.lease import Lease, LostLeaseError, check_lease
from raggedmoe.storage.trees import list_files

OWNER = """
import sys, time
from raggedmoe.storage import as_path
from raggedmoe.storage.lease import Lease
lease = Lease(as_path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def short(monkeypatch):
    """Leases of tenths of a second."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1.2)
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.3)
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.05)


@pytest.fixture
def elsewhere(monkeypatch):
    """As if whoever asks were on another machine than who had it."""
    monkeypatch.setattr(leases, "_machine", lambda: None)


def as_left(bucket, **changes):
    """The lock of an owner that was killed on another machine."""
    owner = {"token": "x", "renewals": 3, "host": "node-7", "pid": 17, "machine": "another", "started": "5", **changes}
    (bucket / "run/.lock").write_bytes(json.dumps(owner).encode())


def test_a_folder_has_one_owner_until_it_is_released(bucket):
    first = Lease(bucket / "run")
    with pytest.raises(BlockingIOError, match=r"process \d+ on .* trains into it; wait for it"):
        Lease(bucket / "run")
    other = Lease(bucket / "run2")
    first.release()
    Lease(bucket / "run").release()
    other.release()
    assert list_files(bucket) == {}


def test_a_killed_owner_on_this_machine_is_followed_at_once(bucket, caplog):
    with subprocess.Popen([sys.executable, "-c", OWNER, f"{bucket / 'run'}"], stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError, match=f"process {owner.pid} on "):
            Lease(bucket / "run")
        owner.kill()
    start = time.monotonic()
    Lease(bucket / "run").release()
    assert time.monotonic() - start < 2
    assert caplog.records == []


def test_a_later_process_with_the_owners_number_is_not_the_owner(bucket):
    as_left(bucket, machine=leases._machine(), pid=1)
    Lease(bucket / "run").release()


def test_a_lock_from_another_machine_is_taken_when_it_has_lapsed(bucket, short, caplog):
    as_left(bucket)
    start = time.monotonic()
    lease = Lease(bucket / "run")
    assert 0.1 < time.monotonic() - start < 3  # the server's clock has whole seconds
    assert "process 17 on node-7 had it and may be gone" in caplog.text
    lease.check()
    lease.release()
    assert list_files(bucket) == {}


def test_an_owner_on_another_machine_that_lives_keeps_the_folder(bucket, short, elsewhere, monkeypatch):
    # A server that counts whole seconds makes a lease up to a second shorter: less than that it must not be.
    monkeypatch.setattr(leases, "LEASE_SECONDS", 10.0)
    lease = Lease(bucket / "run")
    with pytest.raises(BlockingIOError, match="trains into it"):
        Lease(bucket / "run")
    lease.check()
    lease.release()


def test_a_lock_that_is_no_json_lapses_too(bucket, short):
    (bucket / "run/.lock").write_bytes(b"\xff half")
    Lease(bucket / "run").release()


def test_a_lock_that_was_copied_from_a_disk_is_nobodys(bucket):
    (bucket / "run/.lock").write_bytes(b"")
    start = time.monotonic()
    Lease(bucket / "run").release()
    assert time.monotonic() - start < 2


def test_of_two_that_wait_for_a_lock_to_lapse_one_gets_it(bucket, short, monkeypatch):
    as_left(bucket)
    monkeypatch.setattr(Lease, "_wait_for_end", lambda self, held: as_left(bucket, token="the other, who was faster"))
    with pytest.raises(BlockingIOError, match="another process trains into it"):
        Lease(bucket / "run")


def test_an_owner_that_slept_too_long_may_not_write(bucket, short):
    lease = Lease(bucket / "run")
    check_lease(bucket / "run/checkpoints/x")
    as_left(bucket, token="another")
    lease._valid_until = leases._clock()  # it wakes up
    check_lease(bucket / "run2/x")
    for _ in range(2):
        with pytest.raises(LostLeaseError, match="another run has taken the folder"):
            check_lease(bucket / "run/checkpoints/x")
    lease.release()
    assert list(list_files(bucket)) == ["run/.lock"], "the lock is the other's"


def test_a_lease_outlives_a_server_that_is_away_for_a_while(object_server, bucket, short):
    lease = Lease(bucket / "run")
    object_server.away_for(1.5)
    time.sleep(0.5)
    lease.check()
    lease.release()
    assert list_files(bucket) == {}


@pytest.mark.parametrize("ignored", ["HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"])
def test_a_server_that_ignores_the_conditions_of_writes_is_refused(object_server, bucket, ignored):
    object_server.ignored_headers.append(ignored)
    try:
        with pytest.raises(ValueError, match="expected a server that keeps the conditions of writes"):
            Lease(bucket / "run")
    finally:
        object_server.ignored_headers.clear()
