"""The expert computation in parts of the model width, so that moving one part can overlap with multiplying another.

One part is the ordinary case: there is no other copy of this loop.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.dispatch import Strategy
from raggedmoe.moe.experts import activate, gmm_down, gmm_up
from raggedmoe.moe.records import MoEParams, RouteMetadata, RouteOutput


def experts_by_width(
    x: Float[Array, "T D"],
    params: MoEParams,
    routing: RouteOutput,
    metadata: RouteMetadata,
    strategy: Strategy,
    config: MoEConfig,
) -> Float[Array, "T D"]:
    """Dispatch, both projections and unpermute, for each chunk of columns; the activation once, between the loops."""
    kernels, hardware, dtype = config.kernel_choice, config.hardware, x.dtype
    step = x.shape[1] // config.width_chunks
    chunks = [slice(start, start + step) for start in range(0, x.shape[1], step)]
    wi_0, wo = params.wi_0.astype(dtype), params.wo.astype(dtype)
    wi_1 = None if params.wi_1 is None else params.wi_1.astype(dtype)
    gate = up = None
    for columns in chunks:
        with jax.named_scope("dispatch"):
            rows = strategy.dispatch(x[:, columns], routing, metadata)
        wi_1_chunk = None if wi_1 is None else wi_1[:, :, columns]
        with jax.named_scope("gmm_up"):
            more = gmm_up(rows, wi_0[:, :, columns], wi_1_chunk, metadata.group_sizes, kernels, hardware)
        gate = more[0] if gate is None else gate + more[0]
        up = more[1] if up is None or more[1] is None else up + more[1]
    assert gate is not None
    gate, up = checkpoint_name(gate, "moe_up"), None if up is None else checkpoint_name(up, "moe_up")
    sizes, biases = metadata.group_sizes, params.biases
    with jax.named_scope("activate"):
        hidden = activate(gate, up, biases, sizes, wo.shape[0], config.experts.activation, dtype)
    parts = []
    for columns in chunks:
        bias = None if biases is None else biases.wo[:, columns]
        with jax.named_scope("gmm_down"):
            out = checkpoint_name(gmm_down(hidden, wo[:, :, columns], bias, sizes, kernels, hardware), "moe_down")
        with jax.named_scope("unpermute"):
            parts.append(strategy.unpermute(out, routing, metadata))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
