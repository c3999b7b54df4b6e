"""The oracle of `attention`. Short, slow and independent: do not tidy it, do not speed it up."""

import jax
import jax.numpy as jnp
from jax import lax

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.registry import Implementation


def forward(operands, *, scale, window):
    return _forward(*operands, scale=scale, window=window)


def _forward(query, key, value, positions, segments, sinks, *, scale, window):
    wide = accumulator(query.dtype)
    num_queries, num_slots = query.shape[1], key.shape[1]
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(num_queries), query.shape[:2])
    p, j = positions[:, None, :, None], jnp.arange(num_slots)[None, None, None, :]
    visible = (j <= p) & (p >= 0)
    if window is not None:
        visible = visible & (p - j < window)
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])

    copies = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key.astype(wide), copies, axis=2), jnp.repeat(value.astype(wide), copies, axis=2)
    scores = scale * jnp.einsum("bsnh,blnh->bnsl", query.astype(wide), key, precision=lax.Precision.HIGHEST)
    logits = jnp.where(visible, scores, jnp.finfo(wide).min)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(wide)[None, :, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
    weights = jnp.where(visible, jax.nn.softmax(logits, axis=-1)[..., :num_slots], 0)
    out = jnp.einsum("bnsl,blnw->bsnw", weights, value, precision=lax.Precision.HIGHEST)
    logsumexp = jnp.where(visible.any(-1), jax.nn.logsumexp(logits, axis=-1), jnp.inf)
    return out.astype(query.dtype), logsumexp


def backward(operands, out, logsumexp, cotangent, *, scale, window):
    query, key, value, positions, segments, sinks = operands
    wide = accumulator(query.dtype)

    def value_of(query, key, value, sinks):
        return _forward(query, key, value, positions, segments, sinks, scale=scale, window=window)[0]

    floating = query.astype(wide), key.astype(wide), value.astype(wide), None if sinks is None else sinks.astype(wide)
    dquery, dkey, dvalue, dsinks = jax.vjp(value_of, *floating)[1](cotangent.astype(wide))
    dsinks = None if sinks is None else dsinks.astype(sinks.dtype)
    return dquery.astype(query.dtype), dkey.astype(key.dtype), dvalue.astype(value.dtype), dsinks


IMPLEMENTATION = Implementation(
    operation="attention",
    name="reference",
    forward=forward,
    backward=backward,
    rank={"cpu": 90, "gpu": 90, "tpu": 90},
    proofs=PLAIN_XLA,
    note=lambda call, hardware: "the oracle: slow by design",
)
