"""Signals to stop, counted: those that come together are one request."""

import signal
import threading
from types import SimpleNamespace

import pytest

from raggedmoe.launch import stop_signals
from raggedmoe.launch.stop_signals import StopSignals


@pytest.fixture
def clock(monkeypatch):
    """The time, which passes only when somebody sleeps or a test says so."""
    found = SimpleNamespace(now=100.0)

    def sleep(seconds):
        found.now += seconds

    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: found.now, sleep=sleep))
    return found


def test_thirty_signals_in_a_second_are_one_request(clock):
    heeded = []
    with StopSignals(heeded.append):
        for number in range(30):
            signal.raise_signal(signal.SIGINT if number % 3 else signal.SIGTERM)
            clock.now += 1 / 30
    assert heeded == [signal.SIGTERM]


@pytest.mark.parametrize(("seconds", "requests"), [(1.999, 1), (2.0, 2), (60.0, 2)])
def test_a_signal_two_seconds_after_the_first_is_another_request(clock, seconds, requests):
    heeded = []
    with StopSignals(heeded.append):
        for wait in (0.0, 1.5, seconds - 1.5):  # the one in between does not put the end of the two seconds off
            clock.now += wait
            signal.raise_signal(signal.SIGINT)
    assert len(heeded) == requests


@pytest.mark.parametrize(("at", "left"), [((), 100.0), ((0.5,), 102.5), ((0.5, 1.0, 60.0), 161.5)])
def test_it_is_not_left_before_all_signals_of_the_first_request_have_come(clock, at, left):
    with StopSignals(lambda number: None):
        for wait in at:
            clock.now += wait
            signal.raise_signal(signal.SIGTERM)
    assert clock.now == left


def test_another_thread_than_the_main_one_leaves_signals_as_they_are(clock):
    before = [signal.getsignal(number) for number in stop_signals.STOP_SIGNALS]
    found = []

    def enter():
        with StopSignals(found.append):
            found.append([signal.getsignal(number) for number in stop_signals.STOP_SIGNALS])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [before]


def test_outside_signals_do_what_they_did_before(clock):
    before = [signal.getsignal(number) for number in stop_signals.STOP_SIGNALS]

    def fail():
        with StopSignals(lambda number: None):
            assert [signal.getsignal(number) for number in stop_signals.STOP_SIGNALS] != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [signal.getsignal(number) for number in stop_signals.STOP_SIGNALS] == before
