"""What crosses slices in a whole training step: the program that is compiled sends what the plan says."""

import dataclasses
import functools
from collections import Counter

import jax
import pytest

from raggedmoe.aot.collectives import StepSizes, collectives_across_slices
from raggedmoe.models.parameters import param_specs
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.training import train_sharding
from raggedmoe.train.step.programs import places_of, state_template
from raggedmoe.train.step.step import train_step
from tests.aot.hlo_collectives import arrays_across
from tests.train.step.small_step import BATCH, EINSUM, LENGTH, ROWS, WHOLE

EVERY_LAYER_APART = dataclasses.replace(WHOLE, execution=dataclasses.replace(EINSUM, scan_layers=False))


def step_program(config, plan):
    """The text of a training step that is compiled for eight host devices."""
    sharding = train_sharding(plan)
    template = state_template(config, sharding)
    step = functools.partial(train_step, config=config, mesh=sharding.mesh)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(places_of(template), None))
    return jitted.lower(template, sharding.batch(BATCH, config.micro_batches)).compile().as_text()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("degrees", "tied"),
    [
        ({"fsdp": 2, "expert": 2}, False),
        ({"data": 2, "tensor": 2}, True),
    ],
    ids=["fsdp-expert", "data-tensor"],
)
def test_a_step_sends_the_sums_of_gradients_and_loads_across_slices_and_nothing_else(degrees, tied):
    """To the byte, but for single numbers: the sums of losses and of counts."""
    plan = Plan(slices=2, **degrees)
    config = dataclasses.replace(EVERY_LAYER_APART, model=dataclasses.replace(WHOLE.model, tied_embeddings=tied))
    sequences = len(ROWS) // plan.num_token_shards
    step = StepSizes(num_tokens=LENGTH * sequences, num_sequences=sequences, dtype="float32", ragged=False)
    planned, specs = Counter(), param_specs(config.model)
    for each in collectives_across_slices(config, plan, step):
        assert each.num_slices == 2
        if each.what in specs:
            planned[each.num_devices] += each.num_bytes
        else:  # the loads of the layers, of which the model has two, and one of its module; the rest are single numbers
            assert each.what == "losses and load"
            planned[each.num_devices] += 3 * 4 * config.model.moe.num_experts
    assert arrays_across(step_program(config, plan), plan.num_devices // 2) == planned
