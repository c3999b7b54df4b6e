"""The oracle of `ragged_gather_reduce`. Short, slow and independent: do not tidy it, do not speed it up."""

import jax
import jax.numpy as jnp

from raggedmoe.kernels.arrays import accumulator, pvary_like
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.registry import Implementation


def forward(rows, indices, start, end, weights):
    valid = (indices >= start) & (indices < end) & (indices >= 0) & (indices < rows.shape[0])
    wide = accumulator(rows.dtype)
    # Both factors are masked before they meet, so that a NaN in an invalid place stays out of the gradients too.
    picked = jnp.where(valid[:, :, None], rows[jnp.where(valid, indices, 0)].astype(wide), 0)
    if weights is not None:
        picked = picked * jnp.where(valid, weights.astype(wide), 0)[:, :, None]
    return picked.sum(axis=1).astype(rows.dtype)


def backward(rows, indices, start, end, weights, inverse, cotangent):
    del inverse  # the definition does not need it
    cotangent = cotangent.astype(accumulator(rows.dtype))
    # Linear in the rows, whose value does not matter without weights. Wide, so that the sum over a row's slots is.
    wide = jnp.zeros(rows.shape, cotangent.dtype) if weights is None else rows.astype(cotangent.dtype)
    wide = pvary_like(wide, cotangent, indices)  # in shard_map: otherwise the gradient would be summed over the mesh
    if weights is None:
        (drows,) = jax.vjp(lambda rows: forward(rows, indices, start, end, None), wide)[1](cotangent)
        return drows.astype(rows.dtype), None
    drows, dweights = jax.vjp(lambda rows, w: forward(rows, indices, start, end, w), wide, weights)[1](cotangent)
    return drows.astype(rows.dtype), dweights


IMPLEMENTATION = Implementation(
    operation="ragged_gather_reduce",
    name="reference",
    forward=forward,
    backward=backward,
    rank={"cpu": 90, "gpu": 90, "tpu": 90},
    proofs=PLAIN_XLA,
    note=lambda call, hardware: "the oracle: slow by design",
)
