import json
import re
import sys
import webbrowser

import numpy as np
import pytest

from raggedmoe.cli.report import report
from raggedmoe.train.loop.metrics import LOAD, METRICS, MetricsWriter, read_jsonl
from raggedmoe.train.loop.record import RUN, LoadHistory, Series
from raggedmoe.train.report.build import write_report
from raggedmoe.train.report.figures import MAX_BINS, Curve, curves_svg, short
from raggedmoe.train.report.page import compact, duration
from tests.train.report.browser import CHROMIUM, Browser
from tests.train.report.fake_run import INFO, KERNELS, NASTY, RESUMED, SKIPPED, fake_run, minimal_run
from tests.train.report.parsed_page import Page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("runs") / "fake")


@pytest.fixture(scope="module")
def page(run):
    return Page(write_report(run))


@pytest.fixture
def small(tmp_path):
    """A run of few values, to be spoilt: each picture costs a tenth of a second."""
    folder = tmp_path / "small"
    with MetricsWriter(folder, resume_step=None, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.train(step, {"loss": 4.0 - step, "dropped": 0})
            writer.load(step, [[step, 0, 1]])
    (folder / RUN).write_text(json.dumps({"model": {"moe_layers": [7]}}))
    return folder


def test_the_headline_holds_the_runs_figures(run, page):
    train = [line for line in read_jsonl(run / METRICS) if line["kind"] == "train"]
    held_out = [line for line in read_jsonl(run / METRICS) if line["kind"] == "eval"]
    last = [line["loss"] for line in train[-20:]]
    assert page.tiles == {
        "Held-out loss": f"{held_out[-1]['loss']:.3f}",
        "Training loss": f"{sum(last) / len(last):.3f}",
        "Steps": "400",
        "Tokens": "1.64 M",
        "Tokens per second": f"{np.median([line['tokens_per_second'] for line in train]):,.0f}",
        "MFU": f"{100 * np.median([line['mfu'] for line in train]):.1f} %",
        "Dropped": f"{sum(line['dropped'] for line in train):,}",
        "Skipped steps": "2",
        "Dead experts": "1",
    }


def test_every_section_and_figure_is_there(page):
    assert page.headings == [
        "Loss",
        "Loss (nats per token)",
        "Learning rate",
        "Gradient norm",
        "Auxiliary losses",
        "Expert load",
        "The busiest expert of each layer",
        "Layer 1",
        "Layer 2",
        "Layer 3",
        "Entropy of the load (nats)",
        "Largest violation of balance",
        "Speed",
        "Tokens per second",
        "Drops",
        "Dropped slots per step",
        "Kernels",
        "Events",
        "Settings",
    ]
    assert page.source.count("<svg") == 13
    assert page.missing == []


def test_the_one_dead_expert_is_named(page):
    assert "layer 1 expert 3." in page.text


def test_every_kernel_has_a_row_with_its_reasons(page):
    rows = page.tables["kernels"]
    assert len(rows) == len(KERNELS)
    for row, kernel in zip(rows, KERNELS, strict=True):
        assert row[0] == f"{kernel['operation']} {kernel['direction']}{kernel['shapes']}"
        assert row[1] == f"{kernel['chosen']} {kernel['level']}"
        assert row[2].startswith(kernel["shown_by"])
        for other in kernel["others"]:
            assert f"{other['name']}: {other['reason']}" in row[2]


def test_the_events_table_has_all_but_checkpoints(page):
    found = [(row[0], row[1]) for row in page.tables["events"]]
    assert found == [(str(SKIPPED[0]), "skipped"), (str(RESUMED), "resumed"), (str(SKIPPED[1]), "skipped")]
    assert "8 checkpoints, the last at step 400." in page.text


def test_the_settings_are_shown_flat_and_as_text(page):
    assert [row for row in page.tables["settings"] if "folder" not in row[0]] == [
        ["model", "tiny-moe"],
        ["data.dataset", "stdlib"],
        ["optimizer.name", "adamw"],
        ["optimizer.learning_rate", "0.001"],
        ["optimizer.betas", "[0.9, 0.95]"],
        ["run_name", NASTY],
        ["moe_backend", "null"],
        ["packing", "true"],
    ]


def test_a_users_text_is_never_markup(tmp_path):
    """Every string of run.json and of the events is hostile; none becomes a tag."""

    def spoilt(value):
        if isinstance(value, dict):
            return {(key if key in known else NASTY): spoilt(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [spoilt(entry) for entry in value]
        return NASTY if isinstance(value, str) else value

    known = {*INFO, *INFO["model"], *KERNELS[0], "name", "reason"}
    tmp_path.joinpath(RUN).write_text(json.dumps(spoilt(INFO)))
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        writer.train(1, {"loss": 1.0})
        writer.event(1, NASTY, NASTY)
    page = Page(write_report(tmp_path))
    assert "script" not in page.seen
    assert page.text.count(NASTY) > 20


def test_the_page_loads_nothing_from_elsewhere(page):
    assert "http" not in page.source.replace("http-equiv", "")
    links = re.findall(r'(?:href|src|url)\s*[=(]\s*"?([^")]*)', page.source)
    assert links
    assert all(link.startswith(("#", "data:image/png;base64")) for link in links)
    assert page.seen.isdisjoint({"script", "link", "iframe", "object", "embed", "img", "foreignobject"})


def test_the_same_run_gives_the_same_page(small, tmp_path):
    assert write_report(small, tmp_path / "deep" / "again.html").read_bytes() == write_report(small).read_bytes()


def test_a_run_of_one_step_gives_a_page_that_says_what_is_missing(tmp_path):
    page = Page(write_report(minimal_run(tmp_path)))
    known = {name: value for name, value in page.tiles.items() if value != "–"}
    assert known == {"Training loss": "3.250", "Steps": "1"}
    said = " ".join(page.missing)
    for text in ("run.json is missing", "No held-out loss", "learning_rate", "grad_norm", "load.jsonl", "entropy",
                 "tokens_per_second", "dropped", "which kernels", "settings"):  # fmt: skip
        assert text in said


def test_a_run_stopped_before_its_first_step_gives_a_page(tmp_path):
    (tmp_path / RUN).write_text(json.dumps(INFO))
    page = Page(write_report(tmp_path))
    assert any("metrics.jsonl is missing" in text for text in page.missing)
    assert len(page.tables["kernels"]) == len(KERNELS)


def test_a_run_whose_every_loss_is_nan_gives_a_page(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        for step in range(1, 60):
            writer.train(step, {"loss": np.nan, "grad_norm": np.nan, "learning_rate": 0.0, "skipped": 1})
    page = Page(write_report(tmp_path))
    assert page.tiles["Training loss"] == "–"
    assert page.tiles["Skipped steps"] == "59"
    assert any("finite loss" in text for text in page.missing)


def test_a_curve_without_a_value_or_a_mark_is_empty(tmp_path):
    (tmp_path / METRICS).write_text('{"kind":"train","step":1,"loss":null}\n{"kind":"train","step":2,"loss":null}\n')
    page = Page(write_report(tmp_path))
    assert page.tiles["Steps"] == "2"
    assert page.tiles["Training loss"] == "–"


@pytest.mark.parametrize("content", ["{cut", '{"model": 3, "kernels": {"a": 1}, "settings": [], "notes": "x"}'])
def test_a_spoilt_run_json_costs_only_what_it_held(small, content):
    assert "Layer 7" in Page(write_report(small)).headings
    (small / RUN).write_text(content)
    page = Page(write_report(small))
    assert page.tiles["Steps"] == "3"
    assert "Layer 0" in page.headings
    assert any("which kernels" in text for text in page.missing)


def test_half_lines_at_the_end_are_left_out(small):
    for name in (METRICS, LOAD):
        with (small / name).open("a") as file:
            file.write('{"step":401,"kind":"tra')
    assert Page(write_report(small)).tiles["Steps"] == "3"


def test_a_malformed_line_is_an_error_that_names_it(small):
    with (small / METRICS).open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 4: expected a JSON object"):
        write_report(small)


def test_lines_of_load_with_another_shape_are_left_out_and_counted(small):
    odd = ['{"step":4,"load":[[1,2],[3]]}', '{"step":5,"load":"x"}', '{"step":6}', '{"step":0,"load":[[1,2],[3,4]]}']
    with (small / LOAD).open("a") as file:
        file.write("\n".join(odd) + "\n")
    page = Page(write_report(small))
    assert "4 lines of load.jsonl are left out" in page.text
    assert page.tiles["Dead experts"] == "1"
    assert "no token in the last 3 records, up to step 3: layer 7 expert 1." in page.text


HUGE = "1" + "0" * 400


@pytest.mark.parametrize("value", [HUGE, "1.5e308"], ids=["digits", "float64"])
def test_a_value_that_no_sum_can_hold_counts_as_unknown(small, value):
    names = ("loss", "seconds", "tokens", "tokens_per_second", "dropped", "grad_norm", "entropy", "mfu", "skipped")
    values = ",".join(f'"{name}":{value}' for name in names)
    with (small / METRICS).open("a") as file:
        for kind in ("train", "eval"):
            file.write(f'{{"kind":"{kind}","step":4,{values}}}\n{{"kind":"{kind}","step":5,{values}}}\n')
    (small / RUN).write_text(f'{{"model": {{"total": {value}, "active": {value}, "num_experts": {value}}}}}')
    page = Page(write_report(small))
    known = {name: text for name, text in page.tiles.items() if text != "–"}
    assert known == {"Steps": "5", "Dropped": "0", "Dead experts": "1"}


def test_lines_with_a_step_that_is_no_count_are_left_out_and_counted(small):
    steps = (10**30, 2**63, 2**53, -1, "1e30", "4.5", "null", "true")
    with (small / METRICS).open("a") as metrics, (small / LOAD).open("a") as load:
        for step in steps:
            metrics.write(f'{{"kind":"train","step":{step},"loss":1.0}}\n{{"kind":"event","step":{step}}}\n')
            load.write(f'{{"step":{step},"load":[[1,2,3]]}}\n')
    page = Page(write_report(small))
    assert page.tiles["Steps"] == "3"
    assert page.tiles["Dead experts"] == "1"
    assert f"{2 * len(steps)} lines of metrics.jsonl are left out" in " ".join(page.missing)
    assert f"{len(steps)} lines of load.jsonl are left out" in page.text


def test_counts_that_no_sum_can_hold_are_left_out(small):
    with (small / LOAD).open("a") as file:
        file.writelines(
            f'{{"step":{4 + i},"load":[[{count},1,1]]}}\n' for i, count in enumerate((HUGE, "1e400", "1e308"))
        )
    page = Page(write_report(small))
    assert "3 lines of load.jsonl are left out" in page.text
    assert page.tiles["Dead experts"] == "1"


def test_no_drop_is_said_in_words(small):
    page = Page(write_report(small))
    assert "in each of the 3 steps, every token reached all of its experts" in page.text
    assert "Dropped slots per step" not in page.headings


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"expected the folder of a run, with metrics.jsonl or run.json, found neit"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_matplotlib_is_an_error_that_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'raggedmoe\[plot\]'"):
        write_report(run)


@pytest.mark.ci
def test_a_model_of_61_layers_and_256_experts_gives_a_page_below_3_mb(tmp_path):
    random = np.random.default_rng(0)
    skew = random.uniform(0.2, 3, size=(61, 256))
    skew[40, 7] = 30
    (tmp_path / RUN).write_text(json.dumps({"model": {"moe_layers": list(range(3, 64)), "num_experts": 256}}))
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        for step in range(1, MAX_BINS + 11):
            writer.train(step, {"loss": 1.0})
            writer.load(step, random.poisson(20 * skew))
    path = write_report(tmp_path)
    page = Page(path)
    assert path.stat().st_size < 3e6
    layers = [heading for heading in page.headings if heading.startswith("Layer ")]
    assert len(layers) == 12
    assert {"Layer 3", "Layer 43", "Layer 63"} <= set(layers)
    assert "12 of 61 layers are drawn" in page.text
    assert f"{MAX_BINS + 10} records are summed into {MAX_BINS} columns" in page.text


def test_a_long_curve_is_thinned():
    steps = np.arange(100_000)
    series = Series(steps=steps, values=np.sin(steps))
    curves = [Curve(series=series, label=style, colour="blue", style=style) for style in ("raw", "line")]
    assert len(curves_svg("long", curves)) < 100_000  # bytes; unthinned it is millions


def test_smoothing_is_the_mean_of_known_neighbours():
    values = np.array([8.0, np.nan, 2.0, 4.0, np.nan, np.nan, np.nan, 5.0])
    found = Series(steps=np.arange(8), values=values).smooth(2).values
    expected = [8.0, np.mean([8.0, 2.0]), 3.0, 3.0, 4.0, np.nan, 5.0, 5.0]
    np.testing.assert_array_equal(found, expected)


def test_one_huge_value_does_not_spoil_the_means_after_it():
    values = np.ones(50)
    values[10] = 1e30
    found = Series(steps=np.arange(50), values=values).smooth(4).values
    np.testing.assert_array_equal(found[[0, 7, 13, 49]], 1.0)


def test_a_run_with_a_spike_has_a_logarithmic_axis_that_shows_the_rest(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        for step in range(1, 100):
            writer.train(step, {"loss": 1e30 if step == 50 else 2.0 + 1 / step})
    source = write_report(tmp_path).read_text()
    ticks = re.findall(r"<text[^>]*>([^<]*)</text>", source)
    ticks = ticks[ticks.index("step") + 1 :]
    assert any(tick.startswith("1e") and int(tick[2:]) > 15 for tick in ticks)
    assert {"0.1", "1", "10"} & set(ticks)


def test_load_is_relative_to_the_mean_and_gaps_stay_gaps():
    history = LoadHistory(
        steps=np.array([10, 20, 30, 60]),
        counts=np.array([[[1.0, 3.0]], [[0.0, 4.0]], [[0.0, 0.0]], [[2.0, 2.0]]]),
        layers=[0],
        num_left_out=0,
    )
    load = history.in_bins(100)
    gap = [[np.nan, np.nan]]
    assert (load.first, load.last) == (0.0, 60.0)
    np.testing.assert_array_equal(load.relative, [[[0.5, 1.5]], [[0.0, 2.0]], gap, gap, gap, [[1.0, 1.0]]])


def test_load_in_bins_sums_the_lines_of_each_stretch():
    counts = np.random.default_rng(1).integers(1, 9, size=(97, 2, 4)).astype(float)
    steps, edges = np.arange(5, 490, 5), np.linspace(0, 485, 11)
    load = LoadHistory(steps=steps, counts=counts, layers=[0, 1], num_left_out=0).in_bins(10)
    assert load.relative.shape == (10, 2, 4)
    for i in range(10):
        total = counts[(steps > edges[i]) & (steps <= edges[i + 1])].sum(axis=0)
        np.testing.assert_allclose(load.relative[i], total / total.mean(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("value", "largest", "text"),
    [
        (0, 1e-3, "0"),
        (19_500, 2e4, "19.5k"),
        (9_999, 2e4, "9999"),
        (2.5e-4, 1e-3, "2.5e-4"),
        (0.001, 1e-3, "1e-3"),
        (0.0005, 0.01, "0.0005"),
        (3e6, 3e6, "3M"),
        (1e23, 1e23, "1e23"),
        (-0.5, 2, "-0.5"),
    ],
)
def test_numbers_on_an_axis(value, largest, text):
    assert short(value, largest) == text


@pytest.mark.parametrize(
    ("value", "text"), [(999, "999"), (1000, "1.00 k"), (999_600, "1.00 M"), (12_345_678, "12.3 M"), (671e9, "671 G")]
)
def test_large_numbers_in_three_digits(value, text):
    assert compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.21, "210 ms"),
        (2.5, "2.5 s"),
        (59.9, "59.9 s"),
        (200, "3 min 20 s"),
        (18_180, "5 h 3 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_command_prints_the_path_and_opens_the_browser_when_asked(tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert report((str(minimal_run(tmp_path / "small")),), open=True) == 0
    path = tmp_path / "small" / "report.html"
    assert capsys.readouterr().out == f"{path.resolve()}\n"
    assert opened == [path.resolve().as_uri()]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


OUTSIDE = """
[...document.querySelectorAll('svg text')].filter(text => {
  const inner = text.getBoundingClientRect(), outer = text.closest('svg').getBoundingClientRect();
  return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1;
}).map(text => text.textContent)
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_nothing_sticks_out_fails_or_is_fetched(run, page, browser, width):
    browser.open((run / "report.html").as_uri(), width=width)
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("document.querySelectorAll('svg text').length") > 50
    assert browser.value(OUTSIDE) == []
    names = [event["method"] for event in browser.events]
    assert not {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"} & set(names)
    asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert asked[0].startswith("file:")
    assert all(url.startswith("data:image/png") for url in asked[1:])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_in_a_browser_long_words_do_not_widen_the_page(small, browser):
    word = "x" * 90
    info = {"name": word, "data": word, "notes": [word], "settings": {word: word}, "model": {"name": word}}
    kernel = {"operation": word, "shapes": word, "chosen": word, "level": word, "shown_by": word}
    (small / RUN).write_text(json.dumps({**info, "kernels": [{**kernel, "others": [{"name": word, "reason": word}]}]}))
    with MetricsWriter(small, resume_step=3, tensorboard=False) as writer:
        writer.event(3, word, word)
    browser.open(write_report(small).as_uri(), width=390)
    browser.value("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= 390
