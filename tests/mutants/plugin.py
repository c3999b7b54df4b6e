"""The part that runs inside pytest: it picks and orders the tests, and writes down what became of each.

It is loaded by `-p tests.mutants.plugin` in the copies that `tree.py` makes, and talks to it by two files.
"""

import json
import os
import time
from pathlib import Path

import pytest

TESTS, RESULTS = "MUTANTS_TESTS", "MUTANTS_RESULTS"


@pytest.hookimpl(trylast=True)  # after -m, and after what puts the cases of a fixture together
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if TESTS in os.environ:
        order = {test: place for place, test in enumerate(json.loads(Path(os.environ[TESTS]).read_text()))}
        wanted = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
        items[:] = wanted


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown" or not report.passed:  # until then it has only started
        _write(report.nodeid, report.outcome)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(f"collecting {report.nodeid}", "failed")


def _write(test: str, outcome: str) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or RESULTS not in os.environ:  # its reports come to the controller too
        return
    with open(os.environ[RESULTS], "a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "time": time.time()}) + "\n")
