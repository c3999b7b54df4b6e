"""JAX's transformations, types and options change neither values nor gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from kernels.compare import FAST, beyond_rounding, on_cpu, oracle, run
from raggedmoe import Directions, grouped_matmul
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import implementations
from raggedmoe.verify.check import check, value_and_gradients

# For each operation a call that uses all of its arguments.
SPECS = {
    "ragged_gather": "range-weights",
    "ragged_gather_reduce": "range",
    "grouped_matmul": "offset",
    "expert_ffn": "biases",
    "attention": "positions",
}
BATCH = 3


def spec_of(name):
    return next(spec for spec in operation(name).specs if spec.name == SPECS[name])


def batch_of(name):
    """Examples of the same shapes with other values, and other group sizes where there are any."""
    examples = [spec_of(name).example("float32", seed=seed) for seed in range(BATCH)]
    if name != "expert_ffn":
        return examples
    # Another order of the groups leaves the same rows valid.
    sizes = [jnp.roll(example.arrays["group_sizes"], seed) for seed, example in enumerate(examples)]
    return [dataclasses.replace(e, arrays={**e.arrays, "group_sizes": size}) for e, size in zip(examples, sizes)]


def over_vmap(function, arrays):
    return jax.vmap(lambda arrays: function(**arrays))(arrays)


def over_scan(function, arrays):
    return lax.scan(lambda carry, arrays: (carry, function(**arrays)), None, arrays)[1]


def over_checkpoint(function, arrays):
    return over_scan(jax.checkpoint(function), arrays)


@pytest.mark.parametrize("transform", [over_vmap, over_scan, over_checkpoint])
@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_transformed_batch_agrees_with_numpy_one_by_one(name, implementation, transform):
    examples = batch_of(name)
    function = functools.partial(operation(name).function, **examples[0].options, implementation=implementation)
    arrays = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[dict(example.arrays) for example in examples])
    cotangent = jnp.stack([example.cotangent for example in examples])

    @jax.jit
    def run_batch(arrays, cotangent):
        return value_and_gradients(lambda **arrays: transform(function, arrays), arrays, cotangent)

    found = run_batch(arrays, cotangent)
    for i, example in enumerate(examples):
        assert beyond_rounding(name, example, {quantity: array[i] for quantity, array in found.items()}) == {}


@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_a_call_without_jit_agrees_with_numpy(name, implementation):
    example = spec_of(name).example("float32")
    function = functools.partial(operation(name).function, **example.options, implementation=implementation)
    assert beyond_rounding(name, example, value_and_gradients(function, dict(example.arrays), example.cotangent)) == {}


@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_repeated_calls_are_equal_bit_by_bit(name, implementation):
    example = spec_of(name).example("float32")
    first, second = run(name, example, implementation), run(name, example, implementation)
    assert {quantity: array.tobytes() for quantity, array in jax.device_get(first).items()} == {
        quantity: array.tobytes() for quantity, array in jax.device_get(second).items()
    }


@pytest.mark.parametrize("name", SPECS)
def test_float16_is_accepted_and_kept(name):
    assert [found for found in check(operation(name), None, spec_of(name), "float16") if not found.passed] == []


@pytest.mark.parametrize("name", SPECS)
def test_float64_is_accepted_and_kept(name):
    with jax.enable_x64(True):
        assert [found for found in check(operation(name), None, spec_of(name), "float64") if not found.passed] == []


MIXED = [
    (name, forward, backward)
    for name in ("grouped_matmul", "expert_ffn", "attention")
    for forward in on_cpu(name)
    for backward in on_cpu(name)
    if forward != backward
]


@pytest.mark.parametrize(("name", "forward", "backward"), MIXED)
def test_forward_and_backward_of_two_implementations_agree_with_numpy(name, forward, backward):
    example = spec_of(name).example("float32")
    found = run(name, example, Directions(forward=forward, backward=backward))
    assert beyond_rounding(name, example, found) == {}


@pytest.mark.parametrize("implementation", sorted(implementations("grouped_matmul")))
def test_preferred_element_type_keeps_the_sums_wide_and_the_gradients_narrow(implementation):
    spec = next(spec for spec in operation("grouped_matmul").specs if spec.name == "float32-sums")
    example = spec.example("bfloat16")
    found = run("grouped_matmul", example, implementation)
    assert {quantity: str(array.dtype) for quantity, array in found.items()} == {
        "value": "float32",
        "dlhs": "bfloat16",
        "drhs": "bfloat16",
    }
    # Rounded to bfloat16 on the way, the value would be off by 1e-3.
    assert np.abs(found["value"] - oracle("grouped_matmul", example)["value"]).max() < 1e-4


@pytest.mark.parametrize("implementation", sorted(implementations("grouped_matmul")))
def test_a_traced_group_offset_gives_the_rows_of_the_groups_held(implementation):
    rng = np.random.default_rng(0)
    sizes, held = np.array([5, 0, 20, 3, 11, 8]), 2
    lhs = jnp.asarray(rng.standard_normal((50, 12), dtype=np.float32))
    rhs = jnp.asarray(rng.standard_normal((6, 12, 9), dtype=np.float32))

    @jax.jit
    def some(offset):
        mine = lax.dynamic_slice_in_dim(rhs, offset, held)
        return grouped_matmul(lhs, mine, jnp.asarray(sizes), group_offset=offset, implementation=implementation)

    whole = grouped_matmul(lhs, rhs, jnp.asarray(sizes), implementation="reference")
    ends = np.cumsum(sizes)
    for offset in range(5):
        row = np.arange(50)[:, None]
        here = (row >= ends[offset] - sizes[offset]) & (row < ends[offset + held - 1])
        np.testing.assert_allclose(some(jnp.int32(offset)), np.where(here, whole, 0), rtol=1e-5, atol=1e-5)
    assert some._cache_size() == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("implementation", list(implementations("expert_ffn")))
def test_a_mesh_of_either_axis_type_is_accepted(implementation, axis_type):
    """JAX infers no sharding for a ragged dot under explicit axes, the default of `jax.make_mesh`."""
    op = operation("expert_ffn")
    example = next(spec for spec in op.specs if spec.name == "spare-rows").example("float32")
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(axis_type,))):
        run = functools.partial(op.function, **example.options, implementation=implementation)
        found = value_and_gradients(run, dict(example.arrays), example.cotangent)
    assert all(bool(jnp.isfinite(array).all()) for array in found.values())
