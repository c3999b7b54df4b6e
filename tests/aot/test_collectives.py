"""What a layer sends: on a TPU's mesh its compiled program sends what the plan says."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from raggedmoe import KernelChoice, MoEConfig, MoEExecution, RouterConfig
from raggedmoe.aot.collectives import TPU_ROW_UNIT, StepSizes, layer_collectives, least_sent
from raggedmoe.aot.compiled import compile_for
from raggedmoe.aot.program_text import counts_of
from raggedmoe.aot.topology import find_topology
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.stage import TOKENS
from tests.aot.hlo_collectives import collectives
from tests.aot.marks import NEEDS_LIBTPU

NUM_TOKENS = 1024  # of each device
CONFIG = MoEConfig(
    num_experts=16,
    experts_per_token=4,
    model_dim=1024,
    expert_dim=512,
    router=RouterConfig(aux_loss_weight=0.1, z_loss_weight=0.1),
    param_dtype=jnp.bfloat16,
)
KERNELS = KernelChoice(ragged_gather="xla", ragged_gather_reduce="xla", grouped_matmul="xla")


def compiled(config, execution, plan, topology):
    """The program of the layer's results and of all gradients, as text."""
    mesh = plan.mesh(topology.devices)
    places = plan.shardings(mesh, config.param_specs())
    params = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=places[name])
        for name, spec in config.param_specs().items()
    }
    shape = (NUM_TOKENS * plan.num_token_shards, config.model_dim)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, TOKENS))

    def value_and_gradients(x, params, cotangent):
        def layer(x, params):
            out = moe_route_and_compute(x, params, config, execution, mesh=mesh)
            return (out.output, out.aux_loss, out.z_loss), out.load

        value, vjp, load = jax.vjp(layer, x, params, has_aux=True)
        return value, load, vjp((cotangent, jnp.ones(()), jnp.ones(())))

    return compile_for(value_and_gradients, (x, params, x), topology, mesh=mesh).hlo()


# A few numbers XLA rather sums on all devices than gathers them, zeros in the others' places, or scatters their sums.
SUMMED = ("counts", "routing weights")


def planned(config, execution, plan):
    """Bytes by kind and number of devices."""
    step = StepSizes(num_tokens=NUM_TOKENS, dtype="bfloat16", ragged=True, row_unit=TPU_ROW_UNIT)
    found = Counter()
    for each in layer_collectives(config, execution, plan, step):
        num_bytes = each.num_bytes
        if execution.strategy == "ring" and (each.what, each.kind) == ("routing weights", "all-reduce"):
            # XLA cuts their gradients to a rank's own tokens before it sums them over the tensor ranks, not after.
            num_bytes //= plan.expert
        found["all-reduce" if each.what in SUMMED else each.kind, each.num_devices] += num_bytes
    return found


BY_FSDP, BY_TENSOR = {"expert": 2, "fsdp": 2}, {"expert": 2, "tensor": 2}


@NEEDS_LIBTPU[0]
@NEEDS_LIBTPU[1]
@pytest.mark.parametrize(
    ("strategy", "degrees", "dispatch_dtype"),
    [
        ("all_to_all", BY_FSDP, None),
        ("ring", BY_TENSOR, None),
        pytest.param("all_to_all", BY_TENSOR, None, marks=pytest.mark.slow),
        pytest.param("ring", BY_FSDP, None, marks=pytest.mark.slow),
        pytest.param("all_to_all", BY_FSDP, "float8_e4m3fn", marks=pytest.mark.slow),
        pytest.param("ring", BY_TENSOR, "int8", marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_a_tpu_sends_what_the_plan_says(strategy, degrees, dispatch_dtype):
    execution = MoEExecution(strategy=strategy, kernels=KERNELS, dispatch_dtype=dispatch_dtype)
    plan = Plan(**degrees)
    found = collectives(compiled(CONFIG, execution, plan, find_topology("v6e:2x2")))
    assert found == planned(CONFIG, execution, plan)


@NEEDS_LIBTPU[0]
@NEEDS_LIBTPU[1]
@pytest.mark.parametrize(
    "degrees",
    [{"data": 2, "expert": 2}, pytest.param({"fsdp": 2, "expert": 2}, marks=pytest.mark.slow)],
    ids=["data-expert", "fsdp-expert"],
)
def test_a_tpu_sends_to_another_slice_what_the_plan_says(degrees):
    """The plan's bytes, but that a tile of registers is sent of the few numbers of losses and load."""
    execution, plan = MoEExecution(strategy="all_to_all", kernels=KERNELS), Plan(slices=2, **degrees)
    traffic = counts_of(compiled(CONFIG, execution, plan, find_topology("v5e:2x2", 2))).collectives
    assert [kind for kind in traffic if "slices" in kind] == ["all-reduce across slices"]
    step, planned = StepSizes(num_tokens=NUM_TOKENS, dtype="bfloat16", ragged=True), 0.0
    for each in layer_collectives(CONFIG, execution, plan, step):
        if each.num_slices > 1:
            # Of two slices, each sends its sums to the other: as many bytes as there are.
            planned += 2 * 128 * 4 if each.what == "losses and load" else each.sent_across_slices
    assert traffic["all-reduce across slices"].num_bytes == planned


@pytest.mark.parametrize(
    ("strategy", "dispatch_dtype"),
    [("all_to_all", None), ("ring", None), ("capacity", None), ("all_to_all", "int8"), ("ring", "float8_e5m2")],
)
def test_the_least_that_a_device_sends_by_hand(strategy, dispatch_dtype):
    """Four ways (rows there and back, and both gradients), for 64 tokens of 2 sequences on each of 4 ranks."""
    factor = {"capacity_factor": 1.5} if strategy == "capacity" else {}
    config = MoEConfig(num_experts=8, experts_per_token=2, model_dim=16, expert_dim=4, **factor)
    execution = MoEExecution(strategy=strategy, dispatch_dtype=dispatch_dtype)
    step = StepSizes(num_tokens=64, num_sequences=2, dtype="bfloat16", ragged=True)
    row = 16 * 2
    slots = 8 * 2 * int(32 * 2 / 8 * 1.5)  # of each expert in each sequence
    expected = {"all_to_all": 64 * 2 * row * 3 / 4, "ring": 64 * row * 3, "capacity": slots * row * 3 / 4}
    there = expected[strategy] if dispatch_dtype is None else expected[strategy] / row * (16 + 4)
    assert least_sent(config, execution, Plan(expert=4), step) == there + 3 * expected[strategy]
