"""What attention promises beyond its values: meshes, and which implementation is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from raggedmoe import attention
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import record_selections
from raggedmoe.kernels.value_and_gradients import value_and_gradients
from tests.kernels.compare import on_cpu


@pytest.mark.ci
@pytest.mark.parametrize("implementation", on_cpu("attention"))
def test_shard_map_over_sequences_changes_nothing(implementation):
    spec = next(spec for spec in operation("attention").specs if spec.name == "decode")
    example = spec.example("float32")
    arrays, cotangent = jax.tree.map(lambda a: jnp.concatenate([a, a]), (dict(example.arrays), example.cotangent))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def both(arrays, cotangent):
        return value_and_gradients(functools.partial(attention, implementation=implementation), arrays, cotangent)

    divided = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(arrays, cotangent)
    whole = jax.jit(both)(arrays, cotangent)
    for name, array in whole.items():
        np.testing.assert_allclose(divided[name], array, rtol=1e-6, atol=1e-6)


def chosen(hardware, queries, slots, **options):
    """The implementations taken for both directions of a call with 8 sequences and 16 heads."""
    positions = {} if queries == slots else {"positions": jax.ShapeDtypeStruct((8, queries), "int32")}
    query, key = (jax.ShapeDtypeStruct((8, n, 16, 64), "bfloat16") for n in (queries, slots))
    with record_selections() as selections:
        jax.eval_shape(functools.partial(attention, hardware=hardware, **options), query, key, key, **positions)
    return {selection.chosen.name for selection in selections}


@pytest.mark.parametrize(
    ("hardware", "queries", "slots", "name"),
    [
        ("cpu", 128, 128, "dot_product"),
        ("cpu", 1024, 1024, "chunked"),
        ("cpu", 1, 512, "dot_product"),
        ("cpu", 1, 4096, "chunked"),
        ("v6e", 1, 4096, "dot_product"),
        ("v6e", 64, 4096, "chunked"),
        ("h100", 1024, 1024, "chunked"),
    ],
)
@pytest.mark.usefixtures("without_native_kernels")
def test_auto_takes_what_suits_the_lengths(hardware, queries, slots, name):
    assert chosen(hardware, queries, slots) == {name}


def test_all_scores_at_once_are_held_when_asked_for():
    assert chosen("cpu", 4096, 4096, implementation="dot_product") == {"dot_product"}
