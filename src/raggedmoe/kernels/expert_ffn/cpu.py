"""`expert_ffn` for CPUs: both projections of a tile of rows while its hidden activations are in the cache."""

import functools

import jax
import jax.numpy as jnp

from raggedmoe.kernels.arrays import accumulator, pvary_like
from raggedmoe.kernels.expert_ffn import matmuls
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.grouped_matmul import cpu as grouped_matmul
from raggedmoe.kernels.grouped_matmul.cpu import (
    dot,
    for_each_group,
    for_each_tile,
    from_bits,
    matrix_of_group,
    rows_of_tile,
    to_bits,
    to_sliceable,
    write_rows,
)
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.registry import EMULATED, Implementation


def forward(rows, weights, bounds, *, activation):
    wide = accumulator(rows.dtype)
    row_bits, weight_bits = jax.tree.map(to_sliceable, (rows, weights))

    def one_group(group, first, last, out_bits):
        def of_this_group(weight, bits):
            return matrix_of_group(bits, weight, group, wide)

        expert = jax.tree.map(of_this_group, weights, weight_bits, is_leaf=lambda part: isinstance(part, QArray))

        def one_tile(position, size, new, out_bits):
            tile = rows_of_tile(row_bits, rows, position, size, wide)
            gate = dot(tile, expert.wi_0, 1, 1)
            up = None if expert.wi_1 is None else dot(tile, expert.wi_1, 1, 1)
            if expert.biases is not None:
                gate = gate + expert.biases.wi_0[None]
                up = None if up is None else up + expert.biases.wi_1[None]
            hidden = ACTIVATIONS[activation](gate, up).astype(rows.dtype).astype(wide)
            out = dot(hidden, expert.wo, 1, 0)
            if expert.biases is not None:
                out = out + expert.biases.wo[None]
            return write_rows(out_bits, to_bits(out.astype(rows.dtype)), position, new)

        return for_each_tile(first, last, rows.shape[0], grouped_matmul.TILE_SIZES, one_tile, out_bits)

    out = pvary_like(jnp.zeros(rows.shape, rows.dtype), *jax.tree.leaves((rows, bounds, weights)))
    out = for_each_group(bounds, one_group, to_bits(out))
    return from_bits(out, rows.dtype, rows.dtype)


IMPLEMENTATION = Implementation(
    operation="expert_ffn",
    name="cpu",
    forward=forward,
    forward_keeping=functools.partial(matmuls.forward_keeping, grouped_matmul),
    backward=functools.partial(matmuls.backward, grouped_matmul),
    rank={"cpu": 10},
    proofs=PLAIN_XLA,
    quantized=EMULATED,
)
