"""Runs that an earlier version left go on, and their checkpoints are read: `tests/saved/before_sections` has two.

They were written when all settings were one table of keys. ``one`` is on one device: DeepSeek-V3's kind of model with a
`wsd` schedule and micro-batches; ``mesh`` is OLMoE's kind on four. Each was killed when its checkpoint of step 2 was
whole, and ``*.jsonl`` is what that version wrote of the same run where it was not killed.
"""

import json
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.cli.train import run_training
from raggedmoe.train.loop.saved_run import find_model
from raggedmoe.train.report.build import write_report
from tests.moe.examples import assert_close
from tests.train.runs import lines

SAVED = Path(__file__).parents[2] / "saved" / "before_sections"
ONE_DEVICE = ("fsdp_parallelism=1", "expert_parallelism=1", "per_device_batch_size=8")


@pytest.fixture
def older(tmp_path):
    """Unpacks a run as it was left."""

    def unpack(name):
        with tarfile.open(SAVED / f"{name}.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
        return tmp_path / name

    return unpack


def losses(path, kind):
    return np.asarray([line["loss"] for line in lines(path) if line["kind"] == kind], np.float32)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "words"), [("one", ()), ("mesh", ()), ("mesh", ONE_DEVICE)], ids=["one", "mesh", "mesh on one"]
)
def test_it_goes_on_by_its_run_json_to_the_same_losses(older, name, words):
    folder = older(name)
    outcome = run_training((str(folder / "run.json"), f"base_output_directory={folder.parent}", *words))
    assert outcome.code == 0
    resumed = [line for line in lines(folder / "metrics.jsonl") if line.get("what") == "resumed"]
    assert [line["step"] for line in resumed] == [2]
    for kind in ("train", "eval"):
        assert_close(losses(folder / "metrics.jsonl", kind), losses(SAVED / f"{name}.jsonl", kind))


@pytest.mark.parametrize("name", ["one", "mesh"])
def test_its_checkpoint_is_a_model_and_its_record_a_report(older, name):
    folder = older(name)
    settings = json.loads((folder / "run.json").read_text())["settings"]
    model = find_model(f"{folder}@2").load()
    assert (model.config.model_dim, model.config.moe.num_experts) == (settings["base_emb_dim"], settings["num_experts"])
    assert np.isfinite(np.asarray(model(jnp.asarray([[1, 2, 3]])))).all()
    assert write_report(folder).is_file()


@pytest.mark.ci
def test_a_run_can_begin_with_its_whole_state(older, tmp_path):
    folder = older("one")
    words = (str(folder / "run.json"), f"init_from={folder}@2", "init_state=all")
    outcome = run_training((*words, f"base_output_directory={tmp_path}", "run_name=branch"))
    assert outcome.code == 0
    assert_close(losses(outcome.folder / "metrics.jsonl", "train"), losses(SAVED / "one.jsonl", "train")[2:])
