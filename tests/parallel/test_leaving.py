"""The order in which a process leaves its run: it says that it ends before it waits for the others."""

import os
from types import SimpleNamespace

import pytest

from raggedmoe.parallel import processes
from raggedmoe.parallel.peers import FAILED_PATIENCE


@pytest.fixture
def said(monkeypatch):
    """What a process of several does as it leaves."""
    happened = []

    def noted(what):
        return lambda *values, **options: happened.append((what, *values, *options.values()))

    peers = SimpleNamespace(
        end=noted("end"),
        close=noted("close"),
        all_ended=SimpleNamespace(wait=noted("all ended")),
        all_gone=SimpleNamespace(wait=noted("all gone")),
    )
    monkeypatch.setattr(processes, "_membership", SimpleNamespace(failed=None, peers=peers))
    monkeypatch.setattr(os, "_exit", noted("exit"))
    return happened


def test_in_order_it_says_so_waits_for_all_and_goes_on(said):
    processes.leave(0)
    assert said == [("end", 0, False), ("all ended", None), ("close",)]
    assert processes._membership.failed is False


def test_stopped_it_waits_for_all_and_exits(said):
    processes.leave(3)
    assert said == [("end", 3, False), ("all ended", None), ("all gone", FAILED_PATIENCE), ("exit", 3)]
    assert processes._membership.failed is True


def test_failed_it_waits_some_seconds_and_exits(said):
    processes.leave(1, failed=True)
    waits = [("all ended", FAILED_PATIENCE + 1), ("all gone", FAILED_PATIENCE)]
    assert said == [("end", 1, True), *waits, ("exit", 1)]
    assert processes._membership.failed is True
