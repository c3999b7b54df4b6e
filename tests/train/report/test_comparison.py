"""The page that compares runs."""

import json
import math

import pytest

from raggedmoe.cli.report import report
from raggedmoe.train.loop.metrics import METRICS
from raggedmoe.train.loop.record import RUN, read_run
from raggedmoe.train.report.build import write_report
from raggedmoe.train.report.comparison import MAX_RUNS, write_comparison
from tests.train.report.browser import CHROMIUM, Browser
from tests.train.report.fake_run import fake_run, minimal_run
from tests.train.report.parsed_page import Page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of 120 steps, and one that went on from the whole state of its step 60 with half the learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    whole, half = fake_run(folder / "whole", num_steps=120), fake_run(folder / "half", num_steps=120)
    describe(whole, name="whole", settings={"learning_rate": 0.003, "steps": 120, "run_name": "whole"})
    parent = {"run": str(whole), "step": 60, "state": "all"}
    settings = {"learning_rate": 0.0015, "steps": 120, "run_name": "half"}
    describe(half, name="half", settings=settings, parent=parent)
    lines = [json.loads(line) for line in (half / METRICS).read_text().splitlines()]
    kept = [line for line in lines if line["step"] > 60]
    (half / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    return whole, half


def describe(folder, **values):
    (folder / RUN).write_text(json.dumps({**json.loads((folder / RUN).read_text()), **values}))


@pytest.fixture(scope="module")
def page(runs):
    return Page(write_comparison([read_run(run) for run in runs]))


def test_the_results_of_all_runs_stand_side_by_side(runs, page):
    rows = {row[0]: row[1:] for row in page.tables["results"]}
    records = [read_run(run) for run in runs]
    assert rows["Begins with"] == ["new parameters", f"all of step 60 of {runs[0]}"]
    assert rows["Held-out loss"] == [f"{record.held_out[-1]['loss']:.3f}" for record in records]
    assert rows["Best held-out loss"] == [f"{min(line['loss'] for line in record.held_out):.3f}" for record in records]
    assert rows["Steps"] == ["120", "120"]
    assert rows["Tokens"] == ["492 k", "246 k"]
    assert rows["Skipped steps"] == [str(sum(line["skipped"] for line in record.train)) for record in records]


def test_every_picture_has_the_curves_of_all_runs_and_the_step_of_the_branch(page):
    assert page.headings == [
        "Results",
        "Loss",
        "Training loss (nats per token), smoothed",
        "Held-out loss (nats per token)",
        "Learning rate",
        "Gradient norm, smoothed",
        "Expert load",
        "Entropy of the load (nats), smoothed",
        "Largest violation of balance, smoothed",
        "Speed",
        "Tokens per second, smoothed",
        "Settings",
    ]
    pictures = page.source.split("<figure>")[1:]
    assert len(pictures) == 7
    for picture in pictures:
        for label in ("whole", "half", "branched"):
            assert f">{label}</text>" in picture, label


def test_only_settings_that_differ_and_say_what_the_run_is_are_listed(page):
    assert page.tables["differences"] == [["learning_rate", "0.003", "0.0015"]]


def test_runs_of_one_name_are_called_by_their_folders(tmp_path):
    runs = [read_run(minimal_run(tmp_path / name)) for name in ("a", "b")]
    for run in runs:
        (run.folder / RUN).write_text('{"name": "same"}')
    page = Page(write_comparison([read_run(run.folder) for run in runs]))
    assert page.tables["results"][0] == ["Begins with", "new parameters", "new parameters"]
    assert str(tmp_path / "a") in page.text
    assert "No run has a curve of this" in page.missing[0]
    assert "All settings of the runs are the same." in page.text


def test_eight_runs_have_eight_different_lines_and_nine_are_refused(tmp_path):
    records = [read_run(fake_run(tmp_path / str(number), num_steps=3)) for number in range(MAX_RUNS)]
    source = write_comparison(records).read_text()
    assert source.count("stroke-dasharray") >= MAX_RUNS // 2
    with pytest.raises(ValueError, match="expected 2 to 8 runs to compare, got 9"):
        write_comparison([*records, records[0]])


def test_the_command_compares_runs_as_they_were_at_a_step(runs, tmp_path, capsys):
    out = tmp_path / "both.html"
    assert report((f"{runs[0]}@80", str(runs[1])), out=str(out)) == 0
    assert capsys.readouterr().out == f"{out}\n"
    rows = {row[0]: row[1:] for row in Page(out).tables["results"]}
    assert rows["Steps"] == ["80", "120"]


def test_the_report_of_a_checkpoint_ends_at_its_step(runs):
    path = write_report(runs[0], step=80)
    assert path.name == "report-80.html"
    page = Page(path)
    assert page.tiles["Steps"] == "80"
    record = read_run(runs[0]).until(80)
    assert record.load.steps.max() == 80
    assert page.tiles["Held-out loss"] == f"{record.held_out[-1]['loss']:.3f}"
    assert math.isclose(record.total("tokens"), 80 * 4096)


@pytest.mark.ci
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_sticks_out_of_the_page(runs, page, tmp_path, width):
    browser = Browser(tmp_path)
    try:
        browser.open((runs[0] / "comparison.html").as_uri(), width=width)
        assert browser.value("document.documentElement.scrollWidth") <= width
    finally:
        browser.close()
