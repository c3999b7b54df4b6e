"""The whole of it on a package of three functions."""

import shutil
from pathlib import Path

import pytest

from tests.mutants.reach import Reach, recorded
from tests.mutants.rules import Mutant
from tests.mutants.run import Review, Verdict, catcher, draw, summary, table, try_mutant
from tests.mutants.tree import Result, Tree

SOURCE = """
LIMIT = 3

def total(a, b):
    return a + b

def is_large(a):
    return a > LIMIT

def largest(a, b):
    return max(a, b)

def never(a):
    return a * 2

START = total(1, 2)
"""
TESTS = """
import pytest
from tiny.arithmetic.sums import is_large, largest

@pytest.mark.parametrize("a", [1, 7])
def test_is_large(a):
    assert is_large(a) == (a == 7)

def test_largest():
    assert largest(1, 2) == 2
"""


@pytest.fixture(scope="module", autouse=True)
def no_plugins():
    """Those that are installed would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        yield


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Tree:
    root = tmp_path_factory.mktemp("tiny")
    for name, text in {
        "src/tiny/__init__.py": "",
        "src/tiny/arithmetic/sums.py": SOURCE,
        "tests/arithmetic/test_sums.py": TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "tests" / "mutants").mkdir()
    shutil.copy(Path(__file__).with_name("plugin.py"), root / "tests" / "mutants")
    return Tree(root, "tiny")


@pytest.fixture(scope="module")
def reach(tree) -> Reach:
    return recorded(tree, ["arithmetic"], ["tests"], workers=1, folder=tree.root / "out")


def only(tree: Tree, function: str, rule: str) -> Mutant:
    (mutant,) = [each for each in tree.mutants("arithmetic") if (each.function, each.rule) == (function, rule)]
    return mutant


def test_only_what_a_test_reaches_and_no_import_is_testable(tree, reach):
    testable = {mutant.function for mutant in tree.mutants("arithmetic") if reach.is_testable(mutant)}
    assert testable == {"is_large", "largest"}
    cases = [f"tests/arithmetic/test_sums.py::test_is_large[{a}]" for a in (1, 7)]
    assert sorted(reach.closest(only(tree, "is_large", "boundary"), 10.0)) == cases


def test_the_closest_tests_are_a_case_of_each_function_and_the_quickest_of_the_folder_first(tree):
    slow_case, quick_case = (f"tests/arithmetic/test_a.py::test_a[{a}]" for a in (1, 2))
    near = "tests/arithmetic/test_a.py::test_b"
    far, far_and_slow, not_reached = (f"tests/elsewhere/test_{a}.py::test_{a}" for a in "cde")
    mutant = only(tree, "is_large", "boundary")
    reach = Reach(
        seconds={slow_case: 2.0, quick_case: 1.0, near: 0.5, far: 0.1, far_and_slow: 9.0, not_reached: 0.1},
        tests={mutant.expression: [slow_case, quick_case, near, far, far_and_slow]},
    )
    assert reach.closest(mutant, 100.0) == [near, quick_case, far, far_and_slow, slow_case]
    assert reach.closest(mutant, 2.0) == [near, quick_case, far]
    assert reach.closest(mutant, 0.0) == [near]


def test_what_was_recorded_is_read_again(tree, reach):
    (kept,) = (tree.root / "out").glob("reach-*.json")
    written = kept.stat().st_mtime_ns
    assert recorded(tree, ["arithmetic"], ["tests"], workers=1, folder=tree.root / "out") == reach
    assert kept.stat().st_mtime_ns == written


def test_a_seed_always_draws_the_same_and_another_one_others(tree):
    everything = Reach(seconds={}, tests={mutant.expression: ["a"] for mutant in tree.mutants("arithmetic")})
    drawn = [draw(tree, "arithmetic", everything, number=3, seed=seed) for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert any(other != drawn[0] for other in drawn[2:])
    assert len({mutant.line for mutant in drawn[0]}) == len(drawn[0]) == 3


def test_a_mutant_is_caught_or_survives_and_the_checkout_stays_as_it_is(tree, reach):
    caught, survivor = only(tree, "largest", "min for max"), only(tree, "is_large", "boundary")
    before = {path: path.read_bytes() for path in tree.root.rglob("*.py")}
    verdicts = [try_mutant(tree, mutant, reach, Review({}), seconds=10.0) for mutant in (caught, survivor)]
    assert verdicts[0].text == "tests/arithmetic/test_sums.py::test_largest"
    assert verdicts[1].text.startswith("SURVIVED 2 tests in ")
    assert [verdict.is_explained for verdict in verdicts] == [True, False]
    assert {path: path.read_bytes() for path in tree.root.rglob("*.py")} == before


def test_the_table_says_what_became_of_each(tree):
    caught, survivor = only(tree, "largest", "min for max"), only(tree, "is_large", "boundary")
    verdicts = [
        Verdict(mutant=caught, caught_by="tests/arithmetic/test_sums.py::test_largest", num_tests=0, seconds=1.0),
        Verdict(mutant=survivor, caught_by=None, num_tests=2, seconds=1.0),
        Verdict(mutant=survivor, caught_by=None, num_tests=1, seconds=1.0, why_not="nobody counts to three"),
    ]
    assert [verdict.is_explained for verdict in verdicts] == [True, False, True]
    assert summary(verdicts) == "3 mutants: 1 caught, 1 change nothing, 1 survived."
    assert table(tree, verdicts).splitlines()[2:] == [
        "| 1 | `arithmetic/sums.py:11` largest | min for max | `max(a, b)` | `min(a, b)` "
        "| tests/arithmetic/test_sums.py::test_largest |",
        "| 2 | `arithmetic/sums.py:8` is_large | boundary | `a > LIMIT` | `(a >= LIMIT)` | SURVIVED 2 tests in 1 s |",
        "| 3 | `arithmetic/sums.py:8` is_large | boundary | `a > LIMIT` | `(a >= LIMIT)` "
        "| survived 1 test in 1 s: nobody counts to three |",
    ]


def test_a_reason_is_for_one_change_of_one_function(tree, tmp_path):
    path = tmp_path / "reviewed.toml"
    path.write_text(
        """
        [[survivor]]
        file = "arithmetic/sums.py"
        function = "is_large"
        rule = "boundary"
        before = "a > LIMIT"
        after = "(a >= LIMIT)"
        why = "nobody counts to three"
        """
    )
    review = Review.read(path)
    assert review.reason(only(tree, "is_large", "boundary"), SOURCE) == "nobody counts to three"
    assert review.reason(only(tree, "largest", "min for max"), SOURCE) is None


@pytest.mark.parametrize(
    ("last", "stopped", "caught_by"),
    [
        (Result("b", "passed", 1.0), False, None),
        (Result("b", "failed", 1.0), False, "b"),
        (Result("b", "started", 1.0), False, "b (the process broke off)"),
        (Result("b", "started", 17.0), True, "b (did not end)"),
        (Result("b", "started", 15.0), True, None),
    ],
)
def test_a_test_that_breaks_off_or_does_not_end_catches_a_mutant(last, stopped, caught_by):
    reach = Reach(seconds={"a": 1.0, "b": 2.0}, tests={})
    assert catcher([Result("a", "passed", 1.0), last], reach, stopped=stopped) == caught_by
