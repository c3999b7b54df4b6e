"""A run that Python starts: README's example, and the same run by command."""

import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from raggedmoe.cli.train import run_training
from raggedmoe.models.presets import model_preset
from raggedmoe.train.loop.loop import train
from raggedmoe.train.settings.words import read_words
from tests.train.loop.test_loop import WORDS
from tests.train.runs import curve, lines

README = Path(__file__).parents[3] / "README.md"


def example():
    """README's example, and the command that is the same run."""
    page = README.read_text()
    (code,) = (text for text in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "raggedmoe.train(" in text)
    (command,) = re.findall(r"^`raggedmoe train ([^`]*)` is the same run, bit for bit", page, re.M)
    return code, command.split()


def test_the_example_of_the_readme_is_ten_lines():
    code, _ = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


@pytest.mark.ci
@pytest.mark.usefixtures("shared_programs")
def test_the_example_of_the_readme_is_the_run_of_its_command(tmp_path, monkeypatch, capsys):
    code, words = example()
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    outcome, said = names["outcome"], capsys.readouterr().out
    assert outcome.code == 0
    assert re.search(r"^after step 0: held-out loss \d\.\d{3}\nafter step 20: held-out loss \d", said)
    assert said.splitlines()[-1].startswith("out/demo ")
    assert run_training((*words, "run_name=by-command")).code == 0
    by_python, by_command = Path("out/demo"), Path("out/by-command")
    assert [line["step"] for line in curve(by_python) if line["kind"] == "train"] == list(range(1, 21))
    assert curve(by_command) == curve(by_python)
    assert lines(by_command / "load.jsonl") == lines(by_python / "load.jsonl")
    for file in ("model.safetensors", "raggedmoe.json", "tokenizer.json"):
        assert (by_command / "model" / file).read_bytes() == (by_python / "model" / file).read_bytes(), file


@pytest.mark.ci
@pytest.mark.usefixtures("shared_programs")
def test_a_callback_that_returns_true_ends_the_run_with_its_model(tmp_path, monkeypatch):
    code, _ = example()
    monkeypatch.chdir(tmp_path)
    stops = code.replace("callbacks=[show]", "callbacks=[lambda line: line['kind'] == 'train' and line['step'] == 3]")
    names = {}
    exec(compile(stops, "README.md", "exec"), names)
    assert names["outcome"].code == 0
    assert len(names["outcome"].metrics.train) < 20
    assert names["outcome"].model is not None


@pytest.mark.ci
@pytest.mark.usefixtures("shared_programs")
def test_what_a_callback_raises_ends_the_run_which_goes_on_in_another_thread(tmp_path):
    """Neither is a file that cannot be written, and signals are for the main thread alone."""

    def failing(error):
        def callback(line):
            if line["kind"] == "train" and line["step"] == 6:
                raise error

        return callback

    whole, ended = (read_words([*WORDS, f"base_output_directory={tmp_path}", f"run_name={name}"]) for name in "ab")
    assert train(whole, quiet=True).code == 0
    with pytest.raises(ZeroDivisionError, match="mine"):
        train(ended, quiet=True, callbacks=[failing(ZeroDivisionError("mine"))])
    with pytest.raises(RuntimeError, match="a callback of the run raised TimeoutError: mine"):
        train(ended, quiet=True, callbacks=[failing(TimeoutError("mine"))])
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(train(ended, quiet=True)))
    thread.start()
    thread.join()
    assert outcomes[0].code == 0
    assert [line["text"] for line in lines(tmp_path / "b" / "metrics.jsonl") if line.get("what") == "resumed"]
    assert curve(tmp_path / "b") == curve(tmp_path / "a")


@pytest.mark.ci
@pytest.mark.usefixtures("shared_programs")
def test_a_model_of_ones_own_is_trained_and_resumed_by_its_run_json(tmp_path):
    words = [word for word in WORDS if not word.startswith(("num_layers=", "mtp_layers="))][1:]
    preset = model_preset("deepseek-v3-tiny")
    config = replace(
        read_words([*words, f"base_output_directory={tmp_path}", "run_name=mine"]),
        model=replace(preset, num_layers=2, dense_layers=(0,), mtp_layers=0),
    )
    assert train(config, quiet=True).code == 0
    whole = curve(tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine/checkpoints/step_00000012")
    assert run_training((str(tmp_path / "mine/run.json"),)).code == 0
    assert curve(tmp_path / "mine") == whole
