"""JAX versions as data."""

import pytest

from raggedmoe.compat import GUARDS, JAX_VERSION, Guard, in_versions, version_why_not

BAD = Guard(
    implementation="grouped_matmul/fancy",
    broken_from="0.11.0",
    fixed_in="0.11.2",
    reason="writes past the end",
    evidence="test_x",
)
FOREVER = Guard(implementation="expert_ffn/fancy", broken_from="0.12.1", reason="does not lower", evidence="test_y")


@pytest.mark.parametrize("implementation", ["grouped_matmul/cpu", "expert_ffn/anything"])
def test_a_jax_older_than_the_oldest_tested_is_refused_for_all(implementation):
    reason = version_why_not(implementation, "0.9.0")
    assert reason.startswith("JAX 0.9.0: raggedmoe is tested from JAX 0.10.2 on")
    assert "use JAX 0.10.2 or newer" in reason


@pytest.mark.parametrize("version", [JAX_VERSION, "0.10.2", "0.12.0", "0.13.0.dev20270101", "1.0"])
def test_tested_and_newer_versions_are_accepted(version):
    assert version_why_not("grouped_matmul/cpu", version, GUARDS) is None


@pytest.mark.parametrize(
    ("version", "broken"),
    [
        ("0.10.9", False),
        ("0.11.0.dev1", False),
        ("0.11.0", True),
        ("0.11.1", True),
        ("0.11.2.dev20270101", True),  # may precede the fix
        ("0.11.2", False),
        ("0.13.0.dev20270101", False),
    ],
)
def test_a_guard_holds_from_its_first_to_before_its_fixed_version(version, broken):
    assert (version_why_not("grouped_matmul/fancy", version, (BAD,)) is not None) == broken


def test_a_guard_says_version_reason_remedy_and_how_it_was_found():
    assert version_why_not("grouped_matmul/fancy", "0.11.1", (BAD,)) == (
        "JAX 0.11.1: writes past the end; use JAX 0.11.2 or newer (test_x)"
    )


def test_a_guard_without_a_fix_holds_for_unreleased_versions_too():
    reason = version_why_not("expert_ffn/fancy", "0.13.0.dev20270101", (BAD, FOREVER))
    assert "use JAX before 0.12.1" in reason


def test_a_guard_is_for_its_own_implementation_only():
    assert version_why_not("grouped_matmul/plain", "0.11.1", (BAD, FOREVER)) is None


@pytest.mark.parametrize(
    ("version", "inside"),
    [("0.10.1", False), ("0.10.2", True), ("0.11.5", True), ("0.12.0", True), ("0.12.1", False)],
)
def test_in_versions_includes_both_ends(version, inside):
    assert in_versions(version, "0.10.2", "0.12.0") == inside
    assert in_versions(version, None, None)
