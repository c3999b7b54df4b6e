"""The peers that need torch and transformers, in processes of their own."""

from importlib.util import find_spec

import pytest

from raggedmoe.bench.case import DIRECTIONS
from raggedmoe.bench.children import Children
from raggedmoe.bench.contender import contenders
from raggedmoe.bench.run import measure

NEEDED = [name for name in ("torch", "transformers") if find_spec(name) is None]
MODULES = ("raggedmoe.bench.peers_torch", "raggedmoe.bench.peers_transformers")


@pytest.mark.ci
@pytest.mark.skipif(bool(NEEDED), reason=f"needs {' and '.join(NEEDED)}")
def test_results_are_the_references(problem):
    with Children() as children:
        for subject, directions in DIRECTIONS.items():
            for direction in directions:
                for dtype in ("float32", "bfloat16"):
                    case = problem(subject, direction, dtype)
                    results = measure(case, contenders(subject, MODULES), children, rounds=1)
                    assert {r.reason for r in results} == {None}, (case.name, dtype)
                    assert len(results) == (3 if subject == "layer" else 2)


def test_batched_mm_is_left_out_where_its_copies_do_not_fit(problem):
    (batched,) = (c for c in contenders("layer", MODULES) if c.name == "transformers batched_mm")
    assert batched.why_not(problem("layer")) is None
    assert "would copy" in batched.why_not(problem_of_mixtral())


def problem_of_mixtral():
    from dataclasses import replace
    from pathlib import Path

    from raggedmoe.bench.case import SHAPES, shape_case

    large = replace(SHAPES["mixtral"], tokens=10**6)
    return shape_case("layer", large, "float32", "forward", Path(), 16)
