"""Which implementation is chosen, and what is said of the others. Fakes are data given to `select`."""

import dataclasses
import errno
import functools
import json
import logging
import pwd
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from raggedmoe import Directions, KernelChoice, grouped_matmul
from raggedmoe.cli.verify import verify
from raggedmoe.compat import JAX_VERSION
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.proof import (
    PLAIN_XLA,
    Certificate,
    Level,
    Proof,
    drop_certificates,
    level_on,
    libtpu_version,
    read_certificates,
    source_digest,
    write_certificate,
)
from raggedmoe.kernels.registry import (
    BACKWARD,
    FORWARD,
    OPERATIONS,
    Call,
    Implementation,
    candidates,
    implementations,
    recorded_selections,
    select,
)

CPU, TPU = HARDWARE["cpu"], HARDWARE["tpu7x"]
CALL = Call(operation="grouped_matmul", arrays={"lhs": jax.ShapeDtypeStruct((8, 2880), "bfloat16")})
COMPILED = (Proof(level=Level.COMPILED, chips=("tpu7x",), shown_by="an ahead-of-time compile"),)


def fake(name, reason=None, place=1, proofs=PLAIN_XLA, platforms=("cpu", "gpu", "tpu"), preference=None):
    return Implementation(
        operation="grouped_matmul",
        name=name,
        forward=lambda *args: pytest.fail("selection must not run anything"),
        backward=lambda *args: pytest.fail("selection must not run anything"),
        rank=dict.fromkeys(platforms, place),
        proofs=proofs,
        why_not=lambda call, hardware: reason,
        auto_why_not=lambda call, hardware: preference,
    )


def table(*fakes):
    return {implementation.name: implementation for implementation in fakes}


def chosen(choice, known, hardware=TPU, direction=FORWARD, certificates=()):
    call = dataclasses.replace(CALL, direction=direction)
    return select(call, choice, hardware, certificates=certificates, known=known).chosen.name


THREE = table(fake("slow", place=3), fake("fast", place=1), fake("middling", place=2))


@pytest.mark.parametrize(
    ("choice", "forward", "backward"),
    [
        ("auto", "fast", "fast"),
        ("slow", "slow", "slow"),
        (("middling", "fast"), "middling", "middling"),
        (Directions(forward="slow"), "slow", "fast"),
        (Directions(forward="auto", backward=("middling", "slow")), "fast", "middling"),
    ],
)
def test_a_choice_is_followed_in_each_direction(choice, forward, backward):
    assert (chosen(choice, THREE), chosen(choice, THREE, direction=BACKWARD)) == (forward, backward)


@pytest.mark.parametrize("choice", ["sloow", ("fast", "sloow"), Directions(forward="sloow")])
def test_an_unknown_name_is_refused_with_the_nearest(choice):
    message = "unknown implementation of grouped_matmul, 'sloow': expected one of auto, slow, fast, middling"
    with pytest.raises(ValueError, match=f"{message}; did you mean 'slow'"):
        chosen(choice, THREE)


@pytest.mark.parametrize("choice", [(), Directions(forward=())])
def test_an_empty_choice_is_refused(choice):
    with pytest.raises(
        ValueError, match=re.escape("expected 'auto', a name, a non-empty tuple of names or Directions")
    ):
        chosen(choice, THREE)


def test_a_kernel_choice_is_checked_when_it_is_made():
    with pytest.raises(ValueError, match=r"unknown implementation of expert_ffn, 'xlb'.*did you mean 'xla'"):
        KernelChoice(expert_ffn=Directions(backward="xlb"))


def test_a_tuple_falls_through_and_says_each_skip_once(caplog):
    known = table(fake("a", "needs widths of 128"), fake("b", "needs a GPU"), fake("c"))
    with caplog.at_level(logging.WARNING, logger="raggedmoe"):
        assert [chosen(("a", "b", "c"), known) for _ in range(3)] == ["c", "c", "c"]
    assert [record.getMessage() for record in caplog.records if record.name == "raggedmoe"] == [
        "grouped_matmul/a (forward) on tpu7x not used: needs widths of 128",
        "grouped_matmul/b (forward) on tpu7x not used: needs a GPU",
    ]


def test_if_none_can_run_one_error_lists_every_reason():
    known = table(fake("d", "needs widths of 512"), fake("e", "needs a moon"))
    message = (
        "grouped_matmul (forward) on tpu7x: no implementation in ('d', 'e') can run:\n"
        "  d: needs widths of 512\n  e: needs a moon"
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        chosen(("d", "e"), known)


def test_a_named_implementation_is_never_substituted():
    known = table(fake("f", "needs a sun"), fake("g"))
    with pytest.raises(NotImplementedError, match="f: needs a sun"):
        chosen("f", known)


def test_a_jax_version_too_old_is_a_reason():
    (candidate,) = candidates(CALL, "fast", TPU, jax_version="0.9.1", known=THREE)
    assert candidate.reason.startswith("JAX 0.9.1: raggedmoe is tested from JAX 0.10.2 on")


def test_auto_leaves_out_what_is_not_offered_on_the_platform_unless_named():
    known = table(fake("h", platforms=("cpu",)), fake("i", place=9))
    assert (chosen("auto", known), chosen("h", known), chosen("auto", known, CPU)) == ("i", "h", "h")
    reasons = {c.implementation.name: c.reason for c in candidates(CALL, "auto", TPU, known=known)}
    assert reasons == {"h": "auto does not offer it on tpu; it runs when named", "i": None}


def test_what_auto_would_rather_not_take_is_said_quietly_and_runs_when_named(caplog):
    known = table(fake("greedy", preference="would hold 9 GiB"), fake("frugal", place=2))
    with caplog.at_level(logging.INFO, logger="raggedmoe"):
        assert [chosen(choice, known) for choice in ("auto", "greedy", ("greedy", "frugal"))] == [
            "frugal",
            "greedy",
            "greedy",
        ]
    assert [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "raggedmoe"] == [
        ("INFO", "grouped_matmul/greedy (forward) on tpu7x not used: would hold 9 GiB")
    ]


# Proof


def certificate(**changes):
    fields = {
        "implementation": "grouped_matmul/sparse",
        "source": source_digest(),
        "chip": "tpu7x",
        "jax_version": JAX_VERSION,
        "libtpu_version": libtpu_version(),
        "cases": 12,
        "worst_error": 0.4,
        "seconds": 3.0,
    }
    return Certificate(**fields | changes)


SPARSE = table(fake("sparse", place=1, proofs=COMPILED), fake("plain", place=2))


def test_auto_does_not_take_what_was_only_compiled():
    assert chosen("auto", SPARSE) == "plain"
    first = candidates(CALL, "auto", TPU, known=SPARSE)[0]
    assert (first.level, first.shown_by) == (Level.COMPILED, "an ahead-of-time compile")
    assert first.reason == "only compiled on tpu7x; name it, or run `raggedmoe verify` on such a chip"


def test_what_was_only_compiled_is_taken_when_named():
    assert chosen("sparse", SPARSE) == "sparse"


def test_a_matching_certificate_lets_auto_take_it():
    assert chosen("auto", SPARSE, certificates=(certificate(),)) == "sparse"
    (first, _) = candidates(CALL, "auto", TPU, certificates=(certificate(),), known=SPARSE)
    assert first.level == Level.RUN


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "0123456789abcdef"},
        {"libtpu_version": "0.0.1"},
        {"chip": "v6e"},
        {"jax_version": "0.10.99"},
        {"implementation": "grouped_matmul/other"},
        {"implementation": "expert_ffn/sparse"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_certificate_of_something_else_does_not_count(changes):
    assert chosen("auto", SPARSE, certificates=(certificate(**changes),)) == "plain"


def test_a_written_certificate_is_read_again(tmp_path):
    assert read_certificates(tmp_path) == ()
    path = write_certificate(certificate(), tmp_path)
    assert path.parent == tmp_path
    assert read_certificates(tmp_path) == (certificate(),)


def test_threads_that_write_one_certificate_do_not_disturb_each_other(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda _: write_certificate(certificate(), tmp_path), range(200)))
    assert list(tmp_path.iterdir()) == [paths[0]]
    assert read_certificates(tmp_path) == (certificate(),)


def test_a_certificate_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(self, text):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_certificate(certificate(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_has_no_certificates_and_is_told_where_they_could_be(monkeypatch):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_DATA_HOME", "RAGGEDMOE_CERTIFICATES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    read_certificates.cache_clear()
    assert read_certificates() == ()
    assert drop_certificates("grouped_matmul/sparse", "tpu7x") == []
    with pytest.raises(ValueError, match="got a user without a home; set RAGGEDMOE_CERTIFICATES or HOME"):
        write_certificate(certificate())
    with pytest.raises(ValueError, match="got a user without a home"):  # at once, not after all comparisons
        verify(("grouped_matmul",))
    read_certificates.cache_clear()


DEEP, LONG = "[" * 100_000, '{"cases": 1%s}' % ("0" * 5_000)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", json.dumps({"chip": "tpu7x"}), '"\\ud800', DEEP, LONG],
    ids=["cut", "list", "incomplete", "no text", "deep", "long number"],
)
def test_a_corrupt_certificate_is_warned_about_and_ignored(tmp_path, caplog, text):
    write_certificate(certificate(), tmp_path)
    (tmp_path / "broken.json").write_text(text)
    with caplog.at_level(logging.WARNING, logger="raggedmoe"):
        assert read_certificates(tmp_path) == (certificate(),)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "broken.json ignored" in message
    assert "run `raggedmoe verify`" in message


@pytest.mark.parametrize(
    ("hardware", "version", "level"),
    [
        ("tpu7x", "0.11.0", Level.RUN),
        ("tpu7x", "0.10.2", Level.COMPILED),
        ("tpu7x", "0.12.1", Level.COMPILED),
        ("v6e", "0.11.0", Level.COMPILED),
        ("cpu", "0.11.0", Level.UNPROVEN),
    ],
)
def test_the_best_proof_for_chip_and_version_counts(hardware, version, level):
    run = Proof(level=Level.RUN, chips=("tpu7x",), first_jax="0.10.3", last_jax="0.12.0", shown_by="a run")
    proofs = (run, Proof(level=Level.COMPILED, platforms=("tpu",), shown_by="a compile"))
    assert level_on("grouped_matmul/x", proofs, HARDWARE[hardware], version, ())[0] == level


def test_no_implementation_claims_to_have_run_where_the_tests_cannot():
    for name in OPERATIONS:
        for implementation in implementations(name).values():
            for chip in HARDWARE.values():
                level, _ = level_on(implementation.full_name, implementation.proofs, chip, JAX_VERSION, ())
                assert level < Level.RUN or chip is CPU


# The target


ARRAYS = (
    jax.ShapeDtypeStruct((8, 4), "float32"),
    jax.ShapeDtypeStruct((2, 4, 3), "float32"),
    jax.ShapeDtypeStruct((2,), "int32"),
)


def test_two_meshes_never_share_a_trace(abstract_mesh):
    function = jax.jit(grouped_matmul)
    seen = {}
    for platform, kind in [("tpu", "TPU7x"), ("cpu", "cpu"), ("tpu", "TPU v5")] * 2:
        with jax.sharding.use_abstract_mesh(abstract_mesh(platform, kind)):
            seen.setdefault(kind, set()).add("ragged_dot" in str(function.trace(*ARRAYS).jaxpr))
    assert seen == {"TPU7x": {True}, "cpu": {False}, "TPU v5": {True}}


def test_two_chips_given_by_hand_never_share_a_trace():
    function = jax.jit(grouped_matmul, static_argnames="hardware")
    seen = ["pallas_call" in str(function.trace(*ARRAYS, hardware=name).jaxpr) for name in ("tpu7x", "cpu", "tpu7x")]
    assert seen == [True, False, True]


def test_selections_are_for_the_mesh_in_use(abstract_mesh):
    with jax.sharding.use_abstract_mesh(abstract_mesh("tpu", "TPU7x")), recorded_selections() as selections:
        jax.eval_shape(functools.partial(grouped_matmul), *ARRAYS)
    assert [(s.hardware.name, s.call.direction, s.chosen.name) for s in selections] == [
        ("tpu7x", FORWARD, "xla"),
        ("tpu7x", BACKWARD, "xla"),
    ]


def test_selections_outside_the_recording_are_not_kept():
    with recorded_selections() as selections:
        pass
    jax.eval_shape(functools.partial(grouped_matmul), *ARRAYS)
    assert selections == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_its_reference_and_is_chosen_last(name):
    op = operation(name)
    example = op.specs[0].example("float32")
    with recorded_selections() as selections:
        jax.eval_shape(lambda arrays: op.function(**arrays, **example.options), dict(example.arrays))
    call = selections[0].call
    for chip in HARDWARE.values():
        order = [c.implementation.name for c in candidates(call, "auto", chip) if c.reason is None]
        assert order[-1] == "reference" != order[0]


def test_an_unknown_operation_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown operation 'ragged_gathr'.*did you mean 'ragged_gather'"):
        operation("ragged_gathr")


def test_a_bad_name_is_refused_by_the_operation_itself():
    with pytest.raises(ValueError, match="did you mean 'xla'"):
        grouped_matmul(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), jnp.array([2]), implementation="xl")


def test_a_failure_withdraws_its_own_certificates_and_no_others(tmp_path):
    mine = write_certificate(certificate(), tmp_path)
    other = write_certificate(certificate(chip="v6e"), tmp_path)
    (tmp_path / "broken.json").write_text("{")
    assert drop_certificates("grouped_matmul/sparse", "tpu7x", tmp_path) == [mine]
    assert not mine.exists()
    assert other.exists()


# A JAX that a kernel was never compiled with


def test_a_named_kernel_that_nothing_shows_to_work_with_this_jax_runs_with_a_warning(caplog):
    compiled = (Proof(level=Level.COMPILED, chips=("tpu7x",), first_jax="0.10.2", last_jax="0.12.0.1", shown_by="x"),)
    known = table(fake("guarded", place=1, proofs=compiled), fake("plain", place=2))
    with caplog.at_level(logging.WARNING, logger="raggedmoe"):
        assert select(CALL, "guarded", TPU, known=known, jax_version="0.12.0").chosen.name == "guarded"
        assert not caplog.records
        assert select(CALL, "guarded", TPU, known=known, jax_version="0.13.0").chosen.name == "guarded"
    (record,) = caplog.records
    said = "runs as it was named: with JAX 0.13.0 it is unproven (compiled only with JAX from 0.10.2 to 0.12.0.1)"
    assert said in record.getMessage()


def test_auto_says_with_which_jax_a_kernel_was_shown_to_work():
    shown = (Proof(level=Level.INTERPRETED, chips=("tpu7x",), last_jax="0.12.0.1", shown_by="x"),)
    known = table(fake("old", place=1, proofs=shown), fake("plain", place=2))
    first = candidates(CALL, "auto", TPU, jax_version="0.13.0", known=known)[0]
    assert first.reason is not None
    assert first.reason.startswith("unproven (interpreted only with JAX to 0.12.0.1) on tpu7x; name it")
