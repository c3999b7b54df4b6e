"""Runs in object storage that are killed, or whose server is away: they go on as if nothing had happened."""

import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from raggedmoe import storage
from raggedmoe.cli.train import train
from raggedmoe.storage.trees import list_files, sha256
from tests.train.runs import TINY, command, curve, lines

SOURCES = Path(storage.__file__).parent  # a few small files, which are read at once
WORDS = (
    *TINY,
    "moe_backend=dense",
    "steps=12",
    "checkpoint_period=2",
    "eval_interval=5",
    "eval_steps=2",
    "load_period=3",
    "dataset_type=text",
    f"dataset_path={SOURCES}",
    "dataset_suffixes=.py",
    "tensorboard=false",
    "run_name=run",
)


@dataclass(frozen=True)
class Moment:
    """When a process is killed: as the server has that request, which it then serves, or not."""

    method: str
    path: str
    is_served: bool


MOMENTS = {
    "steps": Moment("GET|HEAD|PUT", r"step_00000002/manifest\.json", True),  # which go on meanwhile
    "checkpoint": Moment("PUT", "step_00000006/state-", False),
    "commit": Moment("PUT", r"step_00000008/manifest\.json", False),
    "commit that arrives": Moment("PUT", r"step_00000010/manifest\.json", True),
    "export": Moment("PUT|POST", "run/model/model-", False),
    "commit of the export": Moment("PUT", r"run/model/model\.safetensors\.index\.json", False),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of the same run on a disk, which nothing disturbed.

    It runs here, with the compiler's settings that the processes inherit: they find its programs in the cache.
    """
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train((*WORDS, f"base_output_directory={folder}")) == 0
    return folder / "run"


def start(bucket) -> subprocess.Popen:
    """Start the command, which a second one must not join."""
    words = command("train", *WORDS, f"base_output_directory={bucket / 'runs'}")
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def kill_at(object_server, bucket, moment: Moment) -> None:
    held = threading.Event()
    kind = "serve" if moment.is_served else "cut"
    with object_server.fault(moment.method, moment.path, kind, until=held) as fault, start(bucket) as process:
        while not fault.seen:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        time.sleep(0.05)
        process.kill()
        process.wait()
        held.set()
        time.sleep(0.2)  # the server serves it


def check_is(run, expected) -> None:
    """The run has the curve, the loads and the weights of the other, bit for bit."""
    assert curve(run) == curve(expected)
    assert lines(run / "load.jsonl") == lines(expected / "load.jsonl")
    [weights] = [name for name in list_files(run / "model") if name.endswith(".safetensors")]
    assert sha256(run / "model" / weights) == sha256(expected / "model/model.safetensors")


@pytest.mark.ci
def test_a_run_killed_six_times_goes_on_bit_for_bit(object_server, bucket, uninterrupted):
    run = bucket / "runs/run"
    for moment in MOMENTS.values():
        kill_at(object_server, bucket, moment)
    assert train((*WORDS, f"base_output_directory={bucket / 'runs'}")) == 0
    check_is(run, uninterrupted)
    resumed = [line["step"] for line in lines(run / "metrics.jsonl") if line.get("what") == "resumed"]
    assert resumed == sorted(resumed)
    assert {name for name in list_files(run / "checkpoints") if "written-" in name or ".partial" in name} == set()


@pytest.mark.slow
def test_a_second_process_does_not_join_a_run(object_server, bucket):
    held = threading.Event()
    with object_server.fault("PUT", "step_00000002/state-", "serve", until=held) as fault, start(bucket) as first:
        while not fault.seen:
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.002)
        with start(bucket) as second:
            assert second.wait(120) == 74
            assert f"process {first.pid} on " in second.stderr.read()
        held.set()
        assert first.wait(120) == 0, first.stderr.read()


def run_until_the_server_is_gone(object_server, bucket, away) -> tuple[int, str, float]:
    """Train until a checkpoint is being written, then call ``away``; return code, errors and the seconds since."""
    begun = threading.Event()
    written = object_server.fault("PUT", "step_00000006/state-", "serve", times=1, until=begun)
    with written as fault, start(bucket) as process:
        while not fault.seen:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        away()
        begun.set()
        left = time.monotonic()
        return process.wait(180), process.stderr.read(), time.monotonic() - left


@pytest.mark.slow
def test_a_server_that_is_away_for_20_seconds_is_waited_for(object_server, bucket, uninterrupted, monkeypatch):
    monkeypatch.setenv("RAGGEDMOE_STORAGE_SECONDS", "60")
    code, said, seconds = run_until_the_server_is_gone(object_server, bucket, lambda: object_server.away_for(20.0))
    assert code == 0, said
    assert seconds > 20
    check_is(bucket / "runs/run", uninterrupted)


@pytest.mark.ci
def test_a_server_that_stays_away_ends_the_run_with_nothing_lost(object_server, bucket, uninterrupted, monkeypatch):
    monkeypatch.setenv("RAGGEDMOE_STORAGE_SECONDS", "4")
    code, said, seconds = run_until_the_server_is_gone(object_server, bucket, object_server.stop)
    object_server.come_back()
    assert code == 74, said
    assert "the same command goes on from them" in said
    assert seconds > 4
    assert train((*WORDS, f"base_output_directory={bucket / 'runs'}")) == 0
    check_is(bucket / "runs/run", uninterrupted)
