"""What each rule makes of a line, and what all of them leave alone."""

import textwrap
from pathlib import Path

import pytest

from tests.mutants.reach import with_probes
from tests.mutants.rules import RULES, mutants_of
from tests.mutants.run import Review, review_key
from tests.mutants.tree import Tree

CHANGES = [
    ("off by one", "x[0]", "x[1]"),
    ("off by one", "x[:-1]", "x[:-2]"),
    ("off by one", "number + 1", "number + 2"),
    ("off by one", "range(1, b)", "range(2, b)"),
    ("wrong axis", "x.sum(axis=0)", "x.sum(axis=1)"),
    ("wrong axis", "x.sum(axis=1)", "x.sum(axis=0)"),
    ("wrong axis", "x.sum(axis=-1)", "x.sum(axis=-2)"),
    ("mask dropped", "jnp.where(mask, a, 0)", "a"),
    ("mask dropped", "a & b", "a"),
    ("mask inverted", "jnp.where(mask, a, 0)", "jnp.where(mask, 0, a)"),
    ("sign", "a - b", "(a + b)"),
    ("sign", "a + b", "(a - b)"),
    ("sign", "-a", "a"),
    ("term missing", "a + b", "a"),
    ("normaliser missing", "a / b", "a"),
    ("normaliser missing", "x.mean(axis=-1)", "x.sum(axis=-1)"),
    ("normaliser missing", "2 * ((a + b) / c)", "2 * ((a + b))"),
    ("factor missing", "a * b", "a"),
    ("rounding", "a // b", "(-(-a // b))"),
    ("boundary", "a < b", "(a <= b)"),
    ("boundary", "0 <= a < b", "(0 < a < b)"),
    ("condition inverted", "a if b else c", "a if (not b) else c"),
    ("condition inverted", "not a", "a"),
    ("condition inverted", "[a for a in b if c]", "[a for a in b if (not c)]"),
    ("and for or", "a or b", "(a and b)"),
    ("min for max", "jnp.maximum(a, b)", "jnp.minimum(a, b)"),
    ("min for max", "min(a, b)", "max(a, b)"),
    ("arguments swapped", "f(a, b[0])", "f(b[0], a)"),
    ("ranks swapped", "[(i, j) for i in b]", "[(j, i) for i in b]"),
    ("ranks swapped", "lax.axis_index(a)", "(lax.psum(1, a) - 1 - lax.axis_index(a))"),
    ("wrong constant", "0.5", "1.0"),
    ("wrong constant", "0.0", "1.0"),
    ("wrong flag", "f(tiled=True)", "f(tiled=False)"),
]


@pytest.mark.parametrize(("rule", "before", "after"), CHANGES)
def test_a_rule_changes_what_it_says(rule, before, after):
    source = f"def f(x, a, b):\n    y = {before}  # µ\n    return y\n"
    made = [mutant.apply(source) for mutant in mutants_of("file.py", source) if mutant.rule == rule]
    assert f"def f(x, a, b):\n    y = {after}  # µ\n    return y\n" in made


def test_a_call_that_nobody_reads_is_skipped():
    (mutant,) = mutants_of("file.py", "def write(file):\n    os.fsync(file)\n")
    assert (mutant.rule, mutant.function, mutant.line) == ("call skipped", "write", 2)
    assert mutant.apply("def write(file):\n    os.fsync(file)\n") == "def write(file):\n    None\n"


def test_what_a_backward_pass_returns_is_replaced_by_zeros():
    source = "class Matmul:\n    def backward(self, g):\n        return g @ b, None, a\n"
    made = [mutant for mutant in mutants_of("file.py", source) if mutant.rule == "gradient missing"]
    assert [mutant.replacement for mutant in made] == ["(0 * (g @ b))", "(0 * a)"]
    assert {mutant.function for mutant in made} == {"Matmul.backward"}


def test_every_rule_is_tested():
    assert {rule for rule, *_ in CHANGES} | {"call skipped", "gradient missing"} == set(RULES)


@pytest.mark.parametrize(
    "source",
    [
        "TABLE = {'a': 1 + 1, 'b': max(1, 2)}",
        "def f(a: x[0] = 1 + 1) -> y[1]: ...",
        "def f():\n    a: x[0]",
        "def f():\n    return folder / name, a / 'b', a / NAME",
        "def f():\n    raise ValueError(a + b)",
        "def f():\n    assert a < b, a + b",
        "def f():\n    return f'{a + b}'",
        "def f():\n    'a docstring'",
        "def f():\n    log.warning(a + b, c)",
        "def note(call):\n    return a < b",
        "class A:\n    def __repr__(self):\n        return str(a + b)",
        "def f():\n    b = os.kill(-a, b)\n    return shutil.rmtree(a + b)",
    ],
)
def test_what_changes_no_result_is_left_alone(source):
    assert mutants_of("file.py", source) == []


def test_probes_change_no_value():
    source = textwrap.dedent(
        """
        def f(a, b):
            if (sum := a[0] + b[-1]) < 3 and not (a if b else 0):
                return [x // 2 for x in b if x > 1]
            return (lambda x: x - 1)(sum), max(a), -sum
        """
    )
    expressions = {mutant.expression: mutant for mutant in mutants_of("file.py", source)}
    reached = []
    plain: dict = {}
    probed: dict = {"__reached__": reached.append}
    exec(source, plain)
    exec(with_probes(source, dict(enumerate(expressions.values()))), probed)
    for a, b in ([0], [1, 4]), ([3], [1]), ([0], []):
        try:
            expected = plain["f"](a, b)
        except IndexError:
            continue
        assert probed["f"](a, b) == expected
    assert set(reached) <= set(range(len(expressions)))
    assert len(set(reached)) > len(expressions) / 2


def test_every_reviewed_mutant_is_still_one():
    """A reason outlives neither its code nor its rule."""
    here = Path(__file__)
    tree = Tree(here.resolve().parents[2], "raggedmoe")
    reasons = Review.read(here.with_name("reviewed.toml")).reasons
    made = set()
    for file in {key[0] for key in reasons}:
        source = (tree.sources / file).read_text()
        made |= {review_key(mutant, source) for mutant in mutants_of(file, source)}
    assert set(reasons) - made == set()
