"""A run whose folder is in an object store: that on a disk, bit for bit, whatever happens to the server meanwhile."""

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.cli.convert import export
from raggedmoe.cli.generate import generate
from raggedmoe.cli.report import report
from raggedmoe.cli.train import train
from raggedmoe.launch import stop_signals
from raggedmoe.storage import lease as leases
from raggedmoe.storage.lease import Lease
from raggedmoe.storage.trees import download, list_files, remove, upload
from raggedmoe.train.data.tokenizer import byte_tokenizer_json
from raggedmoe.train.loop import loop
from raggedmoe.train.settings.words import read_words
from tests.train.runs import TINY, curve, disturb, lines, share_programs

pytestmark = pytest.mark.usefixtures("shared_programs")
FILES = Path(asyncio.__file__).parent
TEXT = ("dataset_type=text", f"dataset_path={FILES}", "dataset_suffixes=.py")
WORDS = (*TINY, *TEXT, "steps=12", "checkpoint_period=4", "eval_interval=5", "eval_steps=2", "load_period=5")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """A signal is never followed by others that were sent with it."""
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run the words on a disk, where nothing disturbs them."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        assert train((*WORDS, f"base_output_directory={folder}", "run_name=run")) == 0
    return folder / "run"


@pytest.fixture
def run(bucket):
    """Trains into a folder of the bucket; with other settings as needed."""
    return lambda *words: train(with_words(f"base_output_directory={bucket / 'runs'}", "run_name=run", *words))


def with_words(*words):
    """The words, with those that are given in place of those that set the same."""
    return (WORDS[0], *{word.partition("=")[0]: word for word in (*WORDS[1:], *words)}.values())


def check_is(folder, whole):
    """The run has the curve, the loads and the model of the undisturbed one, bit for bit."""
    assert curve(folder) == curve(whole)
    assert lines(folder / "load.jsonl") == lines(whole / "load.jsonl")
    params, expected = (interop.load(place / "model").params for place in (folder, whole))
    assert params.keys() == expected.keys()
    for name, param in params.items():
        np.testing.assert_array_equal(np.asarray(param), np.asarray(expected[name]))


def test_a_run_is_that_on_a_disk_and_touches_none(run, bucket, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run() == 0
    folder = bucket / "runs/run"
    check_is(folder, whole)
    assert list(tmp_path.iterdir()) == []
    names = {name.partition("/")[0] for name in list_files(folder)}
    assert names == {path.name for path in whole.iterdir()} - {".lock"}
    out = capsys.readouterr().out
    assert f"the model is in {folder / 'model'}" in out
    assert report((str(folder),)) == 0
    assert report((str(folder),), out="page.html") == 0
    page = Path("page.html").read_bytes()
    assert (folder / "report.html").read_bytes() == page
    assert b"Held-out loss" in page
    with pytest.raises(ValueError, match="expected a page on this machine to open"):
        report((str(folder),), open=True)
    capsys.readouterr()
    assert generate(str(folder / "model"), "def ", max_new_tokens=8) == 0
    printed = capsys.readouterr().out
    assert generate(str(whole / "model"), "def ", max_new_tokens=8) == 0
    assert capsys.readouterr().out == printed
    assert export(str(folder / "model"), "exported") == 0
    assert Path("exported/config.json").is_file()
    with pytest.raises(ValueError, match="expected a folder of this machine"):
        export(str(folder / "model"), f"{bucket / 'out'}")


@pytest.mark.ci
def test_a_signal_saves_and_the_same_command_goes_on_exactly(run, bucket, whole, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        disturb(patch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run() == loop.INTERRUPTED
    assert "the same command goes on" in capsys.readouterr().err
    assert run() == 0
    assert f"resumed after step 7 from {bucket / 'runs/run/checkpoints/step_00000007'}" in capsys.readouterr().out
    check_is(bucket / "runs/run", whole)


@pytest.mark.parametrize("kind", [pytest.param("refuse", marks=pytest.mark.ci), "mute"])
def test_cut_off_in_a_checkpoint_its_commit_and_the_model_it_goes_on_exactly(
    object_server, run, bucket, whole, monkeypatch, kind
):
    """As if the process had died there; `tests/train/test_object_kill.py` kills real ones."""
    folder = bucket / "runs/run"
    monkeypatch.setenv("RAGGEDMOE_STORAGE_SECONDS", "0")
    for where in ("step_00000004/state-", r"step_00000008/manifest\.json", r"run/model/model-", "index"):
        with (
            object_server.fault("PUT|POST", where, kind) as fault,
            object_server.fault("PUT|POST|DELETE", "", "refuse", after=fault),
        ):
            assert run() == loop.CANNOT_WRITE
        assert fault.seen
        remove(folder / ".lock")  # which a killed process leaves behind: the next sees that it is gone
    assert run() == 0
    check_is(folder, whole)
    assert len([name for name in list_files(folder / "model") if name.endswith(".safetensors")]) == 1


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(run, bucket, whole, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        disturb(patch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run("keep_last=3", "checkpoint_period=3") == loop.INTERRUPTED
    checkpoints = bucket / "runs/run/checkpoints"
    manifest = checkpoints / "step_00000009/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    [flipped, *_] = [name for name in list_files(checkpoints / "step_00000006") if "state-" in name]
    content = bytearray((checkpoints / "step_00000006" / flipped).read_bytes())
    content[0] ^= 1
    (checkpoints / "step_00000006" / flipped).write_bytes(bytes(content))
    assert run() == 0
    warnings = [record.message for record in caplog.records]
    assert re.search(r"step_00000009 is damaged; it stays there but is not used: manifest\.json is no", warnings[0])
    assert re.search(rf"step_00000006 is damaged; .*{flipped} does not match its checksum", warnings[1])
    check_is(bucket / "runs/run", whole)


def test_a_server_that_is_away_for_a_while_is_waited_for(object_server, run, bucket, whole, monkeypatch):
    back = []
    with monkeypatch.context() as patch:
        disturb(patch, 6, lambda: back.append(object_server.away_for(1.0)))
        assert run() == 0
    back[0].join()
    check_is(bucket / "runs/run", whole)


def test_a_server_that_stays_away_ends_the_run_with_its_own_code_and_nothing_is_lost(
    object_server, run, bucket, whole, monkeypatch, capsys
):
    def leave():
        while not (bucket / "runs/run/checkpoints/step_00000004/manifest.json").is_file():
            time.sleep(0.01)
        object_server.stop()

    with monkeypatch.context() as patch:
        patch.setenv("RAGGEDMOE_STORAGE_SECONDS", "1")
        disturb(patch, 6, leave)
        assert run() == loop.CANNOT_WRITE
    object_server.come_back()
    assert "the same command goes on" in capsys.readouterr().err
    remove(bucket / "runs/run/.lock")  # this process lives on
    assert run() == 0
    assert "resumed after step 4" in capsys.readouterr().out
    check_is(bucket / "runs/run", whole)


def test_two_runs_are_never_in_one_folder(run, bucket):
    lease = Lease(bucket / "runs/run")
    with pytest.raises(BlockingIOError, match="trains into it; wait for it, or use another run_name"):
        run()
    lease.release()
    assert list_files(bucket / "runs/run") == {}


def test_a_run_that_lost_its_folder_ends_and_writes_nothing_more(run, bucket, monkeypatch, capsys):
    """It was stopped for longer than the lease, and another run has the folder now."""
    folder, before = bucket / "runs/run", []

    def wake_up():
        while not (folder / "checkpoints/step_00000004/manifest.json").is_file():  # of a save in the background
            time.sleep(0.01)
        remove(folder / "checkpoints")  # and whatever else that one does
        (folder / ".lock").write_bytes(b"{}")
        leases._leases[folder]._valid_until = leases._clock()
        before.append(list_files(folder))

    with monkeypatch.context() as patch:
        disturb(patch, 6, wake_up)
        assert run() == loop.CANNOT_WRITE
    assert "another run has taken the folder" in capsys.readouterr().err
    assert [list_files(folder)] == before


@pytest.mark.ci
def test_results_that_a_run_does_not_go_on_from_are_set_aside(run, bucket, capsys):
    folder = bucket / "runs/run"
    assert run() == 0
    before = {name: size for name, size in list_files(folder).items() if not name.startswith("checkpoints/")}
    remove(folder / "checkpoints")
    assert run("steps=4") == 0
    assert f"the results of an earlier run are now in {folder / 'earlier-1'}" in capsys.readouterr().out
    assert list_files(folder / "earlier-1") == before


@pytest.mark.ci
def test_texts_a_tokenizer_and_parameters_are_read_from_the_store(run, bucket, whole, tmp_path):
    """And a run that was copied there goes on there."""
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    upload(tmp_path, bucket / "words")
    upload(FILES, bucket / "texts")
    upload(whole, bucket / "copied/run")
    assert train(with_words(f"base_output_directory={bucket / 'copied'}", "run_name=run", "steps=14")) == 0
    download(bucket / "copied/run", tmp_path / "back")
    steps = [line["step"] for line in curve(tmp_path / "back") if line["kind"] == "train"]
    assert steps == list(range(1, 15))
    model, tokenizer = bucket / "copied/run/model", bucket / "words/tokenizer.json"
    texts = f"dataset_path={bucket / 'texts'}"
    begun = (f"load_parameters_path={model}", f"tokenizer_path={tokenizer}", f"base_output_directory={tmp_path}")
    assert train(with_words(texts, *begun, "run_name=begun", "steps=1")) == 0
    assert curve(tmp_path / "begun")[0]["loss"] < curve(whole)[0]["loss"]
    branch = (f"init_from={bucket / 'copied/run'}@12", f"base_output_directory={bucket / 'copied'}", "run_name=branch")
    assert train(with_words(*branch, "steps=13")) == 0
    assert generate(f"{bucket / 'copied/branch'}@13", "def ", max_new_tokens=1) == 0
    assert report((str(bucket / "copied/run"), str(bucket / "copied/branch"))) == 0
    assert (bucket / "copied/run/comparison.html").is_file()


@pytest.mark.ci
def test_a_branch_begins_with_a_checkpoint_in_the_store(run, bucket, whole, tmp_path, capsys):
    assert run() == 0
    parent = f"{bucket / 'runs/run'}@8"
    words = (f"init_from={parent}", "init_state=all", f"base_output_directory={tmp_path}", "run_name=branch")
    assert train(with_words(*words)) == 0
    after = [line for line in curve(whole) if line["step"] > 8]
    assert [line for line in curve(tmp_path / "branch") if line["step"] > 8] == after
    capsys.readouterr()
    assert generate(parent, "def ", max_new_tokens=2) == 0
    from_the_store = capsys.readouterr().out
    assert generate(f"{whole}@8", "def ", max_new_tokens=2) == 0
    assert capsys.readouterr().out == from_the_store
    assert report((parent, str(tmp_path / "branch")), out=str(tmp_path / "both.html")) == 0


def test_a_file_of_settings_can_lie_in_the_store(bucket):
    values = {"settings": {"model_name": "olmoe-tiny", "steps": 7}}
    (bucket / "runs/run/run.json").write_bytes(json.dumps(values).encode())
    (bucket / "base.toml").write_bytes(b"[run]\nsteps = 5\nstep_count = 3\n")
    (bucket / "theirs.yml").write_bytes(b"base_config: deeper/more.yml\nsteps: 9\n")
    (bucket / "deeper/more.yml").write_bytes(b"learning_rate: 0.25\n")
    config = read_words([f"{bucket}/runs/run/run.json", f"init_from={bucket}/runs/run@8"])
    assert (config.model, config.run.steps) == ("olmoe-tiny", 7)
    theirs = read_words([f"{bucket}/theirs.yml"])
    assert (theirs.run.steps, theirs.optimizer.learning_rate) == (9, 0.25)
    with pytest.raises(ValueError, match=r"unknown setting 'step_count' \(base.toml\)"):
        read_words([f"{bucket}/base.toml"])
    with pytest.raises(ValueError, match=f"{bucket / 'nothing.json'}: expected a file of settings, found none"):
        read_words([f"{bucket}/nothing.json"])


@pytest.mark.parametrize("name", ["base_output_directory", "load_parameters_path", "dataset_path", "tokenizer_path"])
def test_another_kind_of_place_is_refused_with_the_setting_and_the_reason(name):
    with pytest.raises(ValueError, match=f"{name}: gs://bucket/x: expected s3://.*generation-match"):
        train(with_words(f"{name}=gs://bucket/x"))
