"""A launched run whose process is killed goes on, on one process and another mesh, as if nothing had happened."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest

from tests.train.runs import TINY, command, curve, environment, lines, train

# Eight sequences a step, on four devices, on two, and on one.
WORDS = (*TINY[:-1], "checkpoint_period=5", "eval_steps=2", "tensorboard=false", "warmup_steps=0", "schedule=constant")
ON_FOUR = ("per_device_batch_size=2", "expert_parallelism=2", "data_parallelism=2")
ON_TWO = ("per_device_batch_size=4", "expert_parallelism=2")
ON_ONE = ("per_device_batch_size=8", "run_name=alone")


def children(process: subprocess.Popen) -> list[int]:
    """In the order in which they were started."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    return sorted(int(line) for line in listed.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_a_run_of_two_processes_of_which_one_is_killed_goes_on_on_one_with_another_mesh(tmp_path, request, kind):
    place = tmp_path if kind == "disk" else request.getfixturevalue("bucket") / "runs"
    cache, folder, run = tmp_path / "cache", f"base_output_directory={place}", place / "deepseek-v3-tiny"
    with subprocess.Popen(
        command("launch", "--processes", "2", "--", "train", *WORDS, *ON_FOUR, folder, "steps=1000"),
        env=environment(cache),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (run / "checkpoints" / "step_00000005" / "manifest.json").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        os.kill(children(process)[1], signal.SIGKILL)
        assert process.wait(60) == 128 + signal.SIGKILL
        assert "raggedmoe: process 1 of 2 was ended by SIGKILL" in process.stderr.read()
    resumed = train(cache, *WORDS, *ON_TWO, folder, "steps=15")
    assert resumed.returncode == 0, resumed.stderr
    assert [line["what"] for line in lines(run / "metrics.jsonl") if line["kind"] == "event"].count("resumed") == 1
    alone = train(cache, *WORDS, *ON_ONE, folder, "steps=15")
    assert alone.returncode == 0, alone.stderr
    ours, theirs = (
        [line["loss"] for line in curve(each) if line["kind"] == "train"] for each in (run, place / "alone")
    )
    assert len(ours) == 15
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
