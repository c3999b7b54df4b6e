"""Contenders take turns; a failing or wrong one has a reason instead of a time, and the others go on."""

import dataclasses

import pytest

from raggedmoe.bench import run
from raggedmoe.bench.contender import contenders
from raggedmoe.bench.run import measure

MODULE = ("tests.bench.trial_contenders",)


@pytest.fixture
def results(problem, children_here):
    """The trial contenders' results by name, of three rounds."""
    found = measure(problem(), contenders("trial", MODULE), children_here, rounds=3)
    return {result.contender: result for result in found}


def test_contenders_take_turns_round_by_round(results, children_here):
    turns = [name for do, name in children_here.asked if do == "go"]
    limits = ["slow limit", "fast limit"]
    assert turns == ["right", "raises later", *limits, "right", *limits, "right", *limits]
    assert results["right"].turns == 3


def test_an_error_is_shown_and_the_others_go_on(results):
    assert results["raises"].failed
    assert results["raises"].reason == "RuntimeError: no such kernel"
    assert results["raises later"].reason == "RuntimeError: only once"
    assert results["raises later"].seconds is None
    assert results["right"].seconds > 0


@pytest.mark.parametrize("name", ["wrong", "empty"])
def test_a_wrong_result_has_no_time(results, name):
    assert results[name].failed
    assert results[name].reason.startswith("wrong result: ")
    assert results[name].seconds is None


def test_a_package_that_is_not_installed_is_a_reason_and_no_failure(results):
    assert results["missing"].reason == "no_such_package not installed"
    assert not results["missing"].failed


def test_the_fastest_limit_is_what_others_are_a_share_of(results):
    fast, slow = results["fast limit"], results["slow limit"]
    assert fast.of_limit == 1
    assert slow.of_limit == fast.seconds / slow.seconds
    assert results["right"].of_limit == fast.seconds / results["right"].seconds


def test_a_contender_over_its_budget_sits_out(problem, children_here, monkeypatch):
    monkeypatch.setattr(run, "BUDGET", 0.035)  # less than one call of the slow limit, and than four of the fast one
    found = measure(problem(), contenders("trial", MODULE), children_here, rounds=5)
    turns = {result.contender: result.turns for result in found}
    assert turns["slow limit"] == 1  # its first call, which took longer than all turns may
    assert 1 <= turns["fast limit"] <= 4


def test_a_limit_of_other_cases_has_no_line(problem, children_here):
    limits = [c for c in contenders("trial", MODULE) if c.role == "limit"]
    candidates = [dataclasses.replace(c, why_not=lambda case: "not here") for c in limits]
    assert measure(problem(), candidates, children_here, rounds=1) == []
