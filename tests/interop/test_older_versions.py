"""What earlier versions saved still loads: `tests/saved` holds it as they wrote it, with what they computed from it."""

import json
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import ModelExecution, interop
from raggedmoe.cli.main import main
from tests.moe.examples import assert_close

# The configuration held how a model runs too: all_to_all, chunks, a buffer factor and a split of the width.
BEFORE_EXECUTION = Path(__file__).parent.parent / "saved" / "before_execution"


def expected(name):
    with np.load(BEFORE_EXECUTION / "expected.npz") as arrays:
        return arrays[name]


def test_a_model_folder_that_says_how_the_model_ran_loads_without_that():
    kept = json.loads((BEFORE_EXECUTION / "model" / "raggedmoe.json").read_text())["config"]["moe"]
    assert kept.keys() >= {"strategy", "ragged_buffer_factor", "token_chunks", "tensor_split"}
    model = interop.load(BEFORE_EXECUTION / "model")
    assert model.execution == ModelExecution()
    assert_close(model(jnp.asarray(expected("ids"))), expected("logits"))


def test_a_run_goes_on_from_its_checkpoint_and_with_the_older_word_for_its_backend(tmp_path, monkeypatch):
    with tarfile.open(BEFORE_EXECUTION / "run.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["moe_backend"] == "jax"
    changes = {name: value for name, value in settings.items() if value is not None and name in TYPED}
    words = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in changes.items()]
    words += ["remat=full", "steps=4", f"base_output_directory={tmp_path}", "run_name=run"]
    monkeypatch.setattr("sys.argv", ["raggedmoe", "train", *words])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert_close(np.asarray(losses, np.float32), expected("losses"))


TYPED = (
    "model_name",
    "dataset_type",
    "base_emb_dim",
    "base_moe_mlp_dim",
    "num_layers",
    "vocab_size",
    "num_experts",
    "max_target_length",
    "per_device_batch_size",
    "schedule_steps",
    "moe_backend",
    "scan_layers",
    "held_out",
    "tensorboard",
)
