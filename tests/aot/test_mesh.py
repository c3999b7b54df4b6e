"""The layer on a TPU's mesh: what its compiled program sends is what the plan says."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from parallel.hlo_collectives import collectives

from aot.marks import NEEDS_LIBTPU
from raggedmoe import KernelChoice, MoEConfig, RouterConfig
from raggedmoe.aot.compiled import compile_for
from raggedmoe.aot.topology import find_topology
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.moe.records import MoEParams
from raggedmoe.parallel.collectives import Step, layer_collectives
from raggedmoe.parallel.degrees import Degrees
from raggedmoe.parallel.plan import Plan

pytestmark = NEEDS_LIBTPU
NUM_TOKENS = 1024  # of each device
CONFIG = MoEConfig(
    num_experts=16,
    experts_per_token=4,
    model_dim=1024,
    expert_dim=512,
    router=RouterConfig(aux_loss_weight=0.1, z_loss_weight=0.1),
    kernels=KernelChoice(ragged_gather="xla", ragged_gather_reduce="xla", grouped_matmul="xla"),
    param_dtype=jnp.bfloat16,
)


def compiled(config, plan, topology):
    """The program of the layer's results and of all gradients, as text."""
    mesh = plan.mesh(topology.devices)
    places = plan.shardings(mesh, config.param_specs())
    params = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=places[name])
        for name, spec in config.param_specs().items()
    }
    shape = (NUM_TOKENS * plan.degrees.num_token_shards, config.model_dim)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=plan.tokens(mesh))

    def value_and_gradients(x, params, cotangent):
        def layer(x, params):
            out = moe_route_and_compute(x, MoEParams.from_flat(params), config, mesh=mesh)
            return (out.output, out.aux_loss, out.z_loss), out.load

        value, vjp, load = jax.vjp(layer, x, params, has_aux=True)
        return value, load, vjp((cotangent, jnp.ones(()), jnp.ones(())))

    return compile_for(value_and_gradients, (x, params, x), topology, mesh=mesh).hlo()


# A few numbers XLA rather sums on all devices than gathers them, zeros in the others' places, or scatters their sums.
SUMMED = ("counts", "routing weights")


def planned(config, plan):
    """Bytes by kind and number of devices."""
    step, found = Step(num_tokens=NUM_TOKENS, dtype="bfloat16", ragged=True), Counter()
    for each in layer_collectives(config, plan, step):
        found["all-reduce" if each.what in SUMMED else each.kind, each.num_devices] += each.num_bytes
    return found


BY_FSDP, BY_TENSOR = {"expert": 2, "fsdp": 2}, {"expert": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        ("all_to_all", BY_FSDP),
        ("ring", BY_TENSOR),
        pytest.param("all_to_all", BY_TENSOR, marks=pytest.mark.slow),
        pytest.param("ring", BY_FSDP, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_tpu_sends_what_the_plan_says(strategy, degrees):
    config, plan = replace(CONFIG, strategy=strategy), Plan(degrees=Degrees(**degrees))
    assert collectives(compiled(config, plan, find_topology("v6e:2x2"))) == planned(config, plan)
