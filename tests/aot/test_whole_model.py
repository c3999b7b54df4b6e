"""What a whole model needs, from two compilations of a few of its layers."""

import dataclasses

import pytest

from raggedmoe.aot.case import PASSED, CompileCase, CompileOutcome
from raggedmoe.aot.compiled import Compiled, Cost, Memory
from raggedmoe.aot.subjects import TrainingStep
from raggedmoe.aot.whole_model import whole_model
from raggedmoe.models.presets import model_preset
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.settings.words import read_words
from raggedmoe.train.step.fit import state_bytes

WORDS = ("deepseek-v3", "expert_parallelism=4", "fsdp_parallelism=128", "dtype=bfloat16")
PLAN = Plan(fsdp=128, expert=4)


def outcome(layers, temporaries, arguments=1000):
    memory = Memory(arguments=arguments, outputs=900, aliased=890, temporaries=temporaries, code=5)
    compiled = Compiled(
        topology="tpu7x:4x8x8",
        trace_seconds=1.0,
        compile_seconds=1.0,
        memory=memory,
        cost=Cost(flops=1.0, bytes_accessed=1.0),
        kernels=(),
    )
    case = CompileCase(
        title="",
        subject=TrainingStep(config=read_words(WORDS), num_layers=layers),
        topology="tpu7x:4x8x8",
    )
    return CompileOutcome(case=case, verdict=PASSED, compiled=compiled, needed=memory.total, available=10**12)


def test_state_is_added_by_its_shapes_and_the_rest_by_the_last_layer():
    found = whole_model([outcome(4, temporaries=700), outcome(3, temporaries=600)])
    model = model_preset("deepseek-v3")
    cut = dataclasses.replace(model, num_layers=4, dense_layers=(0,))
    state = [s.params + s.moments for s in (state_bytes(model, PLAN), state_bytes(cut, PLAN))]
    assert found.arguments == 1000 + state[0] - state[1]
    assert (found.rest, found.rest_per_layer) == (715, 100)
    assert found.num_bytes == found.arguments + 715 + (61 - 4) * 100


@pytest.mark.parametrize(
    "outcomes",
    [
        [outcome(4, 700)],
        [outcome(4, 700), outcome(2, 600)],
        [outcome(None, 700), outcome(None, 600)],
        [outcome(4, 700), dataclasses.replace(outcome(3, 600), compiled=None)],
    ],
    ids=["one", "two-fewer", "whole", "failed"],
)
def test_other_outcomes_say_nothing_of_a_whole_model(outcomes):
    assert whole_model(outcomes) is None
