"""`grouped_matmul` by JAX's own TPU kernels, megablox, with tiles that fit the chip: its own default, 128 of each, is
about 50 times slower (docs/log.md)."""

import functools

import jax.numpy as jnp

from raggedmoe.kernels.arrays import full_precision, padded_rows
from raggedmoe.kernels.grouped_matmul import peers
from raggedmoe.kernels.grouped_matmul.gradients import gradients
from raggedmoe.kernels.proof import INTERPRETED_KERNEL
from raggedmoe.kernels.registry import Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    num_rows, inner = lhs.shape
    out_dim = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    sizes = (lhs.dtype.itemsize, jnp.dtype(out_dtype).itemsize)
    tiles = peers.forward_tiles(num_rows, inner, out_dim, rhs.shape[0], sizes, hardware)
    with full_precision(lhs.dtype):
        out = gmm(
            padded_rows(lhs, tiles.rows),
            rhs,
            peers.group_sizes(bounds),
            out_dtype,
            tuple(tiles),
            jnp.int32(peers.FIRST_GROUP),
            transpose_rhs=transpose_rhs,
        )
    return out[:num_rows]


def transposed(lhs, rhs, bounds, *, hardware):
    """``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    groups = bounds.shape[0] - 1
    (num_rows, inner), out_dim = lhs.shape, rhs.shape[1]
    tiles = peers.transposed_tiles(num_rows, inner, out_dim, groups, lhs.dtype.itemsize, hardware)
    with full_precision(lhs.dtype):
        return tgmm(
            padded_rows(lhs, tiles.rows).T,
            padded_rows(rhs, tiles.rows),
            peers.group_sizes(bounds),
            lhs.dtype,
            tuple(tiles),
            jnp.int32(peers.FIRST_GROUP),
            groups,
        )


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="megablox",
    forward=forward,
    backward=functools.partial(gradients, forward, transposed),
    # Before XLA's own (20): with its metadata, some 38 small XLA operations, 125,222 issue cycles by the compiler's
    # schedule at R 8192, I 2048, O 1408, G 16 on a v6e, where XLA's masks, rolls and ragged dot are 264,951.
    rank={"tpu": 16},
    proofs=INTERPRETED_KERNEL,
    why_not=peers.why_not,
    takes_hardware=True,
)
