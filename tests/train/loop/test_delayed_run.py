"""A run whose experts' scales are delayed: it goes on where it stopped, and what it leaves has no histories."""

import asyncio
import json
import os
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.cli.train import train
from raggedmoe.launch import stop_signals
from raggedmoe.train.loop import loop
from raggedmoe.train.loop.saved_run import find_model
from tests.train.runs import TINY, curve, disturb, lines

pytestmark = pytest.mark.usefixtures("shared_programs")
TEXT = ("dataset_type=text", f"dataset_path={Path(asyncio.__file__).parent}", "dataset_suffixes=.py")
EIGHT_BITS = ("quantization=fp8", "grouped_matmul=xla")
OTHERS = (*TINY, *TEXT, *EIGHT_BITS, "eval_interval=3", "eval_steps=1", "checkpoint_period=6")
WORDS = (*OTHERS, "steps=6", "quantization_history=2")


@pytest.mark.ci
def test_it_stops_and_goes_on_exactly_and_its_model_has_no_histories(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0.0)
    place = f"base_output_directory={tmp_path}"
    assert train((*WORDS, place, "run_name=whole")) == 0
    with monkeypatch.context() as patch:
        disturb(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train((*WORDS, place, "run_name=halves")) == loop.INTERRUPTED
    (saved,) = (tmp_path / "halves" / "checkpoints").iterdir()
    leaves = json.loads((saved / "manifest.json").read_text())["leaves"]
    histories = {name: leaf["shape"] for name, leaf in leaves.items() if name.startswith("amax_history/")}
    assert len(histories) == 8
    assert {shape[-1] for shape in histories.values()} == {2}
    assert np.isfinite(np.asarray(find_model(tmp_path / "halves").load()(jnp.asarray([[1, 2, 3]])))).all()
    assert train((*WORDS, place, "run_name=halves")) == 0
    assert curve(tmp_path / "halves") == curve(tmp_path / "whole")
    model = interop.load(tmp_path / "halves" / "model")
    assert not any("amax" in name for name in model.params)
    assert not model.amax_history
    # Histories of another length begin empty.
    assert train((*OTHERS, place, "run_name=whole", "steps=8", "quantization_history=3")) == 0
    events = lines(tmp_path / "whole" / "metrics.jsonl")
    assert [line["step"] for line in events if line.get("what") == "resumed"] == [6]
    assert "resumed after step 6" in capsys.readouterr().out
