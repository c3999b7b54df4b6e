"""What the environment says of a process, what a process alone does, and in which order one leaves its run."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from raggedmoe.launch import processes
from raggedmoe.launch.peers import FAILED_GRACE_SECONDS
from raggedmoe.launch.processes import ProcessInfo, read_process_info
from raggedmoe.train.loop import loop
from raggedmoe.train.settings.config import TrainConfig

GIVEN = {
    "RAGGEDMOE_COORDINATOR": "10.0.0.1:1234",
    "RAGGEDMOE_NUM_PROCESSES": "4",
    "RAGGEDMOE_PROCESS_ID": "3",
}


def test_a_place_is_read_from_the_environment():
    assert read_process_info(GIVEN) == ProcessInfo(coordinator="10.0.0.1:1234", num_processes=4, process_id=3)
    assert read_process_info({"RAGGEDMOE_COORDINATOR": "auto"}) == ProcessInfo()
    assert read_process_info({}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RAGGEDMOE_COORDINATOR": "10.0.0.1"}, "expected host:port of process 0, or auto, got '10.0.0.1'"),
        ({"RAGGEDMOE_PROCESS_ID": "4"}, "expected 0 <= RAGGEDMOE_PROCESS_ID < RAGGEDMOE_NUM_PROCESSES, got 4, 4"),
        ({"RAGGEDMOE_PROCESS_ID": "first"}, "expected RAGGEDMOE_PROCESS_ID to be a whole number, got 'first'"),
        ({"RAGGEDMOE_NUM_PROCESSES": ""}, "expected RAGGEDMOE_NUM_PROCESSES to be a whole number, got ''"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        read_process_info({**GIVEN, **changed})


def test_a_number_without_a_coordinator_is_refused():
    with pytest.raises(ValueError, match="expected the coordinator's host:port"):
        ProcessInfo(process_id=1)


def test_a_process_alone_joins_nothing_and_decides_for_itself():
    processes.join(environment={})
    processes.join(environment={**GIVEN, "RAGGEDMOE_NUM_PROCESSES": "1", "RAGGEDMOE_PROCESS_ID": "0"})
    assert processes.is_first_process()
    assert processes.agree_to_stop(3, stop_requested=True)
    assert not processes.agree_to_stop(3, stop_requested=False)
    processes.wait_for_all("nobody")
    processes.leave(3)


@pytest.mark.ci
def test_a_cluster_that_jax_does_not_find_is_named_with_what_to_set():
    code = "from raggedmoe.launch import processes as p; p.join()"
    given = {**os.environ, "RAGGEDMOE_COORDINATOR": "auto"}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "RAGGEDMOE_COORDINATOR=auto: expected a cluster that JAX knows" in done.stderr
    assert "set it to host:port of process 0, with RAGGEDMOE_NUM_PROCESSES and RAGGEDMOE_PROCESS_ID" in done.stderr


def test_a_process_that_could_not_join_does_not_go_on_alone(monkeypatch):
    monkeypatch.setattr(processes, "_has_looked", False)
    for name, value in {**GIVEN, "RAGGEDMOE_PROCESS_ID": "4"}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(ValueError, match="expected 0 <= RAGGEDMOE_PROCESS_ID < RAGGEDMOE_NUM_PROCESSES, got 4, 4"):
            processes.join_processes()
    for name in GIVEN:
        monkeypatch.delenv(name)
    processes.join_processes()
    monkeypatch.setenv("RAGGEDMOE_COORDINATOR", "nowhere")
    processes.join_processes()  # it is alone, and has begun as such


@pytest.mark.ci
def test_scripts_join_by_one_call_and_end_together():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code = (
        "import raggedmoe, jax; raggedmoe.join_processes(); raggedmoe.join_processes(); "
        "print(jax.process_index(), jax.device_count())"
    )
    shared = {**os.environ, "RAGGEDMOE_COORDINATOR": f"127.0.0.1:{port}", "RAGGEDMOE_NUM_PROCESSES": "2"}
    scripts = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**shared, "RAGGEDMOE_PROCESS_ID": str(number), "RAGGEDMOE_CPU_DEVICES": "3", "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for number, script in enumerate(scripts):
        said, errors = script.communicate(timeout=120)
        assert (script.returncode, said) == (0, f"{number} 6\n"), errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_whose_others_do_not_come_says_so(number):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    info = f"ProcessInfo(coordinator='127.0.0.1:{port}', num_processes=2, process_id={number})"
    code = f"from raggedmoe.launch import processes as p; p.JOIN_SECONDS = 2.0; p.join(p.{info})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == processes.PEER_LOST
    assert done.stderr.startswith(f"raggedmoe: 2 processes did not come together at 127.0.0.1:{port} within 2 s;")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def said(monkeypatch):
    """What a process of several does as it leaves."""
    happened = []

    def noted(what):
        return lambda *values, **options: happened.append((what, *values, *options.values()))

    peers = SimpleNamespace(
        end=noted("end"),
        close=noted("close"),
        all_ended=SimpleNamespace(wait=noted("all ended")),
        all_gone=SimpleNamespace(wait=noted("all gone")),
    )
    monkeypatch.setattr(processes, "_membership", SimpleNamespace(failed=None, left=False, peers=peers))
    monkeypatch.setattr(os, "_exit", noted("exit"))
    return happened


def test_in_order_it_says_so_waits_for_all_and_goes_on(said):
    processes.leave(0)
    assert said == [("end", 0, False), ("all ended", None), ("close",)]
    assert processes._membership.failed is False


def test_stopped_it_waits_for_all_and_exits(said):
    processes.leave(3)
    assert said == [("end", 3, False), ("all ended", None), ("all gone", FAILED_GRACE_SECONDS), ("exit", 3)]
    assert processes._membership.failed is True


def test_failed_it_waits_some_seconds_and_exits(said):
    processes.leave(1, failed=True)
    waits = [("all ended", FAILED_GRACE_SECONDS + 1), ("all gone", FAILED_GRACE_SECONDS)]
    assert said == [("end", 1, True), *waits, ("exit", 1)]
    assert processes._membership.failed is True


@pytest.mark.parametrize(("code", "exits_with"), [(0, 1), (processes.CANNOT_WRITE, processes.CANNOT_WRITE)])
def test_a_script_whose_last_training_failed_says_so_at_its_end(said, monkeypatch, code, exits_with):
    monkeypatch.setattr(processes, "_failure_code", 0)
    processes.note_end(code, failed=True)
    processes._leave_at_exit()
    waits = [("all ended", FAILED_GRACE_SECONDS + 1), ("all gone", FAILED_GRACE_SECONDS)]
    assert said == [("end", exits_with, True), *waits, ("exit", exits_with)]


def test_a_script_that_trained_again_after_a_failure_ends_in_order(said, monkeypatch):
    monkeypatch.setattr(processes, "_failure_code", 0)
    processes.note_end(1, failed=True)
    processes.note_end(3, failed=False)
    processes._leave_at_exit()
    assert said == [("end", 0, False), ("all ended", None), ("close",)]


@pytest.mark.parametrize(
    ("end", "code"), [(ValueError("mine"), 1), (SystemExit(0), 1), (processes.CANNOT_WRITE, 74), (3, 0), (0, 0)]
)
def test_training_notes_how_it_ended(monkeypatch, end, code):
    def check_and_train(*values):
        if isinstance(end, BaseException):
            raise end
        return loop.RunOutcome(code=end, text="", folder=Path())

    monkeypatch.setattr(processes, "_failure_code", 0)
    monkeypatch.setattr(loop, "_check_and_train", check_and_train)
    with pytest.raises(type(end)) if isinstance(end, BaseException) else contextlib.nullcontext():
        loop.train(TrainConfig())
    assert processes._failure_code == code
