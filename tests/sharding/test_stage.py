"""A stage: a plain function, and where its arguments and its result lie on a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from raggedmoe.sharding.axes import EXPERT, HIDDEN_TENSOR, TENSOR, WIDTH_TENSOR, LogicalMesh, logical_mesh
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.stage import BETWEEN_PROJECTIONS, PER_DEVICE, TOKENS, TOKENS_AND_WIDTH, stage
from tests.aot.hlo_collectives import collectives

ON_MESH = logical_mesh(Plan(expert=2, tensor=2).mesh())


@stage(x=TOKENS, result=PER_DEVICE)
def numbered(x, *, on_mesh):
    return x + 10 * jax.lax.axis_index(on_mesh.axes(EXPERT)) + 100 * jax.lax.axis_index(on_mesh.axes(TENSOR))


@stage(x=PER_DEVICE, result=PER_DEVICE)
def doubled(x):
    return 2 * x


def test_what_each_device_has_for_itself_crosses_a_border_without_communication():
    run = jax.jit(lambda x: ON_MESH.run(doubled, ON_MESH.run(numbered, x, on_mesh=ON_MESH)))
    x = jnp.arange(4.0)
    expected = [0, 2, 200, 202, 24, 26, 224, 226]  # both tensor ranks of an expert rank have its tokens
    np.testing.assert_array_equal(run(x), expected)
    assert not collectives(run.lower(x).compile().as_text())


def test_without_a_mesh_a_stage_is_a_plain_call():
    x = jnp.arange(4.0)
    on_one = LogicalMesh()
    np.testing.assert_array_equal(on_one.run(numbered, x, on_mesh=on_one), x)
    assert (on_one.axes(EXPERT), on_one.size(EXPERT)) == ((), 1)


def test_activations_are_split_by_their_width_where_the_tensor_axis_splits_it():
    by_width = replace(ON_MESH, tensor_split="model_dim")
    assert ON_MESH.spec(TOKENS_AND_WIDTH) == PartitionSpec(*TOKENS, None)
    assert by_width.spec(TOKENS_AND_WIDTH) == PartitionSpec(*TOKENS, TENSOR)
    assert [mesh.spec(BETWEEN_PROJECTIONS) for mesh in (ON_MESH, by_width)] == [PER_DEVICE, TOKENS]
    assert (ON_MESH.axes(HIDDEN_TENSOR, WIDTH_TENSOR), by_width.axes(HIDDEN_TENSOR)) == ((TENSOR,), ())


def test_a_stage_names_all_its_arrays_in_their_order():
    with pytest.raises(AssertionError, match=r"partitions of \['rows'\] for \['rows', 'weights'\]"):
        stage(rows=PER_DEVICE, result=PartitionSpec())(lambda rows, weights, *, columns: rows)
