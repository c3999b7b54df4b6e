"""Products by one matrix that all rows use, or by one of each head, that is stored quantised: NumPy in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.dense_matmul import dense_matmul, dense_matmuls_for, matmul_per_head, merge_rows
from raggedmoe.kernels.native.library import takes
from raggedmoe.kernels.qarray import FORMATS, QArray
from raggedmoe.kernels.sum_bound import DEQUANTIZE_ROUNDINGS, SUM_ROUNDINGS
from tests.kernels.quantized_cases import draw_stored, on_device
from tests.kernels.quantized_oracle import block_sums

OUT, INNER, HEADS = 24, 64, 3
SCALES = {"one": (1, 1), "output": (OUT, 1), "inner": (1, INNER // 32), "blocks": (OUT // 8, INNER // 16)}
KERNELS = [
    pytest.param(False, id="xla"),
    pytest.param(True, id="native", marks=pytest.mark.skipif(not takes(jnp.float32), reason="no C++ library here")),
]


def run(matmul, native, x, weight, cotangent):
    """The product, and the gradients of the rows and of the scales."""

    @jax.jit
    def call(x, scale, cotangent):
        with dense_matmuls_for("cpu", x, on_mesh=not native):
            value = lambda x, scale: matmul(x, QArray(weight.qvalue, scale, None, weight.qtype))  # noqa: E731
            out, pull_back = jax.vjp(value, x, scale)
            return out, *pull_back(cotangent.astype(out.dtype))

    return jax.device_get(call(x, weight.scale, cotangent))


def assert_close(found, want, terms, dtype, *, roundings=1, exact_rows=True):
    """Within what sums in float32 explain; where XLA multiplies in bfloat16, also one rounding of each weight to it."""
    eps = float(jnp.finfo(jnp.float32).eps)
    bound = float(jnp.finfo(found.dtype).eps) * np.abs(want)
    bound += (SUM_ROUNDINGS * roundings + DEQUANTIZE_ROUNDINGS) * eps * terms
    if not exact_rows:
        bound += float(jnp.finfo(dtype).eps) * terms
    error = np.abs(np.asarray(found, np.float64) - want)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("native", KERNELS)
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize(
    ("qtype", "scales", "dtype", "transpose"),
    [
        pytest.param(*case, marks=[] if i % 4 == 0 else pytest.mark.product)
        for i, case in enumerate(itertools.product(FORMATS, SCALES, ("float32", "bfloat16"), (True, False)))
    ],
)
def test_rows_are_multiplied_by_what_a_matrix_stands_for(qtype, scales, dtype, transpose, num_rows, native):
    rng = np.random.default_rng(0)
    shape = SCALES[scales]
    stored = draw_stored(rng, (OUT, INNER), qtype, shape)
    if not transpose:
        stored = draw_stored(rng, (INNER, OUT), qtype, shape[::-1])
    matrix = stored.exact.T if transpose else stored.exact  # [I O]
    x = rng.standard_normal((num_rows, INNER)).astype(dtype)
    cotangent = rng.standard_normal((num_rows, OUT)).astype(dtype)
    matmul = functools.partial(dense_matmul, transpose_rhs=transpose, out_dtype=jnp.float32)
    out, of_x, of_scale = run(matmul, native, jnp.asarray(x), on_device(stored), jnp.asarray(cotangent))
    assert (out.dtype, of_x.dtype, of_scale.dtype) == (np.float32, x.dtype, np.float32)
    x, cotangent = (np.asarray(array, np.float64) for array in (x, cotangent))
    # In float32 a weight is as it is stored, and in bfloat16 where the kernel decodes it.
    how = {"dtype": dtype, "exact_rows": native or dtype == "float32"}
    assert_close(out, x @ matrix, np.abs(x) @ np.abs(matrix), **how)
    assert_close(of_x, cotangent @ matrix.T, np.abs(cotangent) @ np.abs(matrix.T), **how)
    of_matrix, terms = x.T @ cotangent, np.abs(x.T) @ np.abs(cotangent)
    if transpose:
        of_matrix, terms = of_matrix.T, terms.T
    want, terms = (
        block_sums(a * b, stored.scale.shape) for a, b in ((stored.values, of_matrix), (np.abs(stored.values), terms))
    )
    assert_close(of_scale, want, terms, dtype, roundings=2)


@pytest.mark.parametrize("native", KERNELS)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_head_is_multiplied_by_its_own_matrix(dtype, back, native):
    rng = np.random.default_rng(1)
    stored = draw_stored(rng, (HEADS, OUT, INNER), "float8_e4m3fn", (HEADS, OUT // 8, 2))
    matrices = stored.exact if back else stored.exact.swapaxes(1, 2)  # [N I O]
    x = rng.standard_normal((HEADS, 5, matrices.shape[1])).astype(dtype)
    cotangent = rng.standard_normal((HEADS, 5, matrices.shape[2])).astype(dtype)
    matmul = functools.partial(matmul_per_head, transpose_rhs=not back)
    out, of_x, of_scale = run(matmul, native, jnp.asarray(x), on_device(stored), jnp.asarray(cotangent))
    x, cotangent = (np.asarray(array, np.float64) for array in (x, cotangent))
    how = {"dtype": dtype, "exact_rows": native or dtype == "float32"}
    assert_close(out, x @ matrices, np.abs(x) @ np.abs(matrices), **how)
    transposed = matrices.swapaxes(1, 2)
    assert_close(of_x, cotangent @ transposed, np.abs(cotangent) @ np.abs(transposed), **how)
    of_matrices, terms = x.swapaxes(1, 2) @ cotangent, np.abs(x).swapaxes(1, 2) @ np.abs(cotangent)
    if not back:
        of_matrices, terms = of_matrices.swapaxes(1, 2), terms.swapaxes(1, 2)
    want = block_sums(stored.values * of_matrices, stored.scale.shape)
    assert_close(of_scale, want, block_sums(np.abs(stored.values) * terms, stored.scale.shape), dtype, roundings=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_computes_what_it_does_of_the_dequantised_matrix_bit_for_bit(dtype):
    rng = np.random.default_rng(2)
    stored = draw_stored(rng, (OUT, INNER), "float8_e4m3fn", (3, 2))
    x = jnp.asarray(rng.standard_normal((7, INNER)).astype(dtype))
    weight = jnp.asarray((stored.values * stored.scale.repeat(8, 0).repeat(32, 1)).astype(np.float32)).astype(dtype)
    matmul = jax.jit(functools.partial(dense_matmul, transpose_rhs=True, out_dtype=x.dtype))
    np.testing.assert_array_equal(matmul(x, on_device(stored)), matmul(x, weight))


def test_nothing_dequantised_is_kept_for_the_backward_pass():
    rng = np.random.default_rng(3)
    weight = on_device(draw_stored(rng, (OUT, INNER), "int8", (OUT, 1)))
    matmul = functools.partial(dense_matmul, transpose_rhs=True, out_dtype=jnp.float32)
    _, pull_back = jax.vjp(lambda x: matmul(x, weight), jnp.ones((5, INNER)))
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if hasattr(leaf, "dtype")]
    assert kept
    assert not any(leaf.size >= OUT * INNER and leaf.dtype != np.int8 for leaf in kept)


def test_blocks_of_several_heads_or_of_parts_of_one_are_those_of_the_rows():
    codes = np.arange(4 * 6 * 8, dtype=np.uint8).view(np.int8).reshape(4, 6, 8)
    for scales in ((2, 1, 1), (4, 3, 2), (1, 1, 8), (4, 1, 1)):
        scale = np.random.default_rng(4).uniform(1, 2, scales).astype(np.float32)
        merged = merge_rows(QArray(codes, scale, None, "int8"))
        whole = codes * scale.repeat(4 // scales[0], 0).repeat(6 // scales[1], 1).repeat(8 // scales[2], 2)
        rows = merged.scale.repeat(24 // merged.scale.shape[0], 0).repeat(8 // scales[2], 1)
        np.testing.assert_array_equal(merged.qvalue * rows, whole.reshape(24, 8))


def test_blocks_of_rows_that_do_not_follow_one_another_are_refused():
    weight = QArray(np.ones((4, 6, 8), np.int8), np.ones((2, 3, 1), np.float32), None, "int8")
    with pytest.raises(ValueError, match=r"blocks are connected rows of a matrix, got \[2, 3\] of them for \[4, 6\]"):
        merge_rows(weight)
