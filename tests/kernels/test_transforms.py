"""JAX's transformations, types and options change neither values nor gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from raggedmoe import Directions, grouped_matmul
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.value_and_gradients import value_and_gradients
from tests.kernels.compare import FAST, IN_ANY_TYPE, beyond_rounding, on_cpu, oracle, run

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
    sizes = [np.roll(example.arrays["group_sizes"], seed) for seed, example in enumerate(examples)]
    return [dataclasses.replace(e, arrays={**e.arrays, "group_sizes": size}) for e, size in zip(examples, sizes)]


def over_vmap(function, arrays):
    return jax.vmap(lambda arrays: function(**arrays))(arrays)


def over_scan(function, arrays):
    return lax.scan(lambda carry, arrays: (carry, function(**arrays)), None, arrays)[1]


def over_checkpoint(function, arrays):
    return over_scan(jax.checkpoint(function), arrays)


# The checkpointed scan is the plain one and more.
@pytest.mark.product
@pytest.mark.parametrize(
    "transform",
    [over_vmap, pytest.param(over_scan, marks=pytest.mark.slow), pytest.param(over_checkpoint, marks=pytest.mark.ci)],
)
@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_transformed_batch_agrees_with_numpy_one_by_one(name, implementation, transform):
    examples = batch_of(name)
    function = functools.partial(operation(name).function, **examples[0].options, implementation=implementation)
    arrays = jax.tree.map(lambda *leaves: np.stack(leaves), *[dict(example.arrays) for example in examples])
    cotangent = np.stack([example.cotangent for example in examples])

    @jax.jit
    def run_batch(arrays, cotangent):
        return value_and_gradients(lambda **arrays: transform(function, arrays), arrays, cotangent)

    found = jax.device_get(run_batch(arrays, cotangent))
    for i, example in enumerate(examples):
        assert beyond_rounding(name, example, {quantity: array[i] for quantity, array in found.items()}) == {}


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_a_call_without_jit_agrees_with_numpy_and_is_compiled_once(name, implementation, compilations):
    example = spec_of(name).example("float32")
    function = functools.partial(operation(name).function, **example.options, implementation=implementation)
    assert beyond_rounding(name, example, value_and_gradients(function, dict(example.arrays), example.cotangent)) == {}
    function(**example.arrays)
    assert compilations  # or nothing would be counted
    compilations.clear()
    function(**example.arrays)
    value_and_gradients(function, dict(example.arrays), example.cotangent)
    assert compilations == []


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_repeated_calls_are_equal_bit_by_bit(name, implementation):
    example = spec_of(name).example("float32")
    first, second = run(name, example, implementation), run(name, example, implementation)
    assert {quantity: array.tobytes() for quantity, array in jax.device_get(first).items()} == {
        quantity: array.tobytes() for quantity, array in jax.device_get(second).items()
    }


# A CPU has no float16: the loops of chunked attention take it ten seconds.
FLOAT16 = [
    pytest.param(*case, id="-".join(case), marks=[pytest.mark.slow] if case[1] == "chunked" else [])
    for case in IN_ANY_TYPE
]


@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), FLOAT16)
def test_float16_is_accepted_and_kept(name, implementation):
    example = spec_of(name).example("float16")
    found = run(name, example, implementation)
    assert found["value"].dtype == "float16"
    assert beyond_rounding(name, example, found) == {}


@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), IN_ANY_TYPE)
def test_float64_is_accepted_and_kept(name, implementation):
    with jax.enable_x64(True):
        example = spec_of(name).example("float64")
        found = run(name, example, implementation)
        assert found["value"].dtype == "float64"
        assert beyond_rounding(name, example, found) == {}


# Each implementation once in either direction; all other pairs are slow.
MIXED = [
    pytest.param(name, forward, backward, marks=[] if next_one else [pytest.mark.slow])
    for name in ("grouped_matmul", "expert_ffn", "attention")
    for i, forward in enumerate(on_cpu(name))
    for j, backward in enumerate(on_cpu(name))
    if forward != backward
    for next_one in [j == (i + 1) % len(on_cpu(name))]
]


@pytest.mark.product
@pytest.mark.parametrize(("name", "forward", "backward"), MIXED)
def test_forward_and_backward_of_two_implementations_agree_with_numpy(name, forward, backward):
    example = spec_of(name).example("float32")
    found = run(name, example, Directions(forward=forward, backward=backward))
    assert beyond_rounding(name, example, found) == {}


@pytest.mark.parametrize("implementation", on_cpu("grouped_matmul"), ids="grouped_matmul-{}".format)
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


def oracle_rows(lhs, rhs, sizes):
    """Each row times its group's matrix; no row where no group is."""
    out, ends = np.zeros((len(lhs), rhs.shape[2])), np.cumsum(sizes)
    for group, (end, size) in enumerate(zip(ends, sizes)):
        out[end - size : end] = lhs[end - size : end].astype(np.float64) @ rhs[group]
    return out


@pytest.mark.parametrize("implementation", on_cpu("grouped_matmul"), ids="grouped_matmul-{}".format)
def test_a_traced_group_offset_gives_the_rows_of_the_groups_held(implementation):
    rng = np.random.default_rng(0)
    sizes, held = np.array([5, 0, 20, 3, 11, 8]), 2
    lhs = rng.standard_normal((50, 12), dtype=np.float32)
    rhs = rng.standard_normal((6, 12, 9), dtype=np.float32)

    @jax.jit
    def some(offset):
        mine = lax.dynamic_slice_in_dim(rhs, offset, held)
        rows, counts = jnp.asarray(lhs), jnp.asarray(sizes)
        return grouped_matmul(rows, mine, counts, group_offset=offset, implementation=implementation)

    whole = oracle_rows(lhs, rhs, sizes)
    ends = np.cumsum(sizes)
    for offset in range(5):
        row = np.arange(50)[:, None]
        here = (row >= ends[offset] - sizes[offset]) & (row < ends[offset + held - 1])
        np.testing.assert_allclose(some(jnp.int32(offset)), np.where(here, whole, 0), rtol=1e-5, atol=1e-5)
    assert some._cache_size() == 1


@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize("axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit])
@pytest.mark.parametrize("implementation", [other for name, other in IN_ANY_TYPE if name == "expert_ffn"])
def test_a_mesh_of_either_axis_type_is_accepted(implementation, axis_type):
    """JAX infers no sharding for a ragged dot under explicit axes, the default of `jax.make_mesh`."""
    op = operation("expert_ffn")
    example = next(spec for spec in op.specs if spec.name == "spare-rows").example("float32")
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(axis_type,))):
        call = functools.partial(op.function, **example.options, implementation=implementation)
        both = jax.jit(functools.partial(value_and_gradients, call))
        found = jax.device_get(both(dict(example.arrays), example.cotangent))
    assert all(np.isfinite(array).all() for array in found.values())
