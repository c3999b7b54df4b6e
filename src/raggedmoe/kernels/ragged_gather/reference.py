"""The oracle of `ragged_gather`. Short, slow and independent: do not tidy it, do not speed it up."""

import jax
import jax.numpy as jnp

from raggedmoe.kernels.arrays import accumulator, pvary_like
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.registry import Implementation


def forward(x, indices, start, end, weights):
    row = jnp.arange(indices.shape[0])
    valid = (row >= start) & (row < end) & (indices >= 0) & (indices < x.shape[0])
    wide = accumulator(x.dtype)
    # Both factors are masked before they meet, so that a NaN in an invalid place stays out of the gradients too.
    picked = jnp.where(valid[:, None], x[jnp.where(valid, indices, 0)].astype(wide), 0)
    if weights is not None:
        picked = picked * jnp.where(valid, weights.astype(wide), 0)[:, None]
    return picked.astype(x.dtype)


def backward(x, indices, start, end, weights, inverse, cotangent):
    del inverse  # the definition does not need it
    row = jnp.arange(indices.shape[0])[:, None]
    cotangent = jnp.where((row >= start) & (row < end), cotangent, 0).astype(accumulator(x.dtype))
    # Linear in x, whose value does not matter without weights. Wide, so that the sum over a token's rows is.
    wide = jnp.zeros(x.shape, cotangent.dtype) if weights is None else x.astype(cotangent.dtype)
    wide = pvary_like(wide, cotangent, indices)  # in shard_map: otherwise the gradient would be summed over the mesh
    if weights is None:
        (dx,) = jax.vjp(lambda x: forward(x, indices, start, end, None), wide)[1](cotangent)
        return dx.astype(x.dtype), None
    dx, dweights = jax.vjp(lambda x, w: forward(x, indices, start, end, w), wide, weights)[1](cotangent)
    return dx.astype(x.dtype), dweights


IMPLEMENTATION = Implementation(
    operation="ragged_gather",
    name="reference",
    forward=forward,
    backward=backward,
    rank={"cpu": 90, "gpu": 90, "tpu": 90},
    proofs=PLAIN_XLA,
    note=lambda call, hardware: "the oracle: slow by design",
)
