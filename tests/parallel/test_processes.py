"""What the environment says of a process, and what a process alone does."""

import os
import socket
import subprocess
import sys

import pytest

from raggedmoe.parallel import processes
from raggedmoe.parallel.processes import Place, place_in

GIVEN = {
    "RAGGEDMOE_COORDINATOR": "10.0.0.1:1234",
    "RAGGEDMOE_NUM_PROCESSES": "4",
    "RAGGEDMOE_PROCESS_ID": "3",
}


def test_a_place_is_read_from_the_environment():
    assert place_in(GIVEN) == Place(coordinator="10.0.0.1:1234", num_processes=4, process_id=3)
    assert place_in({"RAGGEDMOE_COORDINATOR": "auto"}) == Place()
    assert place_in({}) is None


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
        place_in({**GIVEN, **changed})


def test_a_number_without_a_coordinator_is_refused():
    with pytest.raises(ValueError, match="expected the coordinator's host:port"):
        Place(process_id=1)


def test_a_process_alone_joins_nothing_and_decides_for_itself():
    processes.join(environment={})
    processes.join(environment={**GIVEN, "RAGGEDMOE_NUM_PROCESSES": "1", "RAGGEDMOE_PROCESS_ID": "0"})
    assert processes.is_first()
    assert processes.agreed_stop(3, wanted=True)
    assert not processes.agreed_stop(3, wanted=False)
    processes.wait_for_all("nobody")
    processes.leave(3)


@pytest.mark.ci
def test_a_cluster_that_jax_does_not_find_is_named_with_what_to_set():
    code = "from raggedmoe.parallel import processes as p; p.join()"
    given = {**os.environ, "RAGGEDMOE_COORDINATOR": "auto"}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "RAGGEDMOE_COORDINATOR=auto: expected a cluster that JAX knows" in done.stderr
    assert "set it to host:port of process 0, with RAGGEDMOE_NUM_PROCESSES and RAGGEDMOE_PROCESS_ID" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_whose_others_do_not_come_says_so(number):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = f"Place(coordinator='127.0.0.1:{port}', num_processes=2, process_id={number})"
    code = f"from raggedmoe.parallel import processes as p; p.JOIN_SECONDS = 2.0; p.join(p.{place})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == processes.LOST
    assert done.stderr.startswith(f"raggedmoe: 2 processes did not come together at 127.0.0.1:{port} within 2 s;")
    assert done.stderr.count("\n") == 1
