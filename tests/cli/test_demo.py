"""`raggedmoe demo`: what it leaves, and what it says at its end."""

import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from raggedmoe.cli import demo
from raggedmoe.cli import main as cli
from raggedmoe.train.loop.metrics import MetricsWriter


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The parts of the command that take long, and the folder in which they have left their results."""
    folder = tmp_path / "a run"
    with MetricsWriter(folder, resume_step=None, tensorboard=False) as metrics:
        metrics.held_out(0, {"loss": 6.0, "targets": 8})
        metrics.train(1, {"loss": 2.0, "tokens_per_second": 20000.4})
        metrics.held_out(1, {"loss": 1.5, "targets": 8})
    config = SimpleNamespace(folder=folder)
    outcome = SimpleNamespace(code=0, text="finished")
    monkeypatch.setattr(demo, "run_training", lambda words: (config, outcome))
    monkeypatch.setattr(demo, "generate", lambda *_, **__: print(", text):"))
    return folder, outcome


def test_it_ends_with_what_there_is_now_and_what_to_try(trained, raggedmoe, monkeypatch):
    folder, _ = trained
    code, out, _ = raggedmoe("demo")
    assert code == 0
    assert f"{demo.PROMPT}, text):" in out
    assert "1.500 nats per token, from 6.000" in out
    assert "20,000 tokens per second" in out
    page = re.search(r"a report +(.*), to open in a browser", out).group(1)
    assert page == str(folder / "report.html")
    assert (folder / "report.html").is_file()
    lines = out[out.index("Try next") :].splitlines()[1:]
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line)
        assert (words[0], words[1] in cli.COMMANDS) == ("raggedmoe", True)
        if words[1] == "generate":
            assert words[2] == str(folder / "model")


def test_what_stops_the_training_is_said_and_ends_the_command(trained, raggedmoe):
    folder, outcome = trained
    outcome.code, outcome.text = 75, "SIGTERM: saved after step 3"
    assert raggedmoe("demo") == (75, "", "SIGTERM: saved after step 3\n")
    assert not (folder / "report.html").exists()


def test_commands_are_named_so_that_a_shell_finds_them(monkeypatch, tmp_path):
    script = tmp_path / "my bin" / "raggedmoe"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.split(demo.command_name()) == [str(script)]
    monkeypatch.setenv("PATH", str(script.parent))
    assert demo.command_name() == "raggedmoe"


@pytest.mark.ci
def test_a_tiny_demo_and_the_text_of_its_model(tmp_path):
    """The whole command as a process; the first of its next commands continues a text with the model."""
    command = (sys.executable, "-c", "import raggedmoe_command; raggedmoe_command.main()")
    sizes = ("base_emb_dim=16", "num_layers=2", "num_experts=4", "base_moe_mlp_dim=16", "base_mlp_dim=16")
    words = ("steps=2", "per_device_batch_size=2", "max_target_length=32", "eval_steps=1", *sizes)
    done = subprocess.run((*command, "demo", *words), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/demo/report.html").is_file()
    line = done.stdout[done.stdout.index("Try next") :].splitlines()[1]
    text = subprocess.run((*command, *shlex.split(line)[1:]), cwd=tmp_path, capture_output=True, text=True)
    assert (text.returncode, len(text.stdout) > 50) == (0, True), text.stderr
