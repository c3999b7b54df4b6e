"""What crosses slices in a whole training step: the program that is compiled sends what the plan says."""

import dataclasses
import functools
from collections import Counter

import jax
import pytest

from raggedmoe.aot.collectives import StepSizes, collectives_across_slices
from raggedmoe.aot.compiled import compile_for
from raggedmoe.aot.program_text import counts_of
from raggedmoe.aot.subjects import TrainingStep
from raggedmoe.aot.topology import find_topology, target_topology
from raggedmoe.models.parameters import param_specs
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.training import batch_shapes
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import read_words
from raggedmoe.train.step.programs import places_of, state_template
from raggedmoe.train.step.step import train_step
from tests.aot.hlo_collectives import arrays_across
from tests.aot.marks import NEEDS_LIBTPU
from tests.train.step.small_step import BATCH, EINSUM, LENGTH, ROWS, WHOLE

EVERY_LAYER_APART = dataclasses.replace(WHOLE, execution=dataclasses.replace(EINSUM, scan_layers=False))


def step_program(config, plan):
    """The text of a training step that is compiled for eight host devices."""
    mesh = plan.logical_mesh()
    template = state_template(config, mesh)
    step = functools.partial(train_step, config=config, mesh=mesh)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(places_of(template), None))
    return jitted.lower(template, batch_shapes(mesh, BATCH, config.micro_batches)).compile().as_text()


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


# Widths that fill whole tiles of a TPU's registers on each device: of others their padding is sent too.
WIDE = ("base_emb_dim=512", "head_dim=128", "base_moe_mlp_dim=64", "max_target_length=128", "per_device_batch_size=2")
SETTINGS = (
    *("olmoe-tiny", "num_layers=1", "scan_layers=false", "dataset_type=synthetic"),
    *("dcn_data_parallelism=2", "fsdp_parallelism=2", "expert_parallelism=2"),
    *("ragged_gather=xla", "ragged_gather_reduce=xla", "grouped_matmul=xla"),
)
TILE_BYTES = 8 * 128 * 4  # of a TPU's registers, which a few numbers are padded to


@NEEDS_LIBTPU[0]
@NEEDS_LIBTPU[1]
def test_a_whole_step_on_two_slices_of_tpus_sends_what_the_plan_says():
    """To the byte for every matrix; norms, losses and loads are padded to a tile each, at most."""
    config, topology = read_words([*SETTINGS, *WIDE]), find_topology("v5e:2x2", 2)
    with target_topology(topology):
        program = TrainingStep(config=config, topology="v5e:2x2").program()
        made = resolve(config, topology.hardware, len(topology.devices), 2)
    compiled = compile_for(program.function, program.args, topology, mesh=program.mesh, donate=program.donate)
    traffic = counts_of(compiled.hlo()).collectives
    assert [kind for kind in traffic if "slices" in kind] == ["all-reduce across slices"]
    step = StepSizes(
        num_tokens=made.data.sequence_length * made.data.sequences_per_device,
        num_sequences=made.data.sequences_per_device,
        dtype="bfloat16",
        ragged=True,
    )
    specs = param_specs(made.step.model)
    matrices, small = 0, []
    for each in collectives_across_slices(made.step, made.plan, step):
        assert each.num_slices == 2
        if each.what in specs and "norm" not in each.what:
            matrices += each.sent_across_slices
        else:
            small.append(each.sent_across_slices)
    rest = traffic["all-reduce across slices"].num_bytes - matrices
    assert sum(small) <= rest <= len(small) * TILE_BYTES
    assert rest < matrices / 100
