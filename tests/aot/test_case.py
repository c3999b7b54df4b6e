"""Cases and outcomes on their way between two processes, and the compiler's own words in them."""

import dataclasses
import json

import pytest

from raggedmoe.aot.baselines import BaselineCall
from raggedmoe.aot.case import (
    PASSED,
    CompileCase,
    CompileOutcome,
    case_from_json,
    case_to_json,
    outcome_from_json,
    outcome_to_json,
)
from raggedmoe.aot.compiled import Compiled, Cost, Memory, _out_of_hbm
from raggedmoe.aot.subjects import MoELayerOnMesh, OperationCall, TrainingStep
from raggedmoe.aot.tuning import TiledCall
from raggedmoe.aot.worker import first_error
from raggedmoe.hardware import target_hardware
from raggedmoe.kernels.chosen import ChosenKernel
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import read_words
from tests.aot.programs import Matmul

CASE = CompileCase(title="one", subject=Matmul(), topology="v6e:2x2", trips={"3": 4})
COMPILED = Compiled(
    topology="v6e:2x2",
    trace_seconds=0.5,
    compile_seconds=1.5,
    memory=Memory(arguments=100, outputs=50, aliased=40, temporaries=7, code=3),
    cost=Cost(flops=1.0, bytes_accessed=2.0),
    kernels=(
        ChosenKernel(operation="grouped_matmul", direction="forward", name="xla", level="interpreted", note=None),
    ),
)


def test_an_outcome_survives_json():
    outcome = CompileOutcome(case=CASE, verdict=PASSED, compiled=COMPILED, needed=120, available=1000)
    assert outcome_from_json(outcome_to_json(outcome)) == outcome


@pytest.mark.parametrize(
    "subject",
    [
        OperationCall(operation="attention", call="decode", gradient="key", without_guard=True),
        MoELayerOnMesh(config=read_words(("olmoe-tiny", "expert_parallelism=4")), tokens=64, topology=None),
        TrainingStep(config=read_words(("olmoe-tiny",)), num_layers=2, topology="v6e:2x2"),
        BaselineCall(baseline="dense", call="even"),
        TiledCall(call="even", dtype="float32", rows=256, step=64, out=128, inner=128, paired=True),
    ],
    ids=lambda subject: type(subject).__name__,
)
def test_a_case_survives_json_with_its_subject(subject):
    case = dataclasses.replace(CASE, subject=subject)
    assert case_from_json(json.loads(json.dumps(case_to_json(case)))) == case


TYPED = ("olmoe-tiny", "ici_expert_parallelism=3", "packing=true", "megablox=false", "sparse_matmul=true")


def test_a_case_knows_in_a_worker_what_was_typed():
    config = read_words(TYPED)
    subject = MoELayerOnMesh(config=config, tokens=64, topology=None)
    case = dataclasses.replace(CASE, subject=subject)
    again = case_from_json(json.loads(json.dumps(case_to_json(case)))).subject.config
    assert again.source == config.source
    assert again.is_given("packing")
    messages = []
    for made in (config, again):
        with pytest.raises(ValueError, match=r"^ici_expert_parallelism=3 does not divide") as raised:
            resolve(made, target_hardware(), 3)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_memory_counts_an_aliased_output_once():
    assert COMPILED.memory.total == 100 + 50 - 40 + 7 + 3


def test_the_text_of_a_program_compiled_elsewhere_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="compiled in another process"):
        COMPILED.hlo()


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (160.00G) exceeds available HBM (94.74G). HLO module: jit_f.\nSee https://…",
            160 * 2**30,
            round(94.74 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 45.5M of 31.25G hbm.",
            round(45.5 * 2**20),
            round(31.25 * 2**30),
        ),
    ],
)
def test_what_does_not_fit_carries_the_compilers_figures_and_first_line(message, needed, available):
    error = _out_of_hbm(message)
    assert (error.needed, error.available) == (needed, available)
    assert str(error) == message.splitlines()[0]


def test_too_little_vmem_is_another_error():
    assert _out_of_hbm("RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=67108864)") is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "I0001 hello\nF1116 08:02:25.3 x.cc:1] Check failed: a == b\nE1116 more",
            "F1116 08:02:25.3 x.cc:1] Check failed: a == b",
        ),
        ("Traceback\n  File x\njax.errors.JaxRuntimeError: INTERNAL: no\n", "jax.errors.JaxRuntimeError: INTERNAL: no"),
        ("one\ntwo\n\n", "two"),
        ("", "no message"),
    ],
)
def test_the_first_line_of_what_ended_a_process_is_found(text, line):
    assert first_error(text) == line
