"""Processes of contenders: what they are started with, and what becomes of one that dies or hangs."""

import signal

import pytest

from raggedmoe.bench.child import write_case
from raggedmoe.bench.children import Child, ChildError, Children
from raggedmoe.bench.contender import contenders
from raggedmoe.bench.machine import isa_environment
from raggedmoe.bench.run import measure
from tests.bench.trial_contenders import ALLOCATED

pytestmark = pytest.mark.ci  # each process imports JAX
MODULE = ("tests.bench.trial_contenders",)


def test_a_dead_process_is_a_failure_and_its_last_words_are_shown(problem):
    # Without a reference for this subject nothing is compared: the case is one of a grouped matmul all the same.
    everyone = contenders("process", MODULE)
    with Children(isa_environment("avx2")) as children:
        results = {r.contender: r for r in measure(problem(), everyone, children, rounds=1)}
        assert results["dies"].failed
        assert results["dies"].reason == "its process was killed by signal 9: the last words"
        restricted = "ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 RAGGEDMOE_CPU_ISA=avx2 OPENBLAS_NUM_THREADS=1"
        assert results["environment"].reason == f"RuntimeError: {restricted}"
        allocates = next(c for c in everyone if c.name == "allocates")
        question = {"do": "prepare", "key": "a", "address": allocates.address, "case": write_case(problem())}
        peak = children.ask(allocates.process, {}, question)["peak"]
        assert peak is None or ALLOCATED * 0.98 < peak < ALLOCATED * 1.5
        assert set(children.ask(allocates.process, {}, {"do": "go", "key": "a"})) == {"seconds"}


def test_a_hanging_process_is_ended_and_an_unknown_call_is_an_error(problem):
    child = Child({})
    with pytest.raises(ChildError, match="KeyError: 'nothing'"):
        child.ask({"do": "go", "key": "nothing"})
    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ChildError, match="no answer within 0 s"):
        child.ask({"do": "go", "key": "nothing"}, seconds=0)
    assert not child.is_alive
