"""`raggedmoe verify`: what it prints, and how it ends."""

import json

import pytest

from raggedmoe.cli.verify import _report, verify
from raggedmoe.verify.check import Check

FAILED = Check(
    operation="grouped_matmul",
    implementation="cpu",
    spec="even",
    dtype="float32",
    quantity="drhs",
    error=2.0,
    bound=1.0,
    share=2.0,
    problem=None,
)


@pytest.mark.ci
def test_verify_passes_and_prints_json(capsys):
    assert verify(operations=("ragged_gather",), quick=True, json=True) == 0
    checks = json.loads(capsys.readouterr().out)
    assert {c["dtype"] for c in checks} == {"float32", "bfloat16"}
    assert {c["quantity"] for c in checks} == {"value", "dx", "dweights"}
    assert all(c["passed"] for c in checks)


def test_verify_reports_a_failure_and_the_worst_example():
    better = Check(**{**vars(FAILED), "share": 0.5, "error": 0.5, "spec": "one-row"})
    lines = list(_report([better, FAILED], every=False))
    assert len(lines) == 3
    assert "FAIL" in lines[-1]
    assert "even" in lines[-1]
    assert len(list(_report([better, FAILED], every=True))) == 4
