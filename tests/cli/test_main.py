"""The commands as a user types them."""

import os
import re
import subprocess
import sys

import pytest

from raggedmoe.cli.main import COMMANDS, main
from raggedmoe.launch import processes
from raggedmoe.train.settings.config import SETTINGS


def run(monkeypatch, capsys, *arguments):
    """Exit code, standard output and standard error of the console script."""
    monkeypatch.setattr(sys, "argv", ["raggedmoe", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


def test_an_interrupted_command_ends_without_waiting_for_threads(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    def end(code):  # which the real one does not return from either
        raise SystemExit(f"at once: {code}")

    monkeypatch.setitem(COMMANDS, "models", interrupted)
    monkeypatch.setattr(os, "_exit", end)
    assert run(monkeypatch, capsys, "models") == ("at once: 130", "", "raggedmoe: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "--hardware", "tpu7"), "unknown hardware 'tpu7'.*did you mean 'tpu7x'"),
        (("explain", "--model", "deepseek-v4"), "unknown model 'deepseek-v4'.*did you mean 'deepseek-v"),
        (("explain", "--shape", "T=3"), "expected a shape like T=2048.*got 'T=3'"),
        (("explain", "--moe-backend", "gmmv2"), "unknown moe_backend 'gmmv2'.*did you mean 'gmm_v2'"),
        (("explain", "--jax", "newest"), "newest"),
        (("verify", "gather"), "unknown operation 'gather'.*did you mean 'ragged_gather'"),
        (("bench", "layers"), "unknown subject 'layers'.*did you mean 'layer'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, monkeypatch, capsys):
    code, _, error = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert error.startswith("raggedmoe: ")
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_import_needs_no_optional_package():
    """The import loads neither plotting, nor other people's kernels, nor what only commands need."""
    optional = (
        "matplotlib",
        "tokamax",
        "torch",
        "tyro",
        "rich.progress",
        "orbax",
        "grain",
        "safetensors",
        "tokenizers",
    )
    code = f"import sys, raggedmoe; print([m for m in sys.modules if m in {optional}])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("command", "error", "code"),
    [("train", OSError("disk"), 74), ("train", ValueError("setting"), 2), ("report", OSError("disk"), 2)],
)
def test_a_disk_may_be_back_when_a_run_is_started_again_a_wrong_setting_stays(
    monkeypatch, capsys, command, error, code
):
    def raising():
        raise error

    monkeypatch.setitem(COMMANDS, command, raising)
    monkeypatch.setattr(processes, "leave", lambda code, *, failed=False: None)
    assert run(monkeypatch, capsys, command) == (code, "", f"raggedmoe: {error}\n")


@pytest.mark.parametrize(("code", "failed"), [(74, True), (75, False), (0, False)])
def test_the_other_processes_do_not_wait_for_one_that_could_not_write(monkeypatch, capsys, code, failed):
    left = []
    monkeypatch.setitem(COMMANDS, "train", lambda: code)
    monkeypatch.setattr(processes, "leave", lambda code, *, failed=False: left.append((code, failed)))
    assert run(monkeypatch, capsys, "train")[0] == code
    assert left == [(code, failed)]


@pytest.mark.parametrize("command", ["models", "import", "export", "quantise", "generate"])
def test_help_is_printed_and_is_no_failure(command, raggedmoe):
    code, out, _ = raggedmoe(command, "--help")
    assert code == 0
    assert "usage: raggedmoe" in out


def test_help_of_train_has_the_default_the_type_and_the_help_of_every_setting(raggedmoe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    code, out, _ = raggedmoe("train", "--help")
    assert code == 0
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    printed = {cells[0].partition("=")[0]: cells for cells in lines if len(cells) == 3}
    for name, setting in SETTINGS.items():
        assignment, kind, text = printed[name]
        default = assignment.partition("=")[2]
        read = setting.parse(default)
        assert read == setting.usual or (read is None and setting.usual == ()), name
        assert kind == ("choice" if setting.choices else setting.type.name), name
        assert text.startswith(setting.help), name
