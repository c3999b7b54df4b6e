"""What is said of a checkpoint whose tensors are not its configuration's."""

from pathlib import Path

from raggedmoe.interop.matching import _report


def test_as_many_names_as_are_listed_leave_none_more():
    names = ["a", "b", "c"]
    assert "more" not in _report(Path("x"), {"missing": names}, most=3)
    assert _report(Path("x"), {"missing": names}, most=2).endswith("    b\n    and 1 more")
