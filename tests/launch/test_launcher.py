"""Several processes on one machine: what is shown, what codes come back, and what is left when one ends."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from raggedmoe.launch import launcher
from raggedmoe.launch.launcher import LocalRun, drop_runtime_logs, environments, launch
from tests.launch.running import is_running

SUMMING = str(Path(__file__).with_name("summing.py"))
FOREVER = ("100000", "0.01")


def script(text: str) -> tuple[str, ...]:
    """A program that knows its number as `me`."""
    return (sys.executable, "-c", f"import os, signal, sys, time; me = int(os.environ['RAGGEDMOE_PROCESS_ID']); {text}")


def summing(processes: int, *arguments: str) -> LocalRun:
    return LocalRun(command=(sys.executable, SUMMING, *arguments), num_processes=processes, devices_per_process=2)


def started(tmp_path: Path, processes: int) -> tuple[subprocess.Popen, list[int]]:
    """A launcher in a process of its own, and the numbers of its processes once all have done a step."""
    code = (
        "import signal, sys; from raggedmoe.launch.launcher import LocalRun, launch; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # which a job in the background ignores
        f"sys.exit(launch(LocalRun(command={(sys.executable, SUMMING, *FOREVER)!r}, num_processes={processes}, "
        "devices_per_process=2)))"
    )
    environment = {**os.environ, "SUMMING_PIDS": str(tmp_path)}
    found = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < processes:
        assert time.monotonic() < until
        assert found.poll() is None
        time.sleep(0.05)
    return found, [int(file.name) for file in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (["[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"], []),
        (  # the pieces of two threads
            [
                "[Gloo] Rank 0 is connected to 3[Gloo] Rank 1 is connected to 3",
                " peer ranks. Expected number of connected peer ranks is : 3",
            ],
            [],
        ),
        (
            [
                "[Gloo] Rank [Gloo] Rank 01 is connected to  is connected to 33 peer ranks.  peer ranks. "
                "Expected number of connected peer ranks is : Expected number of connected peer ranks is : 3",
                "3",
            ],
            [],
        ),
        (["12", "", "loss: 3"], ["12", "loss: 3"]),
    ],
    ids=["whole", "in-two", "number-alone", "none"],
)
def test_the_logs_of_connections_are_left_out_and_nothing_else(log, shown):
    assert list(drop_runtime_logs(f"{line}\n" for line in (*log, "42"))) == [*shown, "42"]


@pytest.mark.ci
def test_two_processes_sum_over_the_devices_of_both(capsys):
    assert launch(summing(2, "3", "0")) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines() == ["[process 0] joined: 2 processes, 4 devices", "[process 0] sum 12 after 3 steps"]


@pytest.mark.ci
def test_what_process_0_says_is_heard_by_all_in_order_whoever_is_late(capsys):
    text = (
        "from raggedmoe.launch import processes as p; p.join(); time.sleep(1 - me); "
        "said = [p.broadcast_from_first([me])];"
        "p.wait_for_all('here'); said += [p.broadcast_from_first('b' if me == 0 else None)];"
        "print(me, said, file=sys.stderr); p.leave(0)"
    )
    assert launch(LocalRun(command=script(text), num_processes=2)) == 0
    assert sorted(capsys.readouterr().err.splitlines()) == ["[process 0] 0 [[0], 'b']", "[process 1] 1 [[0], 'b']"]


@pytest.mark.ci
def test_a_killed_process_is_named_and_the_others_end_at_once(capsys, monkeypatch):
    monkeypatch.setenv("SUMMING_EVENT", "1 5 kill")
    assert launch(summing(2, *FOREVER)) == 128 + signal.SIGKILL
    error = capsys.readouterr().err
    assert "raggedmoe: process 1 of 2 was ended by SIGKILL; the others were stopped.\nIts last lines:" in error
    assert "\n  at the event\n" in error
    assert "[process 0] raggedmoe: process 1 of 2 has ended; the run stops." in error
    assert "goes on from the last checkpoint" in error
    assert "***" not in error  # no stack of C++ frames


@pytest.mark.slow
def test_processes_wait_for_one_that_comes_later_than_gloo_would(capsys, monkeypatch):
    monkeypatch.setenv("SUMMING_LATE", "35")
    assert launch(summing(2, "3", "0")) == 0
    assert "sum 12 after 3 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_the_others_end_when_process_0_is_killed(capsys, monkeypatch):
    monkeypatch.setenv("SUMMING_EVENT", "0 5 kill")
    assert launch(summing(3, *FOREVER)) == 128 + signal.SIGKILL
    error = capsys.readouterr().err
    assert "raggedmoe: process 0 of 3 was ended by SIGKILL" in error
    assert "***" not in error


@pytest.mark.slow
def test_an_exception_in_one_process_ends_all_with_its_traceback(capsys, monkeypatch):
    monkeypatch.setenv("SUMMING_EVENT", "1 5 raise")
    began = time.monotonic()
    assert launch(summing(3, *FOREVER)) == 1
    assert time.monotonic() - began < 60
    error = capsys.readouterr().err
    assert "[process 1] ValueError: invalid literal" in error
    assert "raggedmoe: process 1 of 3 ended with code 1" in error
    assert "process 1 of 3 has ended with code 1; the run stops" in error


@pytest.mark.slow
def test_a_process_that_is_stopped_ends_the_run_within_a_minute(tmp_path):
    """It closes no connection: JAX's heartbeats notice it."""
    process, pids = started(tmp_path, 3)
    with process:
        os.kill(pids[-1], signal.SIGSTOP)
        assert process.wait(60) != 0
        error = process.stderr.read()
        assert re.search(r"raggedmoe: process \d of 3 no longer answered, and was ended", error)
        assert "***" not in error
    assert not any(map(is_running, pids))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_stops_all_after_the_same_step(tmp_path, number):
    process, pids = started(tmp_path, 2)
    with process:
        if number == signal.SIGINT:  # not asked for by the program: its end is an exception's
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 1
        else:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 75
            assert len(set(re.findall(r"stopped after step \d+", process.stderr.read()))) == 1
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_no_process_outlives_a_launcher_that_is_killed(tmp_path):
    process, pids = started(tmp_path, 2)
    with process:
        process.kill()
        process.wait()
        until = time.monotonic() + 30
        while any(map(is_running, pids)):
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.parametrize("code", [0, 2, 3, 74, 75])
def test_a_code_on_which_all_agree_is_the_launchers(code, capsys):
    assert launch(LocalRun(command=script(f"sys.exit({code})"), num_processes=3)) == code
    assert capsys.readouterr() == ("", "")


def test_errors_of_all_processes_are_shown_and_equal_ones_once(capsys):
    text = "print(f'out of {me}'); print('same', file=sys.stderr); print(f'error of {me}', file=sys.stderr)"
    assert launch(LocalRun(command=script(text), num_processes=3)) == 0
    out, error = capsys.readouterr()
    assert out == "[process 0] out of 0\n"
    assert error.count("same\n") <= 2  # process 0's is always shown, also after another's
    for process in range(3):
        assert f"[process {process}] error of {process}\n" in error


@pytest.mark.ci
def test_those_that_do_not_end_by_themselves_are_asked_to_and_then_killed(capsys, monkeypatch):
    monkeypatch.setattr(launcher, "SELF_EXIT_SECONDS", 0.2)
    deaf = (
        "me == 1 or signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); me == 1 and time.sleep(0.5)"
    )
    run = LocalRun(
        command=script(f"{deaf}; me == 1 and sys.exit(7); time.sleep(1); time.sleep(60)"), num_processes=2, grace=0.5
    )
    began = time.monotonic()
    assert launch(run) == 7
    assert time.monotonic() - began < 10
    assert "[process 0] asked" in capsys.readouterr().out


@pytest.mark.ci
def test_thirty_signals_to_the_launcher_in_a_second_reach_each_process_once(tmp_path):
    counting = (
        f"asked = []; signal.signal(signal.SIGTERM, lambda *_: asked.append(0)); open(r'{tmp_path}/' + str(me), 'w'); "
        "until = time.monotonic() + 30\n"
        "while not asked and time.monotonic() < until: time.sleep(0.02)\n"
        "time.sleep(1.5); sys.exit(75 if len(asked) == 1 else 9)"
    )

    def send():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        for _ in range(30):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1 / 30)

    strays = []
    before = signal.signal(signal.SIGTERM, lambda *_: strays.append(0))
    sender = threading.Thread(target=send)
    sender.start()
    try:
        assert launch(LocalRun(command=script(counting), num_processes=2)) == 75
        assert strays == []
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)


def test_each_process_is_told_its_place_and_one_number_of_devices():
    run = LocalRun(command=("x",), num_processes=2, devices_per_process=3)
    given = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8", "HOME": "/root"}
    first, second = environments(run, 1234, 5, given)
    assert first["XLA_FLAGS"] == "--xla_a=1"
    assert first["RAGGEDMOE_CPU_DEVICES"] == "3"
    assert first["RAGGEDMOE_COORDINATOR"] == "127.0.0.1:1234"
    assert first["HOME"] == "/root"
    assert {**second, "RAGGEDMOE_PROCESS_ID": "0"} == first
    assert second["RAGGEDMOE_PROCESS_ID"] == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 0}, "expected --processes >= 1, got 0"),
        ({"num_processes": 1, "devices_per_process": 0}, "expected --devices-per-process >= 1, got 0"),
        ({"num_processes": 1, "grace": 90.0}, "expected --grace between 0 and 45 seconds, got 90"),
    ],
)
def test_a_run_that_cannot_be_started_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LocalRun(command=("x",), **options)


class Saving:
    """A process that ends with code 75 a while after it was asked to stop, and is not to be sent anything more."""

    process, silent = 0, False

    def __init__(self, seconds):
        self.until, self.sent = time.monotonic() + seconds, []

    @property
    def code(self):
        return 75 if time.monotonic() > self.until else None

    def send(self, number):
        self.sent.append(number)


@pytest.mark.parametrize(("asked", "sent"), [([signal.SIGTERM], []), ([signal.SIGTERM] * 2, [signal.SIGTERM])])
def test_processes_that_save_are_waited_for_until_they_are_asked_to_stop_again(monkeypatch, asked, sent):
    monkeypatch.setattr(launcher, "SELF_EXIT_SECONDS", 0.05)
    child = Saving(0.4)
    assert launcher._wait_for_children([child], grace=5.0, signals=asked) is None
    assert child.sent == sent
