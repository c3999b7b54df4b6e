"""Tables, pages and pictures of results."""

import dataclasses
import json

import pytest

from raggedmoe.bench import report
from raggedmoe.bench.contender import LIMIT, NOTE, OURS, PEER, SECOND_LIMIT
from raggedmoe.bench.limits import READING
from raggedmoe.bench.machine import Machine
from raggedmoe.bench.plot import plot_results
from raggedmoe.bench.report import as_json, case_reasons, case_table, from_json, insert_markdown, markdown, merge
from raggedmoe.bench.run import Result

MACHINE = Machine(cpu="A CPU", cores=2, features=("avx2",), isa=None, versions={"jax": "1.0"})


def result(contender, role, seconds, shape="mixtral", **rest):
    named = {"case": f"layer {shape} forward", "subject": "layer", "shape": shape, "dtype": "float32"}
    share = None if seconds is None else 0.08 / seconds
    return Result(**named, direction="forward", contender=contender, role=role, seconds=seconds, of_limit=share, **rest)


GROUP = [
    result("ours", OURS, 0.1, gflops=10.0, peak=12_000_000),
    result("theirs", PEER, 0.2, gflops=5.0),
    result("broken", PEER, None, reason="RuntimeError: a | b", failed=True),
    result("dense: XLA", LIMIT, 0.09, gflops=11.0),
    result("dense: NumPy", LIMIT, 0.08, gflops=12.0),
    result("E matrices: NumPy", SECOND_LIMIT, 0.085, gflops=11.5),
]


def test_second_limit_is_of_the_library_that_is_the_limit():
    assert report.fastest(GROUP, LIMIT).contender == "dense: NumPy"
    assert report.second_limit(GROUP).contender == "E matrices: NumPy"


def test_table_has_every_contender_and_reasons_stand_below():
    table = case_table(GROUP)
    assert list(table.columns[0].cells) == [r.contender for r in GROUP]
    assert list(table.columns[4].cells)[:3] == ["12", "not measured", ""]
    assert list(case_reasons(GROUP)) == ["broken: FAILED: RuntimeError: a | b"]


def test_markdown_has_a_column_for_each_shape_and_a_footnote_for_each_reason():
    text = markdown(MACHINE, 7, "raggedmoe bench layer", [GROUP, [result("ours", OURS, 0.1, "gpt-oss")]])
    assert "A CPU, 2 cores (avx2); jax 1.0" in text
    assert "|  | mixtral | gpt-oss |" in text
    assert "| ours | **0.80 · 100.0** | **0.80 · 100.0** |" in text
    assert "| broken | (1) |  |" in text
    assert "(1) RuntimeError: a / b." in text
    assert "| limit | 80.0: dense: NumPy, 12 GFLOP/s | none |" in text


def test_growth_is_what_ever_more_experts_cost_beyond_their_weights():
    few = [result("ours", OURS, 0.11, "E=8"), result(f"{READING}: XLA", NOTE, 0.01, "E=8")]
    many = [result("ours", OURS, 0.32, "E=512"), result(f"{READING}: XLA", NOTE, 0.2, "E=512")]
    assert "ours: 1.20 times as long with E=512 as with E=8" in markdown(MACHINE, 7, "", [few, many])


def test_tables_replace_those_of_an_earlier_run():
    page = f"before\n{insert_markdown(None, 'old')}after\n"
    assert insert_markdown(page, "new") == page.replace("old", "new")
    assert insert_markdown("a page without marks", "new").startswith(report.BEGIN)


def test_json_has_the_machine_and_every_result():
    plain = json.loads(json.dumps(as_json(MACHINE, 7, [GROUP])))
    assert plain["machine"]["cpu"] == "A CPU"
    assert len(plain["results"]) == len(GROUP)


@pytest.mark.ci
def test_plot_is_a_picture(tmp_path):
    plot_results(GROUP, MACHINE.title, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_one_machine_become_one_run_and_the_last_of_a_case_counts():
    few = [result("ours", OURS, 0.11, "E=8"), result(f"{READING}: XLA", NOTE, 0.01, "E=8")]
    many = [result("ours", OURS, 0.32, "E=512"), result(f"{READING}: XLA", NOTE, 0.2, "E=512")]
    again = [result("ours", OURS, 0.31, "E=512"), result(f"{READING}: XLA", NOTE, 0.2, "E=512")]
    plain = [
        json.loads(json.dumps(as_json(MACHINE, rounds, groups))) for rounds, groups in ((7, [few, many]), (3, [again]))
    ]
    machine, rounds, groups = merge({str(i): from_json(each, str(i)) for i, each in enumerate(plain)})
    assert (machine, rounds, groups) == (MACHINE, 3, [few, again])
    assert as_json(machine, rounds, groups)["growth"][0]["ratio"] == pytest.approx(1.1)


def test_files_of_different_machines_or_of_another_kind_are_refused():
    other = dataclasses.replace(MACHINE, cores=4)
    plain = [json.loads(json.dumps(as_json(machine, 1, [GROUP]))) for machine in (MACHINE, other)]
    with pytest.raises(ValueError, match=r"results of one machine.*a: A CPU, 2 cores.*; b: A CPU, 4 cores"):
        merge({"a": from_json(plain[0], "a"), "b": from_json(plain[1], "b")})
    with pytest.raises(ValueError, match=r"c\.json: expected a file that `raggedmoe bench --json` wrote"):
        from_json({"title": "x"}, "c.json")
