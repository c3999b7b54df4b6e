"""`attention` by two einsums around a softmax: all scores at once, for short sequences and for decoding."""

import jax.numpy as jnp

from raggedmoe.hardware import MIB, Hardware
from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.attention.operands import Operands, by_key_head, einsum, visible
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.registry import Call, Implementation

# From where auto leaves it. Milliseconds here and in `chunked`, float32, 2 cores, N16 M4 H128 (docs/log.md):
#   forward + backward, B1:  S256 13.8, 12.6;  S512 92, 47;  S1024 423, 135;  S2048 1998, 460
#   decoding, B8, at the last slot:  L256 1.6, 1.6;  L512 4.1, 5.0;  L1024 18, 11;  L4096 92, 46, and at slot 500: 93, 7
#   forward + backward, N4 H48:  B32 S128 59, 52;  B16 S256 104, 43;  B8 S512 207, 64 (CPU time)
MOST_SCORES = 256 * 256  # of a head
MOST_SCORES_ON_CPU = 128 * 128  # of more than one sequence, which chunks keep in the cache
MOST_SLOTS = 512
MOST_BYTES = 256 * MIB  # of all scores


def forward(operands, *, scale, window):
    value, heads = operands.value, operands.query.shape[2]
    scores = _scores(operands, scale, window)
    peak = scores.max(-1)
    if operands.sinks is not None:
        sinks = _by_head(operands.sinks, scores)
        peak = jnp.maximum(peak, sinks)
    peak = jnp.where(scores.max(-1) == -jnp.inf, jnp.inf, peak)  # sees nothing: every weight is exp(-inf) = 0
    weights = jnp.exp(scores - peak[..., None])
    total = weights.sum(-1)
    if operands.sinks is not None:
        total += jnp.exp(sinks - peak)
    total = jnp.where(total == 0, 1, total)
    out = einsum("bmpsl,blmw->bsmpw", weights.astype(value.dtype), value) / jnp.moveaxis(total, 3, 1)[..., None]
    batch, length, *_, width = out.shape
    logsumexp = (peak + jnp.log(total)).reshape(batch, heads, length)
    return out.reshape(batch, length, heads, width).astype(value.dtype), logsumexp


def backward(operands, out, logsumexp, cotangent, *, scale, window):
    query, key, value, _, _, sinks = operands
    wide = accumulator(query.dtype)
    scores = _scores(operands, scale, window)
    logsumexp = logsumexp.reshape(scores.shape[:-1])
    weights = jnp.exp(scores - logsumexp[..., None])
    cotangent, out = by_key_head(cotangent, key.shape[2]), by_key_head(out, key.shape[2])
    mean = jnp.einsum("bsmpw,bsmpw->bmps", cotangent.astype(wide), out.astype(wide))
    dvalue = einsum("bmpsl,bsmpw->blmw", weights.astype(value.dtype), cotangent)
    slopes = weights * (einsum("bsmpw,blmw->bmpsl", cotangent, value) - mean[..., None]) * scale
    slopes = slopes.astype(query.dtype)
    dquery = einsum("bmpsl,blmh->bsmph", slopes, key).reshape(query.shape)
    dkey = einsum("bmpsl,bsmph->blmh", slopes, by_key_head(query, key.shape[2]))
    dsinks = None
    if sinks is not None:
        dsinks = -(jnp.exp(_by_head(sinks, scores) - logsumexp) * mean).sum((0, 3)).reshape(-1).astype(sinks.dtype)
    return dquery.astype(query.dtype), dkey.astype(key.dtype), dvalue.astype(value.dtype), dsinks


def _scores(operands: Operands, scale, window):
    """Compute the scores ``[B M N/M S L]``, minus infinity where a query does not see a slot."""
    key = operands.key
    slot = jnp.arange(key.shape[1], dtype=jnp.int32)
    segments = None if operands.segments is None else (operands.segments, operands.segments)
    seen = visible(operands.query_positions(), slot, window, segments)
    scores = einsum("bsmph,blmh->bmpsl", by_key_head(operands.query, key.shape[2]), key) * scale
    return jnp.where(seen[:, None, None], scores, -jnp.inf)


def _by_head(sinks, scores):
    return sinks.astype(scores.dtype).reshape(1, *scores.shape[1:3], 1)


def auto_why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why chunks suit the call better: too many scores to hold at once, or too much read for the few that count."""
    batch, num_queries, heads, _ = call.arrays["query"].shape
    num_slots = call.arrays["key"].shape[1]
    held = batch * heads * num_queries * num_slots * accumulator(call.arrays["query"].dtype).itemsize
    several_on_cpu = hardware.platform == "cpu" and batch > 1
    if num_queries * num_slots > (MOST_SCORES_ON_CPU if several_on_cpu else MOST_SCORES) or held > MOST_BYTES:
        return f"would hold all scores, {held / MIB:.0f} MiB, half of them of slots that nobody sees; name it to use it"
    if hardware.platform == "cpu" and num_slots > MOST_SLOTS:
        return f"would rearrange all {num_slots} slots, whether they are seen or not; name it to use it"
    return None


IMPLEMENTATION = Implementation(
    operation="attention",
    name="dot_product",
    forward=forward,
    backward=backward,
    rank={"cpu": 10, "gpu": 10, "tpu": 10},
    proofs=PLAIN_XLA,
    auto_why_not=auto_why_not,
)
