"""What a run begins with: a checkpoint of another run with its weights or all of its state, and what a resume says."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.cli.convert import export
from raggedmoe.cli.generate import generate
from raggedmoe.cli.report import report
from raggedmoe.cli.train import run_training
from raggedmoe.hardware import HARDWARE
from raggedmoe.train.loop import loop
from raggedmoe.train.loop.saved_run import SavedRun, find_model, find_run
from raggedmoe.train.loop.start import schedule_change
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.sections import RunConfig
from raggedmoe.train.settings.words import read_words
from tests.train.loop.test_loop import WORDS
from tests.train.report.parsed_page import Page
from tests.train.runs import curve, lines, share_programs

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run of 12 steps with checkpoints of steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("parent")
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        assert run_training((*WORDS, "keep_last=3", f"base_output_directory={folder}", "run_name=run")).code == 0
    return folder / "run"


@pytest.fixture
def branch(tmp_path):
    """Trains a branch into a folder of the test's own, and returns its folder."""

    def start(*words):
        changed = {word.split("=")[0] for word in words}
        usual = (*WORDS, f"base_output_directory={tmp_path}", "run_name=branch")
        kept = [word for word in usual if word.split("=")[0] not in changed]
        outcome = run_training((*kept, *words))
        assert outcome.code == 0, outcome.text
        return outcome.folder

    return start


@pytest.fixture(scope="module")
def half(parent, tmp_path_factory):
    """A branch of the run's step 8 with half the learning rate, on two devices."""
    folder = tmp_path_factory.mktemp("half")
    words = [word for word in WORDS if not word.startswith("per_device_batch_size=")]
    changes = ("learning_rate=1.5e-3", "fsdp_parallelism=2", "per_device_batch_size=1", "mu_dtype=bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        place = (f"base_output_directory={folder}", "run_name=half", f"init_from={parent}@8", "init_state=all")
        assert run_training((*words, *place, *changes)).code == 0
    return folder / "half"


@pytest.fixture
def stopped(branch, monkeypatch):
    """The message with which a branch is refused, before it is compiled."""
    monkeypatch.setattr(loop, "compile_programs", lambda *args, **options: pytest.fail("it was compiled"))

    def start(*words):
        with pytest.raises(ValueError) as refused:
            branch(*words)
        return str(refused.value)

    return start


def values(folder, name, kind="train"):
    return {line["step"]: line[name] for line in lines(folder / "metrics.jsonl") if line["kind"] == kind}


def test_with_all_of_its_state_and_the_same_settings_a_branch_is_the_run_itself(parent, branch, capsys):
    folder = branch(f"init_from={parent}@4", "init_state=all")
    assert f"begins with the whole state of step 4 of {parent}" in capsys.readouterr().out
    after = [line for line in curve(parent) if line["step"] > 4]
    begun = [line for line in curve(folder) if line["step"] > 4]
    assert begun == after
    assert next(line["step"] for line in curve(folder)) == 4  # its held-out loss, which the parent did not take there
    described = json.loads((folder / "run.json").read_text())
    assert described["parent"] == {"run": str(parent), "step": 4, "state": "all"}
    events = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "event"]
    assert (events[0]["step"], events[0]["what"]) == (4, "branched")


def test_with_the_weights_alone_a_branch_begins_at_step_0(parent, branch, capsys):
    folder = branch(f"init_from={parent / 'checkpoints' / 'step_00000012'}")
    assert "optimizer, schedule and data begin anew" in capsys.readouterr().out
    assert values(folder, "loss", "eval")[0] == values(parent, "loss", "eval")[12]
    # The schedule begins anew; to a tenth of the peak, as what is loaded has been learned already.
    tenths = [rate / 10 for rate in values(parent, "learning_rate").values()]
    np.testing.assert_allclose(list(values(folder, "learning_rate").values()), tenths, rtol=1e-6)
    assert values(folder, "targets") == values(parent, "targets")
    assert values(folder, "loss")[1] < values(parent, "loss")[1]


@pytest.mark.ci
def test_a_branch_that_was_stopped_goes_on_without_its_parent(parent, branch, tmp_path, capsys):
    copied = shutil.copytree(parent, tmp_path / "copied")
    words = (f"init_from={copied}@4", "init_state=all")
    folder = branch(*words)
    before = curve(folder)
    shutil.rmtree(copied)
    shutil.rmtree(folder / "checkpoints" / "step_00000012")
    branch(*words)
    assert "resumed after step 8" in capsys.readouterr().out
    assert curve(folder) == before
    assert json.loads((folder / "run.json").read_text())["parent"]["step"] == 4


@pytest.mark.ci
def test_a_branch_has_a_learning_rate_a_mesh_and_moments_of_its_own(parent, half):
    folder = half
    halves = {step: rate / 2 for step, rate in values(parent, "learning_rate").items() if step > 8}
    np.testing.assert_allclose(list(values(folder, "learning_rate").values()), list(halves.values()), rtol=1e-6)
    assert values(folder, "loss").keys() == halves.keys()
    # The first step has the parent's parameters and rows.
    np.testing.assert_allclose(values(folder, "loss")[9], values(parent, "loss")[9], rtol=1e-5)
    assert values(folder, "loss")[12] != values(parent, "loss")[12]


@pytest.mark.ci
def test_a_run_and_its_branch_are_compared_on_one_page(parent, half, tmp_path):
    assert report((str(parent), str(half)), out=str(tmp_path / "both.html")) == 0
    page = Page(tmp_path / "both.html")
    results = {row[0]: row[1:] for row in page.tables["results"]}
    assert results["Begins with"] == ["new parameters", f"all of step 8 of {parent}"]
    losses = [values(folder, "loss", "eval")[12] for folder in (parent, half)]
    assert results["Held-out loss"] == [f"{loss:.3f}" for loss in losses]
    differences = {row[0]: row[1:] for row in page.tables["differences"]}
    assert differences["learning_rate"] == ["0.003", "0.0015"]
    assert differences["fsdp_parallelism"] == ["1", "2"]
    assert "Learning rate" in page.headings
    assert page.source.count(">branched<") >= 4  # in the legend of each picture of the losses


@pytest.mark.ci
def test_with_other_data_a_branch_goes_on_in_its_schedule_and_begins_with_their_first_row(parent, branch, capsys):
    folder = branch(f"init_from={parent}@8", "init_state=all", "data_seed=1")
    assert "begin at the first row, as they or the batch are others" in capsys.readouterr().out
    assert values(folder, "learning_rate")[9] == values(parent, "learning_rate")[9]


def test_a_run_is_found_by_its_folder_and_by_its_checkpoints(parent, tmp_path):
    assert find_run(parent) == SavedRun(folder=parent)
    assert find_run(f"{parent}@8") == find_run(f"{parent}/checkpoints/step_00000008") == SavedRun(folder=parent, step=8)
    assert find_run(parent / "model") is None
    assert find_run(tmp_path / "nothing") is None
    named = shutil.copytree(parent, tmp_path / "run@8")
    assert find_run(named) == SavedRun(folder=named)
    assert find_run(f"{named}@4") == SavedRun(folder=named, step=4)
    with pytest.raises(ValueError, match=r"expected the folder of a run .*, found no run at .*nothing"):
        find_run(f"{tmp_path}/nothing@8")


def test_what_is_no_checkpoint_of_another_run_is_refused(parent, stopped, tmp_path):
    assert "load_parameters_path takes a model's folder" in stopped(f"init_from={parent / 'model'}")
    assert "found those of steps 4, 8, 12" in stopped(f"init_from={parent}@5")
    assert "steps=12: expected more than the 12" in stopped(f"init_from={parent}", "init_state=all")
    assert "use another run_name" in stopped(
        f"init_from={parent}@4", f"base_output_directory={parent.parent}", "run_name=run", "enable_checkpointing=false"
    )
    other = stopped(f"init_from={parent}@4", "num_layers=1")
    assert "stacks.1.0.attention.wo: expected nothing, found" in other
    assert f"`raggedmoe train {parent / 'run.json'} init_from={parent}@4 run_name=…` takes the settings" in other
    damaged = shutil.copytree(parent, tmp_path / "damaged")
    file = next((damaged / "checkpoints" / "step_00000008" / "state" / "d").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert "step_00000008 is damaged" in stopped(f"init_from={damaged}@8")


def test_the_parameters_of_a_checkpoint_are_a_model(parent, tmp_path, capsys):
    trained, last = interop.load(parent / "model"), find_model(f"{parent}@12")
    model = last.load()
    assert model.config == trained.config
    for name, value in trained.params.items():
        np.testing.assert_array_equal(model.params[name], value, err_msg=name)
    assert generate(f"{parent}@12", "def ", max_new_tokens=3) == 0
    from_checkpoint = capsys.readouterr().out
    assert generate(str(parent), "def ", max_new_tokens=3) == 0
    assert capsys.readouterr().out == from_checkpoint
    assert export(f"{parent}@12", tmp_path / "exported") == 0
    exported = interop.load(tmp_path / "exported")
    assert jax.tree.all(jax.tree.map(np.array_equal, dict(exported.params), dict(trained.params)))
    assert (tmp_path / "exported" / "tokenizer.json").is_file()


def test_without_a_trained_model_that_of_the_newest_checkpoint_is_taken(parent, tmp_path):
    folder = shutil.copytree(parent, tmp_path / "run", ignore=shutil.ignore_patterns("model", "step_00000012"))
    assert find_model(folder).run == SavedRun(folder=folder)
    newest, named = find_model(folder).load(), find_model(f"{folder}@8").load()
    for name, value in named.params.items():
        np.testing.assert_array_equal(newest.params[name], value, err_msg=name)


def cosine(step, steps, peak=3e-3, final=0.1):
    """The learning rate of a step, counted from 0, without a warm-up."""
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * step / (steps - 1))) / 2)


def test_another_number_of_steps_says_what_it_does_to_the_schedule():
    def said(*words, before=20, step=10, skipped=0):
        config = resolve(read_words(["olmoe-tiny", "warmup_steps=0", *words]), HARDWARE["cpu"])
        return schedule_change(config, TrainConfig(run=RunConfig(steps=before)), step, skipped)

    assert said("steps=20") is None
    expected = f"of step 11 is {cosine(10, 40):.3g}, not {cosine(10, 20):.3g}"
    assert said("steps=40") == f"steps=40, before 20: the cosine schedule now spans 40; the learning rate {expected}"
    assert f"of step 11 is {cosine(7, 40):.3g}, not {cosine(7, 20):.3g}" in said("steps=40", skipped=3)
    assert "of step 21 is" in said("steps=40", step=20)
    assert ", not 0" in said("steps=40", step=20)
    assert "the schedule spans schedule_steps=20, as before" in said("steps=40", "schedule_steps=20")
    assert "of step 11 stays 0.003" in said("steps=40", "schedule=constant")


@pytest.mark.ci
def test_a_run_that_is_made_longer_says_so_where_it_goes_on(parent, tmp_path, capsys):
    shutil.copytree(parent, tmp_path / "run")
    words = [word for word in WORDS if not word.startswith("steps=")]
    settings = (*words, "steps=16", "keep_last=3", f"base_output_directory={tmp_path}", "run_name=run")
    assert run_training(settings).code == 0
    assert "steps=16, before 12: the cosine schedule now spans 16" in capsys.readouterr().out
    events = [line["text"] for line in lines(tmp_path / "run" / "metrics.jsonl") if line.get("what") == "resumed"]
    assert len(events) == 1
    assert "now spans 16" in events[0]


def test_two_things_to_begin_with_contradict_each_other():
    with pytest.raises(ValueError, match="init_from=a and load_parameters_path=b contradict each other"):
        read_words(["init_from=a", "load_parameters_path=b"])
    note = "init_state=all: changes nothing: it belongs to init_from"
    assert note in resolve(read_words(["init_state=all"]), HARDWARE["cpu"]).notes
