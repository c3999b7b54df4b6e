"""Runs that are killed: whatever the moment, they go on as if nothing had happened."""

import functools
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from raggedmoe.cli.tokenize import tokenize_
from raggedmoe.cli.train import train
from tests.train.runs import TINY, command, curve, lines

# Experts by plain einsums, which a restart traces sooner.
WORDS = (
    *TINY,
    "moe_backend=dense",
    "checkpoint_period=2",
    "eval_interval=10",
    "eval_steps=2",
    "load_period=3",
    "tensorboard=false",
    "run_name=run",
)
SHORT, LONG = 16, 800


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run of so many steps that nothing disturbed.

    It runs here, with the compiler's settings that the processes inherit: they find its programs in the cache.
    """

    @functools.cache
    def make(steps: int, *more: str) -> Path:
        folder = tmp_path_factory.mktemp("uninterrupted")
        assert train((*WORDS, f"steps={steps}", f"base_output_directory={folder}", *more)) == 0
        return folder / "run"

    return make


def killed_at_random(process: subprocess.Popen, run: Path, draw: random.Random) -> bool:
    """Kill -9: while it starts, a little after its first new step, or in a checkpoint; False: it was done before."""
    moment = draw.choice(("start", "steps", "steps", "checkpoint", "checkpoint"))
    metrics = run / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    if moment == "start":
        _wait(process, draw.uniform(0.5, 6))
    else:
        while process.poll() is None and (not metrics.exists() or metrics.stat().st_mtime_ns == before):
            time.sleep(0.002)
        _wait(process, draw.uniform(0, 0.6))
    while moment == "checkpoint" and process.poll() is None and not any((run / "checkpoints").glob("*.partial")):
        pass
    if process.poll() is not None:
        return False
    process.kill()
    process.wait()
    return True


def _wait(process: subprocess.Popen, seconds: float) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


def check_kills(tmp_path: Path, expected: Path, steps: int, kills: int, seed: int, more: tuple[str, ...] = ()) -> None:
    run, draw = tmp_path / "run", random.Random(seed)
    words = (*WORDS, f"steps={steps}", f"base_output_directory={tmp_path}", *more)
    killed = 0
    while killed < kills:
        with subprocess.Popen(
            command("train", *words), env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            if killed_at_random(process, run, draw):
                killed += 1
            elif process.returncode:
                pytest.fail(process.stderr.read().decode())
            else:
                pytest.fail(f"the run was done after {killed} kills; it needs more steps")
    assert train(words) == 0
    assert curve(run) == curve(expected)
    assert lines(run / "load.jsonl") == lines(expected / "load.jsonl")
    weights = Path("model") / "model.safetensors"
    assert (run / weights).read_bytes() == (expected / weights).read_bytes()


@pytest.mark.slow
def test_an_uninterrupted_run_has_every_step_once(uninterrupted):
    steps = [line["step"] for line in curve(uninterrupted(SHORT)) if line["kind"] == "train"]
    assert steps == list(range(1, SHORT + 1))


@pytest.mark.slow
def test_a_run_killed_in_a_checkpoint_equals_the_uninterrupted_one_bit_for_bit(tmp_path, uninterrupted):
    """The first kill that this seed draws is in a checkpoint."""
    check_kills(tmp_path, uninterrupted(SHORT), SHORT, kills=1, seed=0)


@pytest.mark.slow
def test_a_run_killed_twenty_times_equals_the_uninterrupted_one_bit_for_bit(tmp_path, uninterrupted):
    check_kills(tmp_path, uninterrupted(LONG), LONG, kills=20, seed=100)


@pytest.mark.slow
def test_a_run_on_token_files_killed_in_a_checkpoint_equals_the_uninterrupted_one(tmp_path, uninterrupted):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"Text {number} goes on for a while.\n" * (number + 1))
    assert tokenize_((str(tmp_path), str(tmp_path / "tokens")), held_out=0.2) == 0
    data = ("dataset_type=tokens", f"dataset_path={tmp_path / 'tokens'}")
    check_kills(tmp_path, uninterrupted(SHORT, *data), SHORT, kills=1, seed=0, more=data)
