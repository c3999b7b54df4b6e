"""The connections over which processes hear of each other's end, all within this process."""

import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest

from raggedmoe.launch import peers
from raggedmoe.launch.peers import Hub, Member

TOKEN = "secret"


class Process:
    """One side, what it was told of lost processes, and when."""

    def __init__(self, number: int, hub: Hub | None = None):
        self.texts: list[str] = []
        self.told = threading.Event()
        if hub is None:
            self.side = Hub(num_processes=3, token=TOKEN, host="127.0.0.1", on_lost=self.on_lost)
        else:
            address = ("127.0.0.1", hub.port)
            self.side = Member(process=number, num_processes=3, token=TOKEN, address=address, on_lost=self.on_lost)

    def on_lost(self, text: str) -> None:
        self.texts.append(text)
        self.told.set()

    def die(self) -> None:
        """As the system ends a process: its connection is closed, without a word."""
        self.side._connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def three():
    first = Process(0)
    processes = (first, Process(1, first.side), Process(2, first.side))
    yield processes
    for process in reversed(processes):
        process.side.close()


def test_all_hear_of_a_process_that_dies(three):
    first, second, third = three
    third.die()
    for process in (first, second):
        assert process.told.wait(5)
        assert process.texts[0].startswith("process 2 of 3 has ended; the run stops.")


def test_all_hear_of_process_0(three):
    first, *others = three
    first.side.close()
    for process in others:
        assert process.told.wait(5)
        assert process.texts[0].startswith("process 0 of 3 has ended")


def test_processes_that_end_in_order_wait_for_the_last(three):
    first, second, third = three
    third.side.end(0, failed=False)
    first.side.end(0, failed=False)
    time.sleep(0.3)
    assert not first.side.all_ended.is_set()
    assert not third.side.all_ended.is_set()
    second.side.end(0, failed=False)
    for process in three:
        assert process.side.all_ended.wait(5)
        assert not process.texts


def test_process_0_is_the_last_to_go(three):
    first, second, third = three
    for process in three:
        process.side.end(75, failed=False)
    assert first.side.all_ended.wait(5)
    time.sleep(0.3)
    assert not first.side.all_gone.is_set()
    second.die()
    third.die()
    assert first.side.all_gone.wait(5)
    assert not first.texts


def test_the_others_of_one_that_failed_get_some_time_to_fail_too(three, monkeypatch):
    monkeypatch.setattr(peers, "FAILED_GRACE_SECONDS", 0.5)
    first, second, third = three
    second.side.end(2, failed=True)
    time.sleep(0.2)
    assert not first.told.is_set()
    assert first.told.wait(5)
    assert third.told.wait(5)
    assert third.texts[0].startswith("process 1 of 3 has ended with code 2; the run stops.")


def test_process_0_may_write_for_as_long_as_it_takes_when_the_others_have_ended(three, monkeypatch):
    monkeypatch.setattr(peers, "ENDED_GRACE_SECONDS", 0.2)
    first, second, third = three
    for process in (second, third):
        process.side.end(0, failed=False)
    time.sleep(0.6)
    assert not any(process.texts for process in three)
    first.side.end(0, failed=False)
    for process in three:
        assert process.side.all_ended.wait(5)


def test_one_that_does_not_end_as_the_others_did_is_not_waited_for_for_ever(three, monkeypatch):
    monkeypatch.setattr(peers, "ENDED_GRACE_SECONDS", 0.2)
    first, _, third = three
    third.side.end(0, failed=False)
    assert first.told.wait(5)
    time.sleep(0.3)
    assert [text.partition(";")[0] for text in first.texts] == ["process 2 of 3 has ended with code 0"]


def test_a_hub_that_can_hear_no_longer_ends_the_run(three, monkeypatch):
    first, second, _ = three
    monkeypatch.setattr(first.side, "_check_ends", lambda: 1 / 0)
    assert second.told.wait(5)
    assert second.texts[0].startswith("process 0 of 3 cannot hear the others any longer (ZeroDivisionError(")


def test_no_more_connections_are_taken_once_all_have_come(three):
    first, second, third = three
    first.side.close_port()
    deadline = time.monotonic() + 5
    while first.side._servers and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", first.side.port), timeout=5)
    third.die()
    for process in (first, second):
        assert process.told.wait(5)


# Strangers on the port, before all processes have come


def stranger(hub):
    return contextlib.closing(socket.create_connection(("127.0.0.1", hub.port), timeout=5))


def is_sent_away(connection):
    """Whether the other side closes the connection without a word, before the time that `stranger` gives it."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:  # it did not read all
        return True


HELLO = peers._hello_line(TOKEN, 2)
SENT = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: process-0\r\n\r\n",
    "no text": b"\xff" * len(HELLO),
    "megabytes without a line": b"x" * 2**22,
    "another token": HELLO.replace(TOKEN.encode(), b"guess!"),
    "the number of no process": peers._hello_line(TOKEN, 3),
    "the number of process 0": peers._hello_line(TOKEN, 0),
    "no number": HELLO[:-9] + b"\xb2" * 8 + b"\n",
    "a process that is here already": peers._hello_line(TOKEN, 1),
    "an order before the token": b"fail 1\n" + HELLO,
}


@pytest.mark.parametrize("sent", SENT)
def test_a_stranger_is_sent_away_whatever_it_says(sent, three):
    first, second, third = three
    with stranger(first.side) as connection:
        with contextlib.suppress(ConnectionError):  # sent away before the last byte
            connection.sendall(SENT[sent])
        assert is_sent_away(connection)
    third.die()
    for process in (first, second):
        assert process.told.wait(5)
        assert process.texts[0].startswith("process 2 of 3 has ended;")  # which is all that they ever heard


def test_how_much_of_a_token_is_right_cannot_be_found_byte_by_byte(three):
    hub = three[0].side
    with stranger(hub) as connection:
        connection.sendall(b"\xff" * (len(HELLO) - 1))
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(5)
        connection.sendall(b"\xff")
        assert is_sent_away(connection)


@pytest.mark.parametrize("pause", [5.0, 0.02], ids=["silent", "slow"])
def test_a_stranger_is_sent_away_when_its_time_is_over(pause, monkeypatch):
    monkeypatch.setattr(peers, "HELLO_SECONDS", 0.3)
    with contextlib.closing(Process(0).side) as hub, stranger(hub) as connection:
        connection.settimeout(pause)
        began, closed = time.monotonic(), False
        while not closed and time.monotonic() < began + 5:
            with contextlib.suppress(TimeoutError):
                closed = is_sent_away(connection)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"h")  # too few in that time to make a hello
        assert closed


def test_many_strangers_make_room_for_each_other_and_for_processes(monkeypatch):
    monkeypatch.setattr(peers, "HELLO_SECONDS", 60.0)
    first = Process(0)
    with contextlib.ExitStack() as open_connections:
        open_connections.callback(first.side.close)
        strangers = [open_connections.enter_context(stranger(first.side)) for _ in range(3 * peers.MAX_PENDING)]
        second = Process(1, first.side)
        open_connections.callback(second.side.close)
        assert is_sent_away(strangers[0])
        assert len(first.side._pending) <= peers.MAX_PENDING
        second.die()
        assert first.told.wait(5)
    assert first.texts[0].startswith("process 1 of 3 has ended")


# Loaded from its file: it needs neither JAX nor the package around it.
HUB = f"""
import importlib.util, os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
spec = importlib.util.spec_from_file_location("peers", {peers.__file__!r})
sys.modules["peers"] = peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)
def lost(text):
    print(text, flush=True)
    os._exit(0)
print(peers.Hub(num_processes=3, token={TOKEN!r}, host="127.0.0.1", on_lost=lost).port, flush=True)
threading.Event().wait(60)
"""


@pytest.mark.parametrize("descriptors", [256, 16], ids=["few", "fewer than strangers may have"])
def test_processes_join_among_1500_silent_strangers_whatever_descriptors_are_left(descriptors):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this system gives a process fewer than 2000 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        hub = subprocess.Popen([sys.executable, "-S", "-c", HUB, str(descriptors)], stdout=subprocess.PIPE, text=True)
        stack.enter_context(hub)
        stack.callback(hub.kill)
        address = ("127.0.0.1", int(hub.stdout.readline()))
        for _ in range(1500):
            stack.enter_context(contextlib.closing(socket.create_connection(address, timeout=5)))
        told = threading.Event()
        member = Member(process=1, num_processes=3, token=TOKEN, address=address, on_lost=lambda text: told.set())
        stack.callback(member.close)
        assert not told.is_set()
        member._connection.shutdown(socket.SHUT_WR)
        assert hub.stdout.readline().startswith("process 1 of 3 has ended;")


def test_a_wrong_token_is_refused(monkeypatch):
    monkeypatch.setattr(peers, "CONNECT_SECONDS", 0.3)
    hub = Process(0).side
    with contextlib.closing(hub), pytest.raises(ConnectionError, match="did not answer as process 0 does"):
        Member(process=1, num_processes=2, token="guess!", address=("127.0.0.1", hub.port), on_lost=print)


# Where process 0 listens


def listens_at(host):
    hub = Hub(num_processes=2, token=TOKEN, host=host, on_lost=print)
    assert hub._thread.daemon  # a process that ends without closing it does not wait for it
    with contextlib.closing(hub):
        return {server.getsockname()[0] for server in hub._servers}


def test_process_0_listens_at_the_coordinators_address_alone(caplog):
    assert listens_at("127.0.0.2") == {"127.0.0.2"}
    assert listens_at("localhost") <= {"127.0.0.1", "::1"}
    assert not caplog.records


@pytest.mark.parametrize("number", ["192.0.2.1", "127.0.1.1"], ids=["of a virtual service", "of this machine alone"])
def test_process_0_listens_everywhere_if_the_others_know_it_by_another_address(number, monkeypatch, caplog):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listens_at("process-0.cluster") <= {"::", "0.0.0.0"}
    assert "process-0.cluster, which is no address of this machine" in caplog.text


def test_of_several_addresses_those_of_this_machine_are_taken(monkeypatch):
    numbers = ("192.0.2.1", "127.0.0.2")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, 0)) for number in numbers]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listens_at("127.0.0.2") == {"127.0.0.2"}


def test_a_member_waits_for_no_longer_than_it_says(monkeypatch):
    """A host that swallows what is sent to it would otherwise hold a run for as long as the machine has been up."""
    asked = []

    def connect(address, timeout):
        asked.append(timeout)
        raise TimeoutError("nobody answers")

    monkeypatch.setattr(peers.socket, "create_connection", connect)
    with pytest.raises(TimeoutError):
        Member(process=1, num_processes=2, token=TOKEN, address=("127.0.0.1", 1), on_lost=print)
    assert 0 < min(asked) <= max(asked) <= peers.CONNECT_SECONDS
