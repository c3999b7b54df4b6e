"""Contenders for the tests, in the file that their processes import."""

import os
import time
from dataclasses import replace

import numpy as np

from raggedmoe.bench.contender import LIMIT, OURS, PEER, Prepared, contender
from raggedmoe.bench.problem import read_array, routing_of

ALLOCATED = 64 * 2**20  # bytes


def _product(case):
    routing, found = routing_of(case.place, case.dtype), {}
    lhs, rhs = (np.asarray(read_array(case.place, name, case.dtype), np.float32) for name in ("lhs", "wi_0"))
    found["value"] = np.zeros((case.sizes.rows, case.sizes.expert_dim), np.float32)
    for expert, rows in routing.groups():
        found["value"][rows] = lhs[rows] @ rhs[expert].T
    return found


def _named(result):
    return result


@contender("right", "trial", role=OURS)
def right(case):
    return Prepared(run=lambda: _product(case), arrays=_named)


@contender("wrong", "trial")
def wrong(case):
    """One row is left out."""

    def run():
        found = _product(case)
        found["value"][-1] = 0
        return found

    return Prepared(run=run, arrays=_named)


@contender("empty", "trial")
def empty(case):
    """Computes nothing at all, and is fast."""
    return Prepared(run=dict, arrays=_named)


@contender("raises", "trial")
def raises(case):
    raise RuntimeError("no such kernel")


@contender("raises later", "trial")
def raises_later(case):
    calls = []

    def run():
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("only once")
        return _product(case)

    return Prepared(run=run, arrays=_named)


@contender("missing", "trial", needs=("no_such_package",))
def missing(case):
    raise AssertionError


@contender("slow limit", "trial", role=LIMIT)
def slow_limit(case):
    return Prepared(run=lambda: time.sleep(0.05))


@contender("fast limit", "trial", role=LIMIT)
def fast_limit(case):
    return Prepared(run=lambda: time.sleep(0.01))


@contender("dies", "process")
def dies(case):
    os.write(2, b"the last words\n")
    os.kill(os.getpid(), 9)
    return Prepared(run=dict)


@contender("allocates", "process", role=PEER)
def allocates(case):
    return Prepared(run=lambda: np.ones(ALLOCATED, np.uint8))


@contender("environment", "process", environment={"OPENBLAS_NUM_THREADS": "1"})
def environment(case):
    names = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "RAGGEDMOE_CPU_ISA", "OPENBLAS_NUM_THREADS")
    raise RuntimeError(" ".join(f"{name}={os.environ.get(name)}" for name in names))


def tiny(shape, **sizes):
    """A shape with sizes for a test."""
    small = {"tokens": 24, "model_dim": 32, "expert_dim": 48, "num_experts": 8, "experts_per_token": 2}
    return replace(shape, **{**small, **sizes})
