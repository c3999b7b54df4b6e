"""Our contenders, and those in JAX, compute what the plain NumPy reference does, in every direction and type."""

import dataclasses

import pytest

from raggedmoe.bench.case import DIRECTIONS
from raggedmoe.bench.contender import contenders
from raggedmoe.bench.ours import SAME_AS_AUTO, matmul_kernels
from raggedmoe.bench.run import measure
from raggedmoe.kernels.native.library import why_absent

MODULES = ("raggedmoe.bench.ours", "raggedmoe.bench.peers_jax")


@pytest.mark.product
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("subject", "direction"), [(s, d) for s, directions in DIRECTIONS.items() for d in directions])
def test_results_are_the_references(problem, children_here, subject, direction, dtype):
    results = measure(problem(subject, direction, dtype), contenders(subject, MODULES), children_here, rounds=1)
    left_out = {r.contender: r.reason for r in results if r.reason and "tokamax" not in r.contender}
    left_out = {name: reason for name, reason in left_out.items() if not name.endswith(" experts")}  # of 8 bits
    assert set(left_out.values()) <= {SAME_AS_AUTO, "it differs in the backward pass alone"}, left_out
    assert {"raggedmoe auto", "raggedmoe pure JAX", "jax.lax.ragged_dot"} <= {r.contender for r in results}
    assert all(r.gflops > 0 for r in results if r.seconds)


def test_experts_that_no_token_chose_are_no_reason_to_fail(problem, children_here):
    case = problem("layer", "forward+backward", shape="decode-1")
    (auto, *_) = measure(case, contenders("layer", MODULES)[:1], children_here, rounds=1)
    assert auto.reason is None
    assert auto.gigabytes > 0


@pytest.mark.ci
def test_experts_of_8_bits_are_right_within_their_error_and_read_a_quarter_of_the_bytes(problem, children_here):
    case = problem("layer", "forward", "float32", shape="decode-1")
    ours = [c for c in contenders("layer", MODULES) if c.name == "raggedmoe auto" or c.weights]
    auto, int8, fp8 = measure(case, ours, children_here, rounds=1)
    assert [result.reason for result in (auto, int8, fp8)] == [None] * 3
    for result in (int8, fp8):
        assert result.gigabytes * result.seconds == pytest.approx(auto.gigabytes * auto.seconds / 4)
    # By the tolerance of float32 alone they would be wrong.
    as_exact = [dataclasses.replace(c, weights=None) for c in ours if c.weights == "float8_e4m3fn"]
    assert "wrong result" in measure(case, as_exact, children_here, rounds=1)[0].reason


@pytest.mark.skipif(why_absent() is not None, reason="the C++ kernels are not built here")
def test_a_contender_that_takes_the_kernels_of_auto_is_left_out(problem):
    layer, matmul = problem("layer", "forward", "float32"), problem("grouped_matmul", "forward", "float32")
    reasons = {c.name: c.reason(layer) for c in contenders("layer", MODULES[:1])}
    assert reasons["raggedmoe expert_ffn"] == SAME_AS_AUTO
    assert reasons["raggedmoe auto"] is None is reasons["raggedmoe pure JAX"]
    reasons = {c.name: c.reason(matmul) for c in contenders("grouped_matmul", MODULES[:1])}
    assert reasons["raggedmoe cpu_native"] == SAME_AS_AUTO
    assert matmul_kernels(matmul, "cpu") != matmul_kernels(matmul, "auto")
