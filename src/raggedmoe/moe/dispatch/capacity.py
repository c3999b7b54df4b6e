"""Strategy `capacity`: every expert has C slots, full or not; what does not fit is dropped and counted."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.moe.balance import expert_counts
from raggedmoe.moe.dispatch.local import sorted_slots
from raggedmoe.moe.dispatch.strategy import Strategy, StrategySettings, combine_rows, gather_rows
from raggedmoe.moe.records import RouteMetadata, RouteOutput


def make(settings: StrategySettings) -> Strategy:
    assert settings.capacity is not None
    num_experts, capacity = settings.num_experts, settings.capacity

    def unpermute(rows: Float[Array, "R D"], routing: RouteOutput, metadata: RouteMetadata) -> Float[Array, "T D"]:
        if routing.tokens is None:
            return combine_rows(rows, metadata, settings)
        weights = None if settings.weigh_input else metadata.weights
        return add_to_tokens(rows, metadata.token_of_row, weights, routing.mask.shape[0])

    return Strategy(
        prepare=lambda routing: (
            prepare_token_choice(routing, num_experts, capacity)
            if routing.tokens is None
            else prepare_expert_choice(routing)
        ),
        dispatch=lambda x, routing, metadata: gather_rows(x, metadata, settings),
        unpermute=unpermute,
        may_drop=True,
    )


def prepare_token_choice(routing: RouteOutput, num_experts: int, capacity: int) -> RouteMetadata:
    """Place slots first choices first, then second choices, and so on, each in the order of the tokens."""
    assert routing.experts is not None
    num_tokens, per_token = routing.experts.shape
    by_choice = routing.experts.T  # [K T]: the order in which slots are placed
    _, places = sorted_slots(by_choice)
    counts = expert_counts(by_choice, num_experts)
    firsts = jnp.cumsum(counts) - counts
    position = (places - jnp.take(firsts, by_choice, mode="clip")).T
    kept = (routing.experts < num_experts) & (position < capacity)
    num_rows = num_experts * capacity
    row_of_slot = jnp.where(kept, routing.experts * capacity + position, num_rows).astype(jnp.int32)
    slots = jnp.arange(num_tokens * per_token, dtype=jnp.int32)
    slot_of_row = jnp.full(num_rows, -1, jnp.int32).at[row_of_slot.reshape(-1)].set(slots, mode="drop")
    return RouteMetadata(
        token_of_row=jnp.where(slot_of_row < 0, num_tokens, slot_of_row // per_token),
        slot_of_row=slot_of_row,
        row_of_slot=row_of_slot,
        weights=routing.weights,
        group_sizes=None,
        num_rows=jnp.asarray(num_rows, jnp.int32),
        used=slot_of_row >= 0,
        dropped=((routing.experts < num_experts) & ~kept).sum(dtype=jnp.int32),
    )


def prepare_expert_choice(routing: RouteOutput) -> RouteMetadata:
    """The rows are the experts' own choices; dropped are the tokens that no expert took."""
    assert routing.tokens is not None
    tokens = routing.tokens.reshape(-1).astype(jnp.int32)
    taken = jnp.zeros(routing.mask.shape, bool).at[tokens].set(True, mode="drop")
    return RouteMetadata(
        token_of_row=tokens,
        slot_of_row=None,
        row_of_slot=None,
        weights=routing.weights.reshape(-1),
        group_sizes=None,
        num_rows=jnp.asarray(tokens.size, jnp.int32),
        used=tokens < routing.mask.shape[0],
        dropped=(routing.mask & ~taken).sum(dtype=jnp.int32),
    )


def add_to_tokens(
    rows: Float[Array, "R D"], tokens: Int[Array, " R"], weights: Float[Array, " R"] | None, num_tokens: int
) -> Float[Array, "T D"]:
    """Every row, weighted, added to its token: the combine of expert choice, where a token has any number of rows."""
    wide = accumulator(rows.dtype)
    # Empty slots compute something from a zero row (biases): masked, not only dropped, for the weights' gradient.
    present = (tokens < num_tokens)[:, None]
    terms = jnp.where(present, rows, 0).astype(wide)
    if weights is not None:
        terms = terms * weights.astype(wide)[:, None]
    return jnp.zeros((num_tokens, rows.shape[1]), wide).at[tokens].add(terms, mode="drop").astype(rows.dtype)
