"""What every implementation promises: above all value and gradients against loops in NumPy, within the derived bound.

Every call of a spec runs in float32 or in bfloat16, by turns, and in the other type where there is time (`slow`). One
call of every implementation runs as users compile it; so does the one of several tiles, for which the tile loops of the
CPU have many sizes that are cut down where compiling must be quick.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.example import Example, normal, poison_rows
from raggedmoe.kernels.grouped_matmul.cpu import TILE_SIZES, TRANSPOSED_TILE_SIZES
from raggedmoe.kernels.registry import OPERATIONS
from tests.kernels.compare import FAST, beyond_rounding, example_of, on_cpu, run
from tests.kernels.test_transforms import SPECS


def marks_of(name, implementation, spec, turn):
    if turn % 2:
        return [pytest.mark.slow]
    all_sizes = implementation == "cpu" and spec.name == "several-tiles"
    return [pytest.mark.as_shipped] if all_sizes or spec.name == SPECS[name] else []


CASES = [
    pytest.param(
        name,
        implementation,
        spec,
        dtype,
        id=f"{name}-{implementation}-{spec.name}-{dtype}",
        marks=marks_of(name, implementation, spec, place + turn),
    )
    for name, implementation in FAST
    for place, spec in enumerate(spec for spec in operation(name).specs if not spec.large)
    for turn, dtype in enumerate(("float32", "bfloat16"))
]


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation", "spec", "dtype"), CASES)
def test_every_implementation_agrees_with_numpy(name, implementation, spec, dtype):
    example = spec.example(dtype)
    found = run(name, example, implementation)
    assert {quantity: str(array.dtype) for quantity, array in found.items()} == expected_types(name, example)
    assert beyond_rounding(name, example, found) == {}


def expected_types(name, example):
    """Results have the input's type, or the one asked for; gradients that of their argument."""
    value = example.options.get("preferred_element_type") or example.cotangent.dtype
    types = {"value": str(value)}
    for argument, array in example.arrays.items():
        if argument == "biases":
            types |= {f"dbiases.{part}": str(bias.dtype) for part, bias in array._asdict().items() if bias is not None}
        elif array is not None and array.dtype.kind not in "iu":
            types[f"d{argument}"] = str(array.dtype)
    return types


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_an_implementation_that_the_tests_run(name):
    assert [implementation for operation_name, implementation in FAST if operation_name == name] != []


WITH_GROUPS = ("grouped_matmul", "expert_ffn")
ALL = [(name, implementation) for name in OPERATIONS for implementation in on_cpu(name)]

# Where each operation's poisoned rows must not show: the result's rows, and the gradient's that has those rows.
PAST_THE_END = {
    "ragged_gather": ("range-weights", ("value", "dweights")),
    "ragged_gather_reduce": ("range", ("drows",)),
    "grouped_matmul": ("spare-rows", ("value", "dlhs")),
    "expert_ffn": ("biases", ("value", "drows")),
    "attention": ("positions", ("value", "dquery")),
}


@pytest.mark.product
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(("name", "implementation"), ALL)
def test_rows_past_the_end_are_zero_and_reach_nothing(name, implementation, dtype):
    spec, quantities = PAST_THE_END[name]
    example = example_of(name, spec, dtype)
    poison = example.cotangent if name != "ragged_gather_reduce" else example.arrays["rows"]
    past = np.isnan(np.asarray(poison, np.float32)).any(axis=(2, 3) if name == "attention" else 1)
    found = jax.device_get(run(name, example, implementation))
    assert past.any()
    assert all(np.isfinite(array.astype(np.float32)).all() for array in found.values())
    assert {quantity: bool((found[quantity][past] == 0).all()) for quantity in quantities} == dict.fromkeys(
        quantities, True
    )


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), [case for case in ALL if case[0] in WITH_GROUPS])
def test_empty_groups_have_zero_weight_gradients(name, implementation):
    example = example_of(name, {"grouped_matmul": "empty-groups", "expert_ffn": "biases"}[name])
    empty = np.asarray(example.arrays["group_sizes"]) == 0
    gradients = {q: a for q, a in run(name, example, implementation).items() if q not in ("value", "dlhs", "drows")}
    assert empty.any()
    assert {q for q, gradient in gradients.items() if (gradient[empty] != 0).any()} == set()
    assert {q for q, gradient in gradients.items() if (gradient[~empty] == 0).all()} == set()


FINE = 1 + np.arange(1, 13, dtype=np.float32).reshape(4, 3) * np.float32(2.0**-20)  # 1 for anything coarser
EYE, GROUP, ONES = np.eye(3, dtype=np.float32)[None], np.array([4], np.int32), np.ones(4, np.float32)
ROWS = np.arange(4, dtype=np.int32)
EXACT = {
    "ragged_gather": ({"x": FINE, "indices": ROWS, "weights": ONES}, {}),
    "ragged_gather_reduce": ({"rows": FINE, "indices": ROWS[:, None], "weights": ONES[:, None]}, {}),
    "grouped_matmul": ({"lhs": FINE, "rhs": EYE, "group_sizes": GROUP}, {}),
    "expert_ffn": (
        {"rows": FINE, "wi_0": EYE, "wi_1": None, "wo": EYE, "group_sizes": GROUP},
        {"activation": "relu2"},
    ),
    "attention": (dict.fromkeys(("query", "key", "value"), FINE[None, :, None]), {"window": 1}),
}


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), ALL)
def test_no_implementation_narrows_float32(name, implementation):
    arrays, options = EXACT[name]
    call = functools.partial(operation(name).function, **options, implementation=implementation)
    # As arguments: of constants, XLA would compute the result itself.
    out = jax.jit(lambda arrays: call(**arrays))(arrays)
    assert out.dtype == jnp.float32
    found = np.sqrt(out) if name == "expert_ffn" else np.asarray(out)
    np.testing.assert_allclose(found.reshape(FINE.shape), FINE, rtol=2.0**-22)


@pytest.mark.as_shipped
@pytest.mark.parametrize(
    ("name", "tile"), [("grouped_matmul", TRANSPOSED_TILE_SIZES[0]), ("expert_ffn", TILE_SIZES[0])]
)
def test_the_shared_test_is_large_enough_for_several_tiles(name, tile):
    assert int(example_of(name, "several-tiles").arrays["group_sizes"].max()) > 2 * tile


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), [case for case in FAST if case[0] in WITH_GROUPS])
def test_many_tiles_in_a_group_are_all_complete(name, implementation):
    rng = np.random.default_rng(0)
    sizes = np.array([3, 4 * TRANSPOSED_TILE_SIZES[0] + 77, 0, 4 * TILE_SIZES[0] + 1])
    rows, width, hidden = int(sizes.sum()) + 6, 5, 3
    keep = np.arange(rows) < sizes.sum()
    first = poison_rows(normal(rng, (rows, width), "float32"), keep)
    weights = [normal(rng, (4, hidden, width), "float32") for _ in range(3)]
    if name == "expert_ffn":
        arrays = {"rows": first, **dict(zip(("wi_0", "wi_1", "wo"), weights))}
        options, out = {"activation": "silu"}, width
    else:
        arrays = {"lhs": first, "rhs": weights[0]}
        options, out = {"transpose_rhs": True}, hidden
    cotangent = poison_rows(normal(rng, (rows, out), "float32"), keep)
    arrays["group_sizes"] = jnp.asarray(sizes, jnp.int32)
    example = Example(arrays=arrays, options=options, cotangent=cotangent, flops=0)
    assert beyond_rounding(name, example, run(name, example, implementation)) == {}
