"""`grouped_matmul` for CPUs: a loop over the groups that have rows, tile by tile, each tile one dense matmul.

Measured with `raggedmoe bench grouped_matmul`; docs/log.md has the alternatives. Four things carry the speed:

- Only groups with rows are visited, so an idle expert costs nothing, and a group's matrix is read once.
- A group is whole tiles of 256 rows and one last tile of the smallest size that holds the rest. That last one is a
  `while` that runs once or never, not a `switch`: XLA copies the carried output around a `switch` (JAX 0.10.2).
- Each `while` advances its own position. With a body that does not depend on what it carries, XLA would hoist the
  matmul out of the loop and run it always.
- A 16-bit output is carried as its bits: on JAX 0.10.2 XLA widens a whole bfloat16 buffer to float32 and back around
  every update (0.32 of the limit, instead of 0.9 and more). Inputs too, on the versions that widen all to slice.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from raggedmoe import compat
from raggedmoe.kernels.arrays import accumulator, pvary_like
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.registry import EMULATED, Implementation

# The gaps between them are what a group's last tile may waste: by halves alone, E=256 took 9 % longer (docs/log.md).
TILE_SIZES = (256, 208, 160, 128, 104, 80, 64, 48, 32, 16, 8)
# The gradient of rhs adds a whole matrix for every tile: larger tiles, and finer last ones, pay.
TRANSPOSED_TILE_SIZES = (512, 448, 384, 320, 256, 192, 128, 64, 32, 16)


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype):
    wide = accumulator(lhs.dtype)
    out = jnp.zeros((lhs.shape[0], rhs.shape[1] if transpose_rhs else rhs.shape[2]), out_dtype)
    out = pvary_like(out, *jax.tree.leaves((lhs, rhs, bounds)))
    lhs_bits, rhs_bits = jax.tree.map(to_sliceable, (lhs, rhs))

    def one_group(group, first, last, out_bits):
        matrix = matrix_of_group(rhs_bits, rhs, group, wide)

        def one_tile(position, size, new, out_bits):
            rows = rows_of_tile(lhs_bits, lhs, position, size, wide)
            product = dot(rows, matrix, 1, 1 if transpose_rhs else 0)
            return write_rows(out_bits, to_bits(product.astype(out_dtype)), position, new)

        return for_each_tile(first, last, lhs.shape[0], TILE_SIZES, one_tile, out_bits)

    return from_bits(for_each_group(bounds, one_group, to_bits(out)), out_dtype, out_dtype)


def transposed_matmul(lhs, rhs, bounds, out_dtype=None):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    wide, leaves = accumulator(lhs.dtype), jax.tree.leaves((lhs, rhs, bounds))
    out_dtype = lhs.dtype if out_dtype is None else out_dtype
    shape = (lhs.shape[1], rhs.shape[1])
    out = to_bits(pvary_like(jnp.zeros((bounds.shape[0] - 1, *shape), out_dtype), *leaves))
    lhs_bits, rhs_bits = jax.tree.map(to_sliceable, (lhs, rhs))

    def one_group(group, first, last, out):
        def one_tile(position, size, new, total):
            a = rows_of_tile(lhs_bits, lhs, position, size, wide)
            b = rows_of_tile(rhs_bits, rhs, position, size, wide)
            return total + dot(jnp.where(new, a, 0), jnp.where(new, b, 0), 0, 0)

        start = pvary_like(jnp.zeros(shape, wide), *leaves)
        total = for_each_tile(first, last, lhs.shape[0], TRANSPOSED_TILE_SIZES, one_tile, start)
        return lax.dynamic_update_index_in_dim(out, to_bits(total.astype(out_dtype)), group, 0)

    return from_bits(for_each_group(bounds, one_group, out), out_dtype, out_dtype)


def matrix_of_group(bits, operand, group, wide):
    """Take a group's matrix out of an operand that `to_sliceable` was applied to, widened or dequantised."""

    def take(array):  # of scales there may be one for all groups
        return lax.dynamic_index_in_dim(array, group if array.shape[0] > 1 else 0, 0, keepdims=False)

    return _widen(jax.tree.map(take, bits), operand, wide)


def rows_of_tile(bits, operand, position, size, wide):
    """Take the rows of a tile, likewise."""

    def take(array):
        return lax.dynamic_slice_in_dim(array, position, size) if array.shape[0] > 1 else array[:1]

    return _widen(jax.tree.map(take, bits), operand, wide)


def _widen(part, operand, wide):
    if not isinstance(operand, QArray):
        return from_bits(part, operand.dtype, wide)
    scale = part.scale if operand.scale.dtype == jnp.uint8 else from_bits(part.scale, operand.scale.dtype, wide)
    return dequantize(replace(part, scale=scale), wide)


def for_each_group(bounds, one_group, carry):
    """Run ``carry = one_group(group, first, last, carry)`` for each group that has rows, in order."""
    has_rows = bounds[1:] > bounds[:-1]
    groups = jnp.nonzero(has_rows, size=has_rows.shape[0], fill_value=0)[0].astype(jnp.int32)

    def body(i, carry):
        return one_group(groups[i], bounds[groups[i]], bounds[groups[i] + 1], carry)

    return lax.fori_loop(0, has_rows.sum(dtype=jnp.int32), body, carry)


def for_each_tile(first, last, num_rows, sizes, one_tile, carry):
    """Run ``carry = one_tile(position, size, new, carry)`` over tiles that cover the rows ``first <= r < last``.

    A tile never leaves the array, so the last one may reach back into rows that were done before, and beyond ``last``:
    ``new`` is the column that says which of its rows are the group's and not yet done.
    """
    sizes = tuple(size for size in sizes if size <= num_rows) or (num_rows,)

    def loop(size, more_than, state):
        def body(state):
            done, carry = state
            position = jnp.minimum(done, num_rows - size)
            row = position + lax.iota(jnp.int32, size)[:, None]
            return done + size, one_tile(position, size, (row >= done) & (row < last), carry)

        return lax.while_loop(lambda state: last - state[0] > more_than, body, state)

    state = loop(sizes[0], sizes[0] - 1, (first, carry))
    for size, smaller in zip(sizes, (*sizes[1:], 0)):
        state = loop(size, smaller, state)
    return state[1]


def write_rows(out, tile, position, new):
    """Write the new rows of a tile to ``out`` at ``position``."""
    old = lax.dynamic_slice_in_dim(out, position, tile.shape[0])
    return lax.dynamic_update_slice_in_dim(out, jnp.where(new, tile, old), position, 0)


def dot(a, b, a_dim, b_dim):
    """Contract those dimensions in full precision."""
    return lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())), precision=lax.Precision.HIGHEST)


def to_bits(x):
    """View a 16-bit array as unsigned integers, and leave any other as it is."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def to_sliceable(x):
    """Put an array into the form of which XLA takes a slice without touching the rest, or touching it least."""
    return to_bits(x) if compat.SLICES_BF16_BY_WIDENING_ALL else x


def from_bits(x, dtype, wide):
    """Undo `to_bits` or `to_sliceable` of an array of type ``dtype``, and widen it."""
    return (lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x).astype(wide)


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="cpu",
    forward=forward,
    backward=functools.partial(matmul_gradients, forward, transposed_matmul),
    transposed=transposed_matmul,
    rank={"cpu": 10},
    proofs=PLAIN_XLA,
    quantized=EMULATED,
)
