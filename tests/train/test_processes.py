"""A run of several processes, and the same one resumed by another number of them."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raggedmoe import ModelExecution, interop
from tests.train.runs import TINY, curve, environment, lines, train

pytestmark = pytest.mark.slow
WORDS = (*TINY[:-1], "checkpoint_period=5", "eval_interval=5", "eval_steps=2", "warmup_steps=0", "schedule=constant")


def trained_by(num_processes, cache, *words):
    """Processes with two devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(__file__).with_name("one_of_processes.py"))
    started = [
        subprocess.Popen(
            [sys.executable, program, str(port), str(number), str(num_processes), "2", *words],
            env=environment(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(num_processes)
    ]
    said = [process.communicate(timeout=900) for process in started]
    assert [process.returncode for process in started] == [0] * num_processes, said
    return said


@pytest.mark.parametrize("degree", ["expert_parallelism=2", "dcn_data_parallelism=2"])
def test_two_processes_have_the_curve_of_one_and_their_run_goes_on_on_one(tmp_path, degree):
    """Split by experts over both processes; or each process a slice, over which the state is split."""
    cache, folder = tmp_path / "cache", f"base_output_directory={tmp_path}"
    split = (degree, "fsdp_parallelism=2", "per_device_batch_size=2", "gradient_accumulation_steps=2")
    (first, _), (second, _) = trained_by(2, cache, *WORDS, "steps=5", folder, "run_name=run", *split)
    assert "finished" in first
    assert "step" not in second, "only the first process talks"
    assert interop.load(tmp_path / "run" / "model").execution == ModelExecution()
    words = ("per_device_batch_size=8", "gradient_accumulation_steps=2", folder, "steps=10")
    for name in ("run", "single"):
        done = train(cache, *WORDS, *words, f"run_name={name}")
        assert done.returncode == 0, done.stderr
    for ours, theirs in zip(curve(tmp_path / "run"), curve(tmp_path / "single"), strict=True):
        assert [ours.get(name) for name in ("kind", "step", "tokens")] == [
            theirs.get(name) for name in ("kind", "step", "tokens")
        ]
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-4)
    events = [line["what"] for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "event"]
    assert events == ["checkpoint", "resumed", "checkpoint"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["devices"] == 1
