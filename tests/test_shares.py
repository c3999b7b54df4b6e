import pytest

from tests.shares import alternate, covering, function_of, share_of

CASES = {"a.py::alone": 1, "a.py::pair": 2, "a.py::odd": 5, "b.py::many": 64}
NAMES = [f"{test}[{dtype}-{i}]" for test, n in CASES.items() for i, dtype in zip(range(n), ("f32", "bf16") * n)]


def test_every_test_is_in_both_shares_and_every_case_in_one():
    first, second = share_of(NAMES, "1/2"), share_of(NAMES, "2/2")
    assert first | second == set(NAMES)
    assert first & second == {"a.py::alone[f32-0]"}
    assert {function_of(name) for name in first} == {function_of(name) for name in second} == set(CASES)


def test_what_runs_at_one_end_is_in_one_share_and_half_of_it_in_each():
    first, second = alternate(NAMES, "1/2"), alternate(NAMES, "2/2")
    assert first | second == set(NAMES)
    assert not first & second
    assert abs(len(first) - len(second)) <= 1


def test_a_few_cases_have_every_word():
    names = [f"a.py::t[{x}-{y}-z]" for x in ("one", "two", "three") for y in ("cpu", "xla")] + ["a.py::alone"]
    found = covering(names)
    assert "a.py::alone" in found
    assert len(found) == 4
    assert {word for name in found for word in name.partition("[")[2].rstrip("]").split("-")} >= {
        *("one", "two", "three", "cpu", "xla", "z")
    }
    assert covering(names) == found


def test_shares_do_not_follow_a_parameter():
    half = [name for name in share_of(NAMES, "1/2") if name.startswith("b.py::many[f32")]
    assert 8 < len(half) < 24


def test_a_share_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="a share is like 1/2, the first of two, got 3/2"):
        share_of(NAMES, "3/2")
