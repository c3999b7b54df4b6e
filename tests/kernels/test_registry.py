"""Which implementation is chosen, and what is said of the others. Fakes are data given to `select`."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from raggedmoe import Directions, KernelChoice, grouped_matmul
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.native.library import why_absent
from raggedmoe.kernels.proof import PLAIN_XLA, Level, Proof
from raggedmoe.kernels.registry import (
    BACKWARD,
    FORWARD,
    OPERATIONS,
    Call,
    Implementation,
    candidates,
    implementations,
    record_selections,
    select,
)
from tests.kernels.compare import FAST, example_of
from tests.kernels.test_proof import certificate

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
    with jax.sharding.use_abstract_mesh(abstract_mesh("tpu", "TPU7x")), record_selections() as selections:
        jax.eval_shape(functools.partial(grouped_matmul), *ARRAYS)
    assert [(s.hardware.name, s.call.direction, s.chosen.name) for s in selections] == [
        ("tpu7x", FORWARD, "xla"),
        ("tpu7x", BACKWARD, "xla"),
    ]


def test_selections_outside_the_recording_are_not_kept():
    with record_selections() as selections:
        pass
    jax.eval_shape(functools.partial(grouped_matmul), *ARRAYS)
    assert selections == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_its_reference_and_is_chosen_last(name):
    op = operation(name)
    example = op.specs[0].example("float32")
    with record_selections() as selections:
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


def test_the_guard_reads_the_target_not_the_local_device(abstract_mesh):
    example = example_of("grouped_matmul", "even")

    def choices():
        with record_selections() as selections:
            jax.eval_shape(lambda arrays: grouped_matmul(**arrays), dict(example.arrays))
        return [(selection.hardware.name, selection.chosen.name) for selection in selections]

    with jax.sharding.use_abstract_mesh(abstract_mesh("tpu", "TPU7x")):
        assert choices() == [("tpu7x", "xla")] * 2
    assert choices() == [("cpu", "cpu" if why_absent() else "cpu_native")] * 2


@pytest.mark.parametrize("oracle_first", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_choice_for_each_direction_is_honoured(name, oracle_first):
    names = ("reference", "chunked" if name == "attention" else "xla")
    forward, backward = names if oracle_first else reversed(names)
    example = operation(name).specs[0].example("float32")
    choice = Directions(forward=forward, backward=backward)
    call = functools.partial(operation(name).function, **example.options, implementation=choice)
    with record_selections() as selections:
        jax.eval_shape(lambda arrays: call(**arrays), dict(example.arrays))
    assert {s.call.direction: s.chosen.name for s in selections} == {FORWARD: forward, BACKWARD: backward}


def test_a_width_that_a_kernel_cannot_take_is_known_before_tracing():
    def implementation(name, reason):
        return Implementation(
            operation="grouped_matmul",
            name=name,
            forward=lambda *args: pytest.fail("traced before it was decided"),
            backward=lambda *args: pytest.fail("traced before it was decided"),
            rank={"tpu": 1},
            proofs=PLAIN_XLA,
            why_not=reason,
        )

    def aligned(call, hardware):
        width = call.arrays["lhs"].shape[1]
        return f"needs a width that is a multiple of 128, got {width}" if width % 128 else None

    known = {"aligned": implementation("aligned", aligned), "plain": implementation("plain", lambda *_: None)}
    taken = {}
    for width in (2880, 2944):
        call = Call(operation="grouped_matmul", arrays={"lhs": jax.ShapeDtypeStruct((8, width), "bfloat16")})
        taken[width] = select(call, "auto", HARDWARE["tpu7x"], known=known).chosen.name
    assert taken == {2880: "plain", 2944: "aligned"}


WIDE = {
    "ragged_gather": "width-2880",
    "ragged_gather_reduce": "width-2880",
    "grouped_matmul": "width-2880",
    "expert_ffn": "gpt-oss",
    "attention": "several-chunks",
}


@pytest.mark.product
@pytest.mark.parametrize(
    "chip",
    [
        pytest.param("h100", marks=pytest.mark.ci),
        "tpu7x",
        *(pytest.param(chip, marks=pytest.mark.slow) for chip in ("cpu", "v5e")),
    ],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_chosen_for_width_2880_lowers_there(name, chip):
    example = example_of(name, WIDE[name], "bfloat16")
    call = functools.partial(operation(name).function, **example.options, hardware=chip)
    floating = next(n for n in ("x", "rows", "lhs", "query") if n in example.arrays)
    rest = {n: a for n, a in example.arrays.items() if n != floating}

    def gradient(array):
        out, vjp = jax.vjp(lambda array: call(**{floating: array}, **rest), array)
        return vjp(jnp.ones_like(out))

    platform = {"gpu": "cuda"}.get(HARDWARE[chip].platform, HARDWARE[chip].platform)
    device = AbstractDevice(device_kind=HARDWARE[chip].device_kinds[0], num_cores=1, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        jax.jit(gradient).trace(example.arrays[floating]).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_the_implementation_under_test_is_the_one_that_runs(name, implementation):
    example = operation(name).specs[0].example("float32")
    call = functools.partial(operation(name).function, **example.options, implementation=implementation)
    with record_selections() as selections:
        jax.eval_shape(lambda arrays: call(**arrays), dict(example.arrays))
    assert [s.chosen for s in selections] == [implementations(name)[implementation]] * 2
