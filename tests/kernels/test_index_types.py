"""Integers of every type mean their values: none wraps around, and none that is out of range is brought into it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.arrays import int32, scalar
from raggedmoe.kernels.attention.operands import segment_numbers
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.example import Example
from raggedmoe.kernels.grouped_matmul import cpu, xla
from raggedmoe.kernels.grouped_matmul.api import group_bounds
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.kernels.value_and_gradients import value_and_gradients
from raggedmoe.moe.router import check_replay
from raggedmoe.train.step.loss import cross_entropy_sum
from tests.kernels import numpy_oracle
from tests.kernels.compare import on_cpu

ALL = [(name, implementation) for name in OPERATIONS for implementation in on_cpu(name)]
SIZE = 300  # rows, more than eight bits can count
# Of each type, numbers that are no row's, and those of rows that a narrower type would make of them.
NO_ROW = {
    "int8": (-1, -128),
    "uint8": (),
    "int16": (-1, SIZE, 2**15 - 1),
    "int32": (-1, SIZE, -(2**31), 2**31 - 1),
    "uint32": (SIZE, 2**31 + 7, 2**32 - 1),
    "int64": (-1, 2**32 + 7, -(2**32) + 7, 2**63 - 1),
    "uint64": (SIZE, 2**32 + 7, 2**64 - 1),
}
WIDE = ("int64", "uint64")


def numbers(dtype):
    return np.asarray([0, 5, 100, 127, *NO_ROW[dtype], 3, 3, 3, 3][:8], dtype)


def example_of(name, dtype):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    options = {}
    if name == "ragged_gather":
        arrays = {"x": normal(SIZE, 3), "indices": numbers(dtype), "weights": normal(8)}
        options = {"start": 1, "end": 2**40}
    elif name == "ragged_gather_reduce":
        arrays = {"rows": normal(SIZE, 3), "indices": numbers(dtype).reshape(4, 2), "weights": normal(4, 2)}
        options = {"start": -(2**40), "end": 120}
    elif name == "attention":
        arrays = {"query": normal(1, 8, 1, 2), "key": normal(1, SIZE, 1, 2), "value": normal(1, SIZE, 1, 2)}
        arrays["positions"] = numbers(dtype)[None]
    else:
        matrices = ("rhs",) if name == "grouped_matmul" else ("wi_0", "wi_1", "wo")
        arrays = {"lhs" if name == "grouped_matmul" else "rows": normal(SIZE, 2)}
        arrays |= {matrix: normal(4, 2, 2) for matrix in matrices}
        arrays["group_sizes"] = np.asarray([100, 0, 120, 70], dtype)  # more together than eight bits hold
        options = {"activation": "silu"} if name == "expert_ffn" else {}
    like = next(array for key, array in arrays.items() if key in ("weights", "lhs", "rows", "query"))
    shape = {"ragged_gather": (8, 3), "ragged_gather_reduce": (4, 3)}.get(name, like.shape)
    return Example(arrays=arrays, options=options, cotangent=normal(*shape), flops=0)


def compare_with_numpy(name, implementation, dtype):
    example = example_of(name, dtype)
    exact = {
        key: np.asarray(value.tolist(), object if value.dtype.kind in "iu" else None)
        for key, value in example.arrays.items()
    }
    expected = getattr(numpy_oracle, name)(example.cotangent.astype(np.float64), **exact, **example.options)
    function = functools.partial(operation(name).function, **example.options, implementation=implementation)
    arrays = {key: jnp.asarray(value) for key, value in example.arrays.items()}
    found = value_and_gradients(function, arrays, jnp.asarray(example.cotangent))
    assert found.keys() == expected.keys()
    for quantity, value in found.items():
        np.testing.assert_allclose(value, expected[quantity], rtol=2e-5, atol=2e-5, err_msg=f"{quantity} of {dtype}")


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), ALL)
def test_integers_of_every_type_are_taken_by_value(name, implementation):
    for dtype in NO_ROW:
        if dtype not in WIDE:
            compare_with_numpy(name, implementation, dtype)


# They become int32 before an implementation is called: one of each operation shows it.
@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), [(name, on_cpu(name)[0]) for name in OPERATIONS])
def test_integers_of_64_bits_are_taken_by_value(name, implementation):
    with jax.enable_x64(True):
        for dtype in WIDE:
            compare_with_numpy(name, implementation, dtype)


def test_integers_that_int32_cannot_hold_become_its_ends():
    for dtype in NO_ROW:
        expected = np.clip(np.asarray(numbers(dtype).tolist(), object), -(2**31), 2**31 - 1)
        assert int32(numbers(dtype)).tolist() == expected.tolist()  # NumPy's, where JAX has 32 bits
    assert [int(scalar(value, 0)) for value in (2**40, -(2**40), np.int64(2**40), np.uint8(200))] == [
        2**31 - 1,
        -(2**31),
        2**31 - 1,
        200,
    ]


def test_segments_that_int32_cannot_hold_stay_different():
    segments = np.array([[7, 7 + 2**32, 2**31 - 1, 2**40, 2**40, -3, -3 - 2**32]])
    same = segments[0][:, None] == segments[0][None]

    def check(found):
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(found)[0][:, None] == np.asarray(found)[0][None], same)
        np.testing.assert_array_equal(np.asarray(found) < 0, segments < 0)

    check(segment_numbers(segments))
    with jax.enable_x64(True):
        check(jax.jit(segment_numbers)(jnp.asarray(segments)))


def test_a_replayed_expert_of_another_type_stays_who_it_is():
    with jax.enable_x64(True):
        replay = jnp.asarray([[2**32 + 1, 3], [0, -(2**40)]])
        found = jax.jit(lambda replay: check_replay(replay, 2, 2, 4))(replay)
    assert found.dtype == jnp.int32
    assert found.tolist() == [[2**31 - 1, 3], [0, -(2**31)]]


def test_targets_of_few_bits_are_found_in_a_large_vocabulary():
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((4, 5), dtype=np.float32), rng.standard_normal((SIZE, 5), dtype=np.float32)
    targets = np.array([0, 100, 127, 5])
    logits = hidden.astype(np.float64) @ head.T
    expected = (np.log(np.exp(logits).sum(1)) - logits[np.arange(4), targets]).sum()
    for dtype in ("int8", "uint8", "uint32"):
        given = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets, dtype), jnp.ones(4)
        found = jax.value_and_grad(cross_entropy_sum)(*given)
        np.testing.assert_allclose(found[0], expected, rtol=1e-5)
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        shares[np.arange(4), targets] -= 1
        np.testing.assert_allclose(found[1], shares @ head, rtol=1e-4, atol=1e-4)


def rows_of_groups(sizes, num_rows, num_groups, offset):
    """Where each group held here begins and ends, in Python's integers."""
    begins, row = [], 0
    for size in sizes:
        begins.append(row)
        row = min(row + max(size, 0), num_rows)
    ends = [*begins[1:], row]
    held = range(offset, offset + num_groups)
    return [(begins[g], ends[g]) if 0 <= g < len(sizes) else None for g in held]


@pytest.mark.parametrize("num_rows", [7, 2**30])
@pytest.mark.parametrize(
    "sizes", [[2, -1, 2], [2, 2**31 - 1, 2, 2**31 - 1, 2**31 - 1], [-(2**31), 3, 9], [2**31 - 1] * 6]
)
def test_bounds_of_sizes_that_cannot_be(sizes, num_rows):
    for offset in (None, 0, 1, -1, len(sizes), 2**31 - 1, -(2**31)):
        bounds = jax.jit(group_bounds, static_argnums=(1, 2))(jnp.asarray(sizes), len(sizes), num_rows, offset)
        assert bounds.dtype == jnp.int32
        assert (np.diff(bounds) >= 0).all()
        expected = rows_of_groups(sizes, num_rows, len(sizes), offset or 0)
        for place, rows in enumerate(expected):
            begin, end = int(bounds[place]), int(bounds[place + 1])
            assert begin == end if rows is None else (begin, end) == rows, (sizes, offset, place)


IMPOSSIBLE = ([2, -1, 2], [2, 2**31 - 1, 2], [-5, 4, 9], [2**31 - 1, 2**31 - 1, 2**31 - 1])


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), [c for c in ALL if c[0] in ("grouped_matmul", "expert_ffn")])
def test_traced_sizes_that_cannot_be_mean_the_same_everywhere(name, implementation):
    rng = np.random.default_rng(0)
    matrices = ("rhs",) if name == "grouped_matmul" else ("wi_0", "wi_1", "wo")
    arrays = {"lhs" if name == "grouped_matmul" else "rows": rng.standard_normal((5, 2), dtype=np.float32)}
    arrays |= {matrix: rng.standard_normal((3, 2, 2), dtype=np.float32) for matrix in matrices}
    cotangent = rng.standard_normal((5, 2), dtype=np.float32)
    options = {"activation": "silu"} if name == "expert_ffn" else {}
    function = functools.partial(operation(name).function, **options, implementation=implementation)
    given = jax.tree.map(jnp.asarray, arrays)
    both = jax.jit(lambda sizes: value_and_gradients(function, given | {"group_sizes": sizes}, jnp.asarray(cotangent)))
    for sizes in IMPOSSIBLE:
        rows = [end - begin for begin, end in rows_of_groups(sizes, 5, 3, 0)]
        expected = getattr(numpy_oracle, name)(cotangent, **arrays, group_sizes=rows, **options)
        for quantity, found in both(jnp.asarray(sizes)).items():
            np.testing.assert_allclose(
                found, expected[quantity], rtol=1e-5, atol=1e-5, err_msg=f"{quantity} of {sizes}"
            )


@pytest.mark.parametrize("module", [pytest.param(cpu, id="cpu"), pytest.param(xla, id="xla", marks=pytest.mark.ci)])
def test_the_weights_gradient_of_groups_that_begin_further_on_is_that_of_their_rows(module):
    """Experts of a later rank: rows before the first group are another's."""
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((9, 4)).astype(np.float32), rng.standard_normal((9, 3)).astype(np.float32)
    bounds = [2, 5, 5, 8]
    expected = [lhs[first:last].T.astype(float) @ rhs[first:last] for first, last in itertools.pairwise(bounds)]
    found = module.transposed_matmul(jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(bounds, jnp.int32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
