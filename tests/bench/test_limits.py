"""Limits do as many FLOPs, or read as many bytes, as the case says, and each library has one."""

import numpy as np
import pytest

from raggedmoe.bench.case import BOTH, DIRECTIONS, SWEEP
from raggedmoe.bench.contender import LIMIT, NOTE, SECOND_LIMIT, contenders
from raggedmoe.bench.limits import dense_operands, orient, read_operands, shared_matmuls
from raggedmoe.bench.run import measure

MODULES = ("raggedmoe.bench.limits",)


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize(("subject", "direction"), [(s, d) for s, directions in DIRECTIONS.items() for d in directions])
def test_products_have_the_useful_flops(problem, subject, direction, groups):
    case = problem(subject, direction)
    flops = 0
    for product, pairs in dense_operands(case, groups):
        for left, right in (orient(product, *pair) for pair in pairs):
            assert left.shape[1] == right.shape[0]
            flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
    assert flops == case.flops


def test_the_reads_are_of_the_active_experts_once(problem):
    for subject in ("layer", "grouped_matmul"):
        for dtype in ("float32", "bfloat16"):
            case = problem(subject, shape="decode-1", dtype=dtype)
            assert sum(array.nbytes for array in read_operands(case)) == case.read_bytes


def test_many_tokens_multiply_and_few_read(problem, children_here):
    many = {(LIMIT, "dense"), (SECOND_LIMIT, "E matrices")}
    for case in (problem("layer", BOTH), problem("grouped_matmul", "drhs")):
        found = measure(case, [c for c in contenders(case.subject, MODULES) if not c.needs], children_here, rounds=1)
        assert {r.reason for r in found} == {None}
        assert {(r.role, r.contender.partition(":")[0]) for r in found} == many
    case = problem("layer", shape="decode-1")
    found = measure(case, [c for c in contenders("layer", MODULES) if not c.needs], children_here, rounds=1)
    assert {(r.role, r.contender.partition(":")[0]) for r in found} == {(LIMIT, "read")}
    assert all(r.gigabytes > 0 for r in found)


def test_a_sweep_reads_the_weights_beside_its_limit(problem):
    (reason,) = {c.why_not(problem("layer")) for c in contenders("layer", MODULES) if c.role == NOTE}
    assert reason == "not a sweep over the number of experts"
    assert {shape.rows for shape in SWEEP} == {16384}


def test_matmuls_shared_over_threads_write_every_tile(problem, monkeypatch):
    written = []
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, b, out: written.append(matmul(a, b, out=out).size))
    case = problem("layer", BOTH)
    shared_matmuls(case, groups=1).run()
    shape = case.sizes
    sizes = {"nt": shape.rows * shape.expert_dim, "nn": shape.rows * shape.model_dim}
    assert sum(written) == sum(sizes.get(p, shape.expert_dim * shape.model_dim) for p in case.products)
