"""The connections over which processes hear of each other's end, all within this process."""

import contextlib
import socket
import threading
import time

import pytest

from raggedmoe.parallel import peers
from raggedmoe.parallel.peers import Hub, Member

TOKEN = "secret"


class Process:
    """One side, what it was told of lost processes, and when."""

    def __init__(self, number: int, hub: Hub | None = None):
        self.texts: list[str] = []
        self.told = threading.Event()
        if hub is None:
            self.side = Hub(num_processes=3, token=TOKEN, host="127.0.0.1", lost=self.lost)
        else:
            address = ("127.0.0.1", hub.port)
            self.side = Member(process=number, num_processes=3, token=TOKEN, address=address, lost=self.lost)

    def lost(self, text: str) -> None:
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
    monkeypatch.setattr(peers, "FAILED_PATIENCE", 0.5)
    first, second, third = three
    second.side.end(2, failed=True)
    time.sleep(0.2)
    assert not first.told.is_set()
    assert first.told.wait(5)
    assert third.told.wait(5)
    assert third.texts[0].startswith("process 1 of 3 has ended with code 2; the run stops.")


def test_process_0_may_write_for_as_long_as_it_takes_when_the_others_have_ended(three, monkeypatch):
    monkeypatch.setattr(peers, "ENDED_PATIENCE", 0.2)
    first, second, third = three
    for process in (second, third):
        process.side.end(0, failed=False)
    time.sleep(0.6)
    assert not any(process.texts for process in three)
    first.side.end(0, failed=False)
    for process in three:
        assert process.side.all_ended.wait(5)


def test_one_that_does_not_end_as_the_others_did_is_not_waited_for_for_ever(three, monkeypatch):
    monkeypatch.setattr(peers, "ENDED_PATIENCE", 0.2)
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


def test_a_stranger_on_the_port_is_sent_away_and_harms_nobody(three):
    first, second, _ = three
    with socket.create_connection(("127.0.0.1", first.side.port), timeout=5) as stranger:
        stranger.sendall(b"hello guess 2\nfail 1\n")
        assert stranger.recv(100) == b""
    with socket.create_connection(("127.0.0.1", first.side.port), timeout=5):
        pass
    time.sleep(0.3)
    assert not first.told.is_set()
    assert not second.told.is_set()


def test_a_wrong_token_is_refused():
    hub = Process(0).side
    with contextlib.closing(hub), pytest.raises(ConnectionError, match="did not answer as process 0 does"):
        Member(process=1, num_processes=2, token="guess", address=("127.0.0.1", hub.port), lost=print)
