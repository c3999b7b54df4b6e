"""The short version of the compile matrix, and what the matrix makes of its answers."""

import itertools

import pytest

from raggedmoe.aot.case import CRASHED, FAILED, PASSED, REFUSED, CompileOutcome
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import BACKWARD, FORWARD, OPERATIONS
from tests.aot import matrix
from tests.aot.marks import NEEDS_LIBTPU
from tests.aot.matrix import Answer, Entry

ENTRY = Entry(
    operation="attention", implementation="splash", call="sinks", dtype="float32", direction=FORWARD, chip="v6e"
)


def outcome(verdict, error=None, entry=ENTRY):
    return CompileOutcome(case=entry.case(), verdict=verdict, error=error)


@pytest.mark.both_ends
@pytest.mark.parametrize("chip", [pytest.param(chip, marks=NEEDS_LIBTPU) for chip in matrix.TOPOLOGIES])
def test_every_kernel_compiles_where_it_says_that_it_can_and_nowhere_else(chip):
    found = matrix.answers(matrix.short_entries(chip))
    assert [answer.contradiction for answer in found if answer.contradiction] == []


REFUSAL = "attention (forward) on v6e: no implementation in 'splash' can run: splash: takes no float16"


@pytest.mark.parametrize(
    ("answer", "contradiction"),
    [
        (Answer(entry=ENTRY, outcome=outcome(PASSED)), None),
        (Answer(entry=ENTRY, outcome=outcome(FAILED, "no room")), "attention/splash sinks .* on v6e: fail: no room"),
        (Answer(entry=ENTRY, outcome=outcome(CRASHED, "signal SIGABRT")), "crash: signal SIGABRT"),
        (Answer(entry=ENTRY, outcome=outcome(REFUSED, REFUSAL), past_guard=outcome(CRASHED, "F0000")), None),
        (Answer(entry=ENTRY, outcome=outcome(REFUSED, REFUSAL), past_guard=outcome(FAILED, "no")), None),
        (
            Answer(entry=ENTRY, outcome=outcome(REFUSED, REFUSAL), past_guard=outcome(PASSED)),
            r"on v6e: refused \(takes no float16\), but it compiles",
        ),
    ],
)
def test_a_guard_and_the_compiler_must_agree(answer, contradiction):
    if contradiction is None:
        assert answer.contradiction is None
    else:
        with pytest.raises(AssertionError, match=contradiction):
            raise AssertionError(answer.contradiction)


def test_a_refusal_for_its_meaning_is_not_compiled_past():
    refused = outcome(
        REFUSED, "no implementation in 'splash' can run: splash: its mask is static: it takes no positions"
    )
    assert Answer(entry=ENTRY, outcome=refused).by_meaning
    assert not Answer(entry=ENTRY, outcome=outcome(REFUSED, REFUSAL)).by_meaning


def test_every_claim_on_a_tpu_is_in_the_matrix_in_both_directions_and_types():
    claims = {(each.full_name, chip) for each in matrix.claimants() for chip in matrix.TOPOLOGIES}
    asked = list(matrix.entries())
    for direction in (FORWARD, BACKWARD):
        for dtype in matrix.DTYPES:
            of_these = [entry for entry in asked if (entry.direction, entry.dtype) == (direction, dtype)]
            assert {(entry.full_name, entry.chip) for entry in of_these} == claims
    assert {name for name, _ in claims} >= {"grouped_matmul/xla", "grouped_matmul/pallas_tpu", "attention/splash"}


def test_every_kernel_is_asked_for_every_call_on_some_chip_and_the_first_two_on_all():
    asked = list(matrix.entries())
    for kernel in filter(matrix.is_kernel, matrix.claimants()):
        calls = {(entry.call, entry.chip) for entry in asked if entry.full_name == kernel.full_name}
        assert calls >= set(itertools.product(matrix.CALLS[kernel.operation][:2], matrix.TOPOLOGIES))
        known = {*matrix.CALLS[kernel.operation], *matrix.PRODUCTION[kernel.operation]}
        known |= set(matrix.QUANTIZED[kernel.operation] if kernel.quantized else ())
        assert {call for call, _ in calls} == known


def test_the_short_matrix_has_every_kernel_on_every_chip():
    kernels = {name for name in {e.full_name for e in matrix.entries()} if not name.endswith(("reference", "xla"))}
    for chip in matrix.TOPOLOGIES:
        found = {entry.full_name for entry in matrix.short_entries(chip)}
        assert found <= kernels
        assert found >= {"grouped_matmul/pallas_tpu", "grouped_matmul/megablox", "expert_ffn/pallas_tpu"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_matrixs_calls_are_known(name):
    named = {call for call in (*matrix.CALLS[name], *matrix.PRODUCTION[name]) if "=" not in call}
    assert named <= {spec.name for spec in operation(name).specs}
    assert {*matrix.QUANTIZED.get(name, ())} <= {spec.name for spec in operation(name).quantized_specs}


def test_a_section_is_replaced_by_the_same_versions_and_stands_beside_others(monkeypatch):
    monkeypatch.setattr(matrix, "JAX_VERSION", "0.12.0")
    before = "# Matrix\n\nHow.\n\n## JAX 0.10.2, libtpu 1\n\nold\n\n## JAX 0.12.0, libtpu 2\n\nold\n"
    after = matrix.written(before, "## JAX 0.12.0, libtpu 3\n\nnew\n")
    assert after == "# Matrix\n\nHow.\n\n## JAX 0.10.2, libtpu 1\n\nold\n\n## JAX 0.12.0, libtpu 3\n\nnew\n"


def test_the_table_counts_what_compiled_was_refused_and_was_wrong():
    other = Entry(**{**vars(ENTRY), "chip": "v5e"})
    found = [
        Answer(entry=ENTRY, outcome=outcome(PASSED)),
        Answer(entry=ENTRY, outcome=outcome(REFUSED, REFUSAL), past_guard=outcome(FAILED, "no such type")),
        Answer(entry=other, outcome=outcome(FAILED, "no room", other)),
    ]
    text = matrix.section(found)
    assert "| `attention/splash` | 0 / 0 | 0 / 0 **1 wrong** | 0 / 0 | 1 / 1 | 0 / 0 |" in text
    assert "- `attention/splash`: takes no float16. Without the guard: no such type" in text
