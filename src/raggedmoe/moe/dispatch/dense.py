"""Strategy `dense`: every expert computes every token. E/K times the work, nothing to sort: an independent check."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.moe.dispatch.strategy import Strategy, StrategySettings
from raggedmoe.moe.records import RouteMetadata, RouteOutput


def make(settings: StrategySettings) -> Strategy:
    num_experts, weigh_input = settings.num_experts, settings.weigh_input
    return Strategy(
        prepare=lambda routing: prepare(routing, num_experts),
        dispatch=lambda x, routing, metadata: dispatch(x, routing, num_experts, weigh_input),
        unpermute=lambda rows, routing, metadata: unpermute(rows, routing, num_experts, weigh_input),
    )


def prepare(routing: RouteOutput, num_experts: int) -> RouteMetadata:
    """Row ``e·T + t`` is token t at expert e."""
    num_tokens = routing.mask.shape[0]
    return RouteMetadata(
        token_of_row=jnp.tile(jnp.arange(num_tokens, dtype=jnp.int32), num_experts),
        slot_of_row=None,
        row_of_slot=None,
        weights=routing.weights,
        group_sizes=None,
        num_rows=jnp.asarray(num_experts * num_tokens, jnp.int32),
        dropped=jnp.zeros((), jnp.int32),
    )


def dispatch(x: Float[Array, "T D"], routing: RouteOutput, num_experts: int, weigh_input: bool) -> Float[Array, "R D"]:
    """All tokens, once for each expert."""
    if not weigh_input:
        return jnp.tile(x, (num_experts, 1))
    combine, _ = combine_matrix(routing, num_experts)
    return (combine.T[:, :, None] * x.astype(combine.dtype)[None]).astype(x.dtype).reshape(-1, x.shape[1])


def unpermute(
    rows: Float[Array, "R D"], routing: RouteOutput, num_experts: int, weigh_input: bool
) -> Float[Array, "T D"]:
    """Each token's weighted sum over its own experts."""
    combine, chosen = combine_matrix(routing, num_experts)
    wide = accumulator(rows.dtype)
    outputs = rows.reshape(num_experts, -1, rows.shape[1]).astype(wide)
    outputs = jnp.where(chosen.T[:, :, None], outputs, 0)  # what other experts made of the token counts nowhere
    weights = chosen.astype(wide) if weigh_input else combine.astype(wide)
    return jnp.einsum("te,etd->td", weights, outputs, precision=lax.Precision.HIGHEST).astype(rows.dtype)


def combine_matrix(routing: RouteOutput, num_experts: int) -> tuple[Float[Array, "T E"], Bool[Array, "T E"]]:
    """Weight of each expert for each token, and whether it was chosen."""
    one_hot = jax.nn.one_hot(routing.experts, num_experts, dtype=routing.weights.dtype)
    return jnp.einsum("tk,tke->te", routing.weights, one_hot, precision=lax.Precision.HIGHEST), one_hot.sum(1) > 0
