"""Our contenders, and those in JAX, compute what the plain NumPy reference does, in every direction and type."""

import pytest

from raggedmoe.bench.case import DIRECTIONS
from raggedmoe.bench.contender import contenders
from raggedmoe.bench.run import measure

MODULES = ("raggedmoe.bench.ours", "raggedmoe.bench.peers_jax")


@pytest.mark.product
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("subject", "direction"), [(s, d) for s, directions in DIRECTIONS.items() for d in directions])
def test_results_are_the_references(problem, children_here, subject, direction, dtype):
    results = measure(problem(subject, direction, dtype), contenders(subject, MODULES), children_here, rounds=1)
    assert {r.reason for r in results if not r.contender.startswith("tokamax")} == {None}
    assert {"raggedmoe auto", "raggedmoe pure JAX", "jax.lax.ragged_dot"} <= {r.contender for r in results}
    assert all(r.gflops > 0 for r in results if r.seconds)


def test_experts_that_no_token_chose_are_no_reason_to_fail(problem, children_here):
    case = problem("layer", "forward+backward", shape="decode-1")
    (auto, *_) = measure(case, contenders("layer", MODULES)[:1], children_here, rounds=1)
    assert auto.reason is None
    assert auto.gigabytes > 0
