"""`raggedmoe bench` as a user types it; `bench layer KEY=VALUE … --devices N` on the tests' host devices."""

import json
import re
import sys
from dataclasses import replace

import pytest

from raggedmoe.aot.subjects import layer_config
from raggedmoe.bench.case import SHAPES
from raggedmoe.cli import bench
from raggedmoe.cli.main import main


def run(monkeypatch, capsys, *arguments):
    """Exit code, standard output and standard error of the console script."""
    monkeypatch.setattr(sys, "argv", ["raggedmoe", "bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--devices", "8"), "--devices belongs to layer KEY=VALUE …, got train"),
        (("grouped_matmul", "--compare", "x.json"), "--compare belongs to layer KEY=VALUE …, got grouped_matmul"),
        (("layer", "fsdp_parallelism=-1"), "expected --devices N, as the degrees do not say how many"),
        (
            ("layer", "fsdp_parallelism=4", "--devices", "8"),
            "degrees that use all of --devices 8, got 4; set one to -1",
        ),
        (("layer", "fsdp_parallelism=4096"), "expected 4096 devices, found 8"),
        (("layer", "fsdp_paralelism=4"), "unknown setting 'fsdp_paralelism': did you mean fsdp_parallelism"),
        (("layer", "olmoe-tiny", "fsdp_parallelism=8", "--tokens", "0"), "expected --tokens >= 1, got 0"),
        (("layer", "fsdp_parallelism=8", "--compare", "no/file.json"), "no/file.json: expected a file that --json"),
        (("layer", "--isa", "avx3"), "unknown isa 'avx3'.*avx2"),
        (
            ("layer", "--json", "a.json", "sweep"),
            "expected one file after --json, got a.json sweep",
        ),
        (("layer", "--case", "nothing"), "no case of layer holds the text 'nothing'; try 'mixtral'"),
        (("ragged_gather", "--isa", "avx2"), "--isa is for what has peers"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, monkeypatch, capsys):
    code, out, error = run(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("raggedmoe: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_a_file_of_another_kind_is_refused(monkeypatch, capsys, tmp_path):
    place = tmp_path / "timings.json"
    place.write_text('{"title": "x", "timings": []}')
    code, _, error = run(monkeypatch, capsys, "layer", "fsdp_parallelism=8", "--compare", str(place))
    assert code == 2
    assert "got another kind of file" in error


def test_ratios_are_of_now_to_then():
    lines = list(
        bench._figure_lines({"ms": 3.0, "FLOPs": 10, "all-gather bytes": 4}, {"ms": 2.0, "FLOPs": 10, "old": 5})
    )
    assert [line.split()[-1] for line in lines] == ["1.500", "1.000", "new", "0.000"]


def figures(out):
    return {each["case"]: each["figures"] for each in json.loads(out)["programs"]}


@pytest.mark.slow  # two programs of eight devices for each
def test_fsdp_and_fsdp_with_experts_are_measured_and_compared(monkeypatch, capsys, tmp_path):
    options = ("--devices", "8", "--tokens", "16", "--rounds", "1", "--dtypes", "float32")
    code, out, _ = run(monkeypatch, capsys, "layer", "olmoe-tiny", "fsdp_parallelism=8", *options, "--json")
    assert code == 0
    fsdp = figures(out)
    layer = layer_config("olmoe-tiny")
    weights = 3 * layer.num_experts * layer.expert_dim * layer.model_dim * 4
    router = layer.num_experts * layer.model_dim * 4
    assert fsdp["forward"]["all-gather bytes"] in (weights, weights + router)  # every weight once
    assert fsdp["forward+backward"]["reduce-scatter bytes"] in (weights, weights + router)
    assert fsdp["forward"]["argument bytes"] >= weights / 8
    before = tmp_path / "before.json"
    before.write_text(out)
    words = ("layer", "olmoe-tiny", "fsdp_parallelism=2", "expert_parallelism=4", "expert_strategy=ring")
    code, out, _ = run(monkeypatch, capsys, *words, *options, "--compare", str(before))
    assert code == 0
    # A rank of four has a fourth of the experts, and gathers those alone; the tokens of four are gathered too.
    ratio = float(re.search(r"all-gather bytes.* ([\d.]+)$", out, re.MULTILINE)[1])
    assert 0.25 < ratio < 1
    assert re.search(r"ms +[\d.]+ +[\d.]+ +[\d.]+", out)


@pytest.mark.ci
def test_peers_are_measured_reported_and_written(monkeypatch, capsys, tmp_path):
    """On tiny sizes, in processes; a failure of ours would be the exit code."""
    shape = replace(SHAPES["mixtral"], tokens=72, model_dim=32, expert_dim=48, num_experts=8)
    monkeypatch.setattr("raggedmoe.bench.subjects.SHAPES", {"mixtral": shape})
    report, page = tmp_path / "out" / "bench.json", tmp_path / "speed.md"
    options = ("--case", "mixtral forward+", "--dtypes", "float32", "--rounds", "1", "--isa", "avx2")
    code, out, _ = run(monkeypatch, capsys, "layer", *options, "--json", str(report), "--markdown", str(page))
    assert code == 0, out
    plain = json.loads(report.read_text())
    ours = [r for r in plain["results"] if r["contender"] == "raggedmoe auto"]
    assert [r["case"] for r in ours] == ["layer mixtral forward+backward"]
    assert plain["machine"]["isa"] == "avx2"
    assert "| raggedmoe auto | " in page.read_text()
    assert "every contender restricted to avx2" in " ".join(out.split())


@pytest.mark.ci
def test_bench_measures_one_case_and_draws_it(tmp_path, capsys):
    picture = tmp_path / "bench.png"
    code = bench.bench(
        subjects=("ragged_gather",), dtypes=("float32",), rounds=1, case="mixtral forward", json=(), plot=picture
    )
    assert code == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {"limit", "xla"} <= {r["contender"] for r in results}
    assert all(r["seconds"] > 0 for r in results)
    assert picture.read_bytes().startswith(b"\x89PNG")
