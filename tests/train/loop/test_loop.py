"""The run as a whole: begin, stop, go on, end."""

import asyncio
import dataclasses
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.cli.train import train
from raggedmoe.launch import stop_signals
from raggedmoe.models.generate import generate
from raggedmoe.train.loop import loop
from raggedmoe.train.loop.run import Run
from raggedmoe.train.loop.run_folder import lock_folder
from raggedmoe.train.report.build import write_report
from tests.train.runs import TINY, curve, disturb, lines, share_programs

pytestmark = pytest.mark.usefixtures("shared_programs")
STEPS = 12
# A few files: all of the standard library, which a run reads unless told otherwise, take it half a second.
TEXT = ("dataset_type=text", f"dataset_path={Path(asyncio.__file__).parent}", "dataset_suffixes=.py")
WORDS = (*TINY, *TEXT, f"steps={STEPS}", "checkpoint_period=4", "eval_interval=5", "eval_steps=2", "load_period=5")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """A signal is never followed by others that were sent with it, unless a test says so."""
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0.0)


@pytest.fixture
def run(tmp_path):
    """Trains into a folder of the test's own; more words as needed."""

    def start(*words, name="run"):
        return train((*WORDS, f"base_output_directory={tmp_path}", f"run_name={name}", *words))

    return start


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        assert train((*WORDS, f"base_output_directory={folder}", "run_name=run")) == 0
    return folder / "run"


def test_a_run_leaves_its_curve_description_and_model(whole):
    train_lines = [line for line in curve(whole) if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == list(range(1, STEPS + 1))
    held_out = [line for line in curve(whole) if line["kind"] == "eval"]
    assert [line["step"] for line in held_out] == [0, 5, 10, 12]
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    described = json.loads((whole / "run.json").read_text())
    operations = {kernel["operation"] for kernel in described["kernels"]}
    assert operations >= {"ragged_gather", "attention"}
    assert operations & {"grouped_matmul", "expert_ffn"}  # the second where the native kernels are built
    assert described["settings"]["steps"] == STEPS
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step_00000008", "step_00000012"]
    events = [line for line in lines(whole / "metrics.jsonl") if line["kind"] == "event"]
    assert [line["step"] for line in events if line["what"] == "checkpoint"] == [4, 8, 12]


def test_the_loads_add_up_to_every_routed_slot(whole):
    described = json.loads((whole / "run.json").read_text())["model"]
    assert [line["step"] for line in lines(whole / "load.jsonl")] == [5, 10, 12]
    total = np.sum([line["load"] for line in lines(whole / "load.jsonl")], axis=0)
    slots = STEPS * 2 * 16 * described["experts_per_token"]
    assert total.shape == (len(described["moe_layers"]), described["num_experts"])
    assert total.sum(1).tolist() == [slots] * len(described["moe_layers"])


def test_the_model_that_is_left_generates_and_has_its_tokenizer(whole):
    model = interop.load(whole / "model")
    text = next(generate(model, [[100, 101, 102]], max_new_tokens=1))
    assert 0 <= text[0] < 256
    assert (whole / "model" / "tokenizer.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_same_command_goes_on_exactly(run, tmp_path, whole, monkeypatch, capsys, number):
    with monkeypatch.context() as patch:
        disturb(patch, 6, lambda: os.kill(os.getpid(), number))
        assert run() == loop.INTERRUPTED
    said = capsys.readouterr()
    assert f"{number.name}: saved after step 7" in said.err
    assert (tmp_path / "run" / "checkpoints" / "step_00000007").is_dir()
    assert run() == 0
    said = capsys.readouterr().out
    assert "resumed after step 7" in said
    assert re.search(r"^dead experts: \d+ of 16 .*; dropped slots: 0$", said, re.MULTILINE)
    assert curve(tmp_path / "run") == curve(whole)
    assert lines(tmp_path / "run" / "load.jsonl") == lines(whole / "load.jsonl")


@pytest.mark.ci
def test_thirty_signals_in_a_second_save_once(run, tmp_path, monkeypatch, capsys):
    def send():
        for _ in range(30):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1 / 30)

    strays, sender = [], threading.Thread(target=send)
    before = signal.signal(signal.SIGTERM, lambda *_: strays.append(0))
    disturb(monkeypatch, 6, sender.start)
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 2.0)
    try:
        assert run() == loop.INTERRUPTED
        assert strays == []
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)
    assert "SIGTERM: saved after step" in capsys.readouterr().err
    assert not list((tmp_path / "run" / "checkpoints").glob("*.partial"))


def test_a_later_signal_stops_at_once(run, monkeypatch):
    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    disturb(monkeypatch, 6, twice)  # with no time between them
    with pytest.raises(KeyboardInterrupt):
        run()


def test_a_signal_without_checkpoints_says_that_all_is_lost(run, monkeypatch, capsys):
    disturb(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run("enable_checkpointing=false") == loop.INTERRUPTED
    assert "checkpoints are off, so it is lost" in capsys.readouterr().err


def poisoned(monkeypatch, first, last):
    """Steps between the two numbers see a parameter that is not a number."""
    compiled = loop.compile_programs

    def compile_programs(*args, **options):
        programs = compiled(*args, **options)

        def step(state, batch):
            number = int(state.step) + 1
            if not first <= number <= last:
                return programs.step(state, batch)
            good = state.params["final_norm"]
            bad = {**state.params, "final_norm": jnp.full_like(good, jnp.nan)}
            kept = jnp.copy(good)
            state, report = programs.step(dataclasses.replace(state, params=bad), batch)
            return dataclasses.replace(state, params={**state.params, "final_norm": kept}), report

        return dataclasses.replace(programs, step=step)

    monkeypatch.setattr(loop, "compile_programs", compile_programs)


def test_steps_that_are_not_finite_are_skipped_counted_and_gone_on_from(run, tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, 6, 7)
    assert run() == 0
    found = {line["step"]: line for line in curve(tmp_path / "run") if line["kind"] == "train"}
    assert [step for step, line in found.items() if line["skipped"]] == [6, 7]
    assert found[6]["loss"] is None
    assert np.isfinite(found[8]["loss"])
    assert found[8]["learning_rate"] == found[6]["learning_rate"], "a skipped step does not move the schedule"
    assert "step 6 skipped" in capsys.readouterr().out


def test_too_many_in_a_row_stop_the_run_and_name_the_last_good_checkpoint(run, tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, 6, 99)
    assert run("max_skipped_steps=3") == loop.NOT_FINITE
    said = capsys.readouterr().err
    assert "stopped after step 8: 3 steps in a row had a loss or gradient that is not finite" in said
    assert f"the last good checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step_00000004'}." in said
    assert not (tmp_path / "run" / "checkpoints" / "step_00000008").exists(), (
        "what fails is not saved over what does not"
    )


def test_too_many_in_a_row_before_the_first_checkpoint_say_so(run, monkeypatch, capsys):
    poisoned(monkeypatch, 1, 99)
    assert run("max_skipped_steps=1") == loop.NOT_FINITE
    assert "there is no checkpoint yet" in capsys.readouterr().err


def test_a_disk_that_cannot_be_written_to_ends_the_run_with_its_own_code(run, tmp_path, monkeypatch, capsys):
    plain = Run.save

    def save(run, state, step, metric):
        if step == 8:
            raise OSError(28, "No space left on device", "checkpoints")
        plain(run, state, step, metric)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", save)
        assert run() == loop.CANNOT_WRITE
    assert "No space left on device" in capsys.readouterr().err
    assert run() == 0
    assert "resumed after step 4" in capsys.readouterr().out


@pytest.mark.ci
def test_checkpoints_without_a_description_still_know_their_settings(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        disturb(patch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run() == loop.INTERRUPTED
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(ValueError, match="data_seed=0 is now 3"):
        run("data_seed=3")


def test_fewer_steps_than_were_done_are_refused(whole):
    words = [word for word in WORDS if not word.startswith("steps=")]
    with pytest.raises(ValueError, match="steps=3 is less than the 12"):
        train((*words, "steps=3", f"base_output_directory={whole.parent}", "run_name=run"))


@pytest.mark.ci
def test_the_report_of_a_real_run_knows_its_checkpoints(whole):
    text = write_report(whole, whole.parent / "page.html").read_text()
    assert "3 checkpoints, the last at step 12." in text


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(run, tmp_path, whole, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        disturb(patch, 9, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run() == loop.INTERRUPTED
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000008", "step_00000010"]
    victim = max((path for path in (folder / "step_00000010").rglob("*") if path.is_file()), key=os.path.getsize)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    victim.write_bytes(content)
    assert run() == 0
    assert any("step_00000010 is damaged" in record.getMessage() for record in caplog.records)
    assert curve(tmp_path / "run") == curve(whole)
    assert (folder / "step_00000010").is_dir() or (folder / "step_00000010.damaged").is_dir()


@pytest.mark.ci
def test_a_finished_run_is_not_trained_again(run, tmp_path, capsys):
    assert run() == 0
    before = curve(tmp_path / "run")
    assert run() == 0
    assert "resumed after step 12" in capsys.readouterr().out
    assert curve(tmp_path / "run") == before


class CompilingError(Exception):
    """The run has looked at its folder, and would compile now."""


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of the finished run where the same command finds it."""
    folder = shutil.copytree(whole, tmp_path / "run")
    described = (folder / "run.json").read_text()
    (folder / "run.json").write_text(described.replace(str(whole.parent), str(tmp_path)))
    return folder


@pytest.fixture
def begin(run, monkeypatch):
    """Run the command up to the moment where it would compile."""

    def compile_programs(*args, **options):
        raise CompilingError

    monkeypatch.setattr(loop, "compile_programs", compile_programs)

    def start():
        with pytest.raises(CompilingError):
            run()

    return start


def files(folder, *names):
    """The contents of the files of these names, or in folders of these names."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if name.split("/")[0] in names}


def test_the_results_of_a_finished_run_whose_checkpoints_are_gone_are_set_aside(finished, begin, capsys):
    shutil.rmtree(finished / "checkpoints")
    names = ("metrics.jsonl", "load.jsonl", "run.json", "tensorboard", "model")
    before = files(finished, *names)
    begin()
    assert f"the results of an earlier run are now in {finished / 'earlier-1'}" in capsys.readouterr().out
    assert {name.split("/")[0] for name in before} == set(names)
    assert files(finished / "earlier-1", *names) == before


def test_the_results_of_a_finished_run_whose_last_checkpoint_is_gone_are_set_aside(finished, begin, capsys):
    shutil.rmtree(finished / "checkpoints" / "step_00000012")
    names = ("metrics.jsonl", "load.jsonl", "run.json", "model")
    before = files(finished, *names)
    begin()
    assert f"the results of an earlier run are now in {finished / 'earlier-1'}" in capsys.readouterr().out
    assert files(finished / "earlier-1", *names) == before
    assert max(line["step"] for line in lines(finished / "metrics.jsonl")) == 8


@pytest.mark.ci
def test_a_run_without_checkpoints_moves_an_earlier_one_aside(run, tmp_path):
    assert run("enable_checkpointing=false") == 0
    first = curve(tmp_path / "run")
    assert run("enable_checkpointing=false") == 0
    assert curve(tmp_path / "run" / "earlier-1") == first
    assert curve(tmp_path / "run") == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learning_rate=1e-4"], "other settings: learning_rate=0.003 is now 0.0001"),
        (["num_layers=3"], "num_layers=2 is now 3"),
        (["data_seed=5"], "data_seed=0 is now 5"),
    ],
)
def test_settings_that_would_change_what_was_computed_are_refused(whole, words, message):
    words = [word for word in WORDS if word.split("=")[0] != words[0].split("=")[0]] + words
    with pytest.raises(ValueError, match=message):
        train((*words, f"base_output_directory={whole.parent}", "run_name=run"))


def test_other_data_than_the_checkpoints_were_made_with_are_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 40)
    words = [word for word in WORDS if word not in TEXT]
    words += ["dataset_type=text", f"dataset_path={text}", f"base_output_directory={tmp_path}", "run_name=run"]
    assert train(words) == 0
    text.write_bytes(bytes(range(256)) * 41)
    with pytest.raises(ValueError, match="of a run on other data"):
        train(words)


def test_two_processes_cannot_train_into_one_folder(run, tmp_path):
    with lock_folder(tmp_path / "run"), pytest.raises(BlockingIOError, match="another process trains into it"):
        run()


def test_a_folder_that_cannot_be_written_to_is_refused_before_compiling(run, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "compile_programs", lambda *args, **options: pytest.fail("it was compiled"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="expected a folder that can be written to"):
        run(name="file/run")


@pytest.mark.ci
def test_a_run_can_start_from_the_model_of_another(run, tmp_path, whole):
    assert run(f"load_parameters_path={whole / 'model'}", name="next") == 0
    assert curve(tmp_path / "next")[0]["loss"] == curve(whole)[-1]["loss"]


def test_a_model_of_other_sizes_is_refused_by_name_before_compiling(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(loop, "compile_programs", lambda *args, **options: pytest.fail("it was compiled"))
    words = [word for word in WORDS if not word.startswith("num_layers")]
    with pytest.raises(ValueError, match=r"stacks\.1\.0.*: expected none, found"):
        train((*words, "num_layers=1", f"base_output_directory={tmp_path}", f"load_parameters_path={whole / 'model'}"))


@pytest.mark.ci
def test_a_trace_has_the_stages_of_the_experts_by_name(run, tmp_path):
    assert run("profiler=xplane", "profiler_steps=2", "enable_checkpointing=false", "moe_backend=cpu") == 0
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    for stage in ("moe/route", "experts/dispatch", "experts/gmm_up", "experts/gmm_down", "experts/unpermute"):
        assert stage.encode() in content, stage
