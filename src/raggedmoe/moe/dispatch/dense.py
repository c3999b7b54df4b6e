"""Strategy `dense`: every expert computes every token. E/K times the work, nothing to sort: an independent check.

Where experts are split over a mesh axis, all tokens come to every rank, as in `ring`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import accumulator, pvary_like
from raggedmoe.moe.dispatch.strategy import num_held, weighs_input
from raggedmoe.moe.records import RouteMetadata, RouteOutput, StageSettings
from raggedmoe.sharding.axes import EXPERT


def prepare(routing: RouteOutput, settings: StageSettings) -> RouteMetadata:
    """Make row ``g·T + t`` for token t, of the tokens of all ranks, and expert g of those held here."""
    assert routing.experts is not None
    axes, held = settings.on_mesh.axes(EXPERT), num_held(settings)
    experts = lax.all_gather(routing.experts, axes, tiled=True)
    weights = lax.all_gather(routing.weights, axes, tiled=True)
    first = lax.axis_index(axes) * held
    num_tokens = experts.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    is_here = (experts >= first) & (experts < first + held)
    row = (experts - first) * num_tokens + token[:, None]
    row_of_slot = jnp.where(is_here, row, held * num_tokens).astype(jnp.int32)
    return RouteMetadata(
        token_of_row=jnp.tile(token, held),
        slot_of_row=None,
        row_of_slot=row_of_slot,
        weights=weights,
        group_sizes=jnp.full(held, num_tokens, jnp.int32),
        num_rows=jnp.full(1, held * num_tokens, jnp.int32),
        used=pvary_like(jnp.zeros(held * num_tokens, bool), row_of_slot).at[row_of_slot].set(True, mode="drop"),
        dropped=jnp.zeros(1, jnp.int32),
    )


def dispatch(
    x: Float[Array, "T D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "R D"]:
    """Repeat all tokens for each expert that is held here."""
    x = lax.all_gather(x, settings.on_mesh.axes(EXPERT), tiled=True)
    rows = jnp.tile(x, (num_held(settings), 1))
    if not weighs_input(settings):
        return rows
    weights = weights_of_rows(metadata, x)
    return (weights[:, None] * rows.astype(weights.dtype)).astype(x.dtype)


def unpermute(
    rows: Float[Array, "R D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "T D"]:
    """Add up what its own experts made of each token, weighted."""
    weights, chosen = weights_of_rows(metadata, rows), metadata.used
    assert chosen is not None
    wide = accumulator(rows.dtype)
    outputs = jnp.where(chosen[:, None], rows.astype(wide), 0)  # what other experts made of the token counts nowhere
    weights = (chosen if weighs_input(settings) else weights).astype(wide)
    held = num_held(settings)
    sums = jnp.einsum(
        "et,etd->td",
        weights.reshape(held, -1),
        outputs.reshape(held, -1, rows.shape[1]),
        precision=lax.Precision.HIGHEST,
    ).astype(rows.dtype)
    return lax.psum_scatter(sums, settings.on_mesh.axes(EXPERT), tiled=True)


def weights_of_rows(metadata: RouteMetadata, like: Float[Array, "_ _"]) -> Float[Array, " R"]:
    """Return the weight of every row; zero where its token did not choose its expert."""
    weights = pvary_like(metadata.weights, like)  # backward, summed for T·K slots, not for R rows
    nothing = pvary_like(jnp.zeros(metadata.token_of_row.shape, weights.dtype), weights)
    return nothing.at[metadata.row_of_slot].add(weights, mode="drop")
