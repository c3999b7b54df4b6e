"""Strategy `local`: all experts are here. Rows are sorted by expert; none is lost."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from raggedmoe.moe.balance import expert_counts
from raggedmoe.moe.dispatch.strategy import combine_rows, gather_rows
from raggedmoe.moe.records import RouteMetadata, RouteOutput, StageSettings


def sort_slots(groups: Int[Array, "T K"], num_groups: int) -> tuple[Int[Array, " T*K"], Int[Array, "T K"]]:
    """Sort the slots by their groups, ties by the slots' numbers; return that order, and each slot's place in it.

    A slot of group ``num_groups`` is nowhere. Where a group and a slot fit in one number, one array is sorted, not two.
    """
    flat, num_slots = groups.reshape(-1), groups.size
    if (num_groups + 1) * num_slots <= 2**32:
        keys = flat.astype(jnp.uint32) * num_slots + jnp.arange(num_slots, dtype=jnp.uint32)
        slots = (jnp.sort(keys, stable=False) % num_slots).astype(jnp.int32)
    else:
        slots = jnp.argsort(flat, stable=True).astype(jnp.int32)
    places = jnp.zeros_like(slots).at[slots].set(jnp.arange(num_slots, dtype=jnp.int32), unique_indices=True)
    return slots, places.reshape(groups.shape)


def prepare(routing: RouteOutput, settings: StageSettings) -> RouteMetadata:
    """Sort the slots by expert. Masked tokens are of expert E: their rows come last, past the valid ones."""
    assert routing.experts is not None
    slots, places = sort_slots(routing.experts, settings.config.num_experts)
    group_sizes = expert_counts(routing.experts, settings.config.num_experts)
    return RouteMetadata(
        token_of_row=slots // routing.experts.shape[1],
        slot_of_row=slots,
        row_of_slot=places,
        weights=routing.weights,
        group_sizes=group_sizes,
        num_rows=group_sizes.sum(dtype=jnp.int32, keepdims=True),
        used=None,
        dropped=jnp.zeros(1, jnp.int32),
    )


def dispatch(
    x: Float[Array, "T D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "R D"]:
    """Copy each token into a row for each of its choices."""
    return gather_rows(x, metadata, settings)


def unpermute(
    rows: Float[Array, "R D"], routing: RouteOutput, metadata: RouteMetadata, settings: StageSettings
) -> Float[Array, "T D"]:
    """Add up the rows of each token, weighted."""
    return combine_rows(rows, metadata, settings)
