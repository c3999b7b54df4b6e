"""The buffer that receives the rows of other ranks: of the ring, and beside it of the all-to-all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.moe.dispatch import ring
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.moe.records import RouteOutput
from raggedmoe.sharding.axes import logical_mesh
from raggedmoe.sharding.stage import TOKENS, stage
from tests.moe import numpy_layer
from tests.moe.examples import assert_close, moe_config, random_experts, random_params, random_tokens, stage_settings
from tests.moe.on_mesh import mesh_of, run_on_mesh

pytestmark = pytest.mark.usefixtures("x64")

NUM_TOKENS, PER_TOKEN, NUM_EXPERTS, NUM_RANKS = 12, 3, 8, 4


def two_hundred_routings():
    rng = np.random.default_rng(0)
    return [random_experts(rng, NUM_TOKENS, PER_TOKEN, NUM_EXPERTS, skew=rng.choice([0, 1, 4])) for _ in range(200)]


@pytest.mark.parametrize("strategy", [pytest.param("ring", marks=pytest.mark.ci), "all_to_all"])
def test_no_row_is_lost_or_misassigned(strategy):
    config = moe_config(num_experts=NUM_EXPERTS, experts_per_token=PER_TOKEN, model_dim=3, expert_dim=2)
    execution = MoEExecution(strategy=strategy)
    x, params, mesh = random_tokens(config, NUM_TOKENS), random_params(config), mesh_of(expert=NUM_RANKS)
    for experts in two_hundred_routings():
        expected = numpy_layer.layer(x, params, config, replay=experts)
        out = run_on_mesh(x, params, config, mesh, execution=execution, replay=jnp.asarray(experts))
        assert_close(out.output, expected.output)


def test_ring_buffer_holds_the_worst_case_and_no_more():
    config = moe_config(num_experts=NUM_EXPERTS, experts_per_token=PER_TOKEN)
    held, on_mesh = NUM_EXPERTS // NUM_RANKS, logical_mesh(mesh_of(expert=NUM_RANKS))
    settings = stage_settings(config, MoEExecution(strategy="ring"), on_mesh)

    @jax.jit
    def prepared(experts):
        @stage(experts=TOKENS, result=TOKENS)
        def slots_and_sizes(experts):
            weights, mask = jnp.ones(experts.shape), jnp.ones(experts.shape[0], bool)
            routing = RouteOutput(experts=experts, tokens=None, mask=mask, weights=weights)
            metadata = ring.prepare(routing, settings)
            return metadata.slot_of_row[None], metadata.group_sizes[None]

        return on_mesh.run(slots_and_sizes, experts)

    for experts in two_hundred_routings():
        rows, group_sizes = map(np.asarray, prepared(jnp.asarray(experts)))
        assert rows.shape == (NUM_RANKS, NUM_TOKENS * min(PER_TOKEN, held))
        for rank in range(NUM_RANKS):
            valid = rows[rank][: group_sizes[rank].sum()]
            of_expert = [np.flatnonzero(experts.reshape(-1) == rank * held + g) for g in range(held)]
            assert np.array_equal(valid, np.concatenate(of_expert))
            assert (rows[rank][len(valid) :] < 0).all()
