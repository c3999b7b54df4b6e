"""How a run begins in a folder where one was before."""

import io

import pytest
from rich.console import Console

from raggedmoe.hardware import target_hardware
from raggedmoe.train.loop.begin import open_metrics
from raggedmoe.train.loop.metrics import LOAD, METRICS, MetricsWriter, read_jsonl
from raggedmoe.train.loop.screen import Screen
from raggedmoe.train.loop.start import Start
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import read_words
from tests.train.runs import TINY


@pytest.fixture
def resume(tmp_path):
    """Opens the metrics of a run that goes on after step 2."""
    settings = read_words((*TINY, f"base_output_directory={tmp_path}", "run_name=run", "tensorboard=false"))
    config = resolve(settings, target_hardware(), 1)
    with MetricsWriter(tmp_path / "run", resume_step=None, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.train(step, {"loss": 4.0 - step})
            writer.load(step, [[step]])
    screen = Screen(3, 1, Console(file=io.StringIO()))
    return lambda: open_metrics(config, Start(step=2, resumed=True), screen).close()


def remove_the_line(path):
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "broken" not in line))


@pytest.mark.parametrize("follow", [remove_the_line, lambda path: path.unlink()], ids=["remove", "move away"])
@pytest.mark.parametrize("line", ["{broken", '{"step":"broken"}'], ids=["no JSON", "no step"])
@pytest.mark.parametrize("name", [METRICS, LOAD])
def test_the_advice_about_a_broken_line_works(resume, tmp_path, name, line, follow):
    path = tmp_path / "run" / name
    path.write_text(path.read_text().replace("\n", f"\n{line}\n", 1))
    with pytest.raises(ValueError, match=f"{name}, line 2: .*; remove the line or move the file away"):
        resume()
    follow(path)
    resume()
    for kept in (METRICS, LOAD):
        expected = [] if kept == name and follow is not remove_the_line else [1, 2]
        assert [values["step"] for values in read_jsonl(tmp_path / "run" / kept)] == expected
