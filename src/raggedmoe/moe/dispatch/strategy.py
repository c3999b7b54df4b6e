"""What strategies are made from, and the two moves that most of them share.

A strategy is a file beside this one with three functions, `prepare`, `dispatch` and `unpermute`. They see one device's
part of the tokens, in `shard_map` where there are several, and any columns of it: see width chunks.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import pvary_like
from raggedmoe.kernels.quantized_move import move_quantized
from raggedmoe.kernels.ragged_gather.api import ragged_gather
from raggedmoe.kernels.ragged_gather_reduce.api import ragged_gather_reduce
from raggedmoe.moe.records import RouteMetadata, StageSettings
from raggedmoe.params import check_divides
from raggedmoe.sharding.axes import EXPERT


def may_drop(settings: StageSettings) -> bool:
    """Tell whether a slot may be dropped; otherwise nobody has to ask the other ranks."""
    return settings.config.capacity_factor is not None or settings.execution.ragged_buffer_factor is not None


def weighs_input(settings: StageSettings) -> bool:
    """Tell whether the weights multiply the rows on the way in, not on the way out."""
    return settings.config.router.weigh == "input"


def most_rows(settings: StageSettings, num_tokens: int, per_token: int) -> int:
    """Count the rows that one rank can have for another: every token chooses as many experts there as it can."""
    return num_tokens * min(per_token, num_held(settings))


def receive_rows(settings: StageSettings, num_tokens: int, per_token: int) -> int:
    """Count the rows of the receive buffer, for so many tokens on each rank."""
    num_ranks, factor = settings.on_mesh.size(EXPERT), settings.execution.ragged_buffer_factor
    return buffer_rows(num_tokens, per_token, num_held(settings), num_ranks, factor)


def buffer_rows(num_tokens: int, per_token: int, held: int, num_ranks: int, factor: float | None) -> int:
    """Count the rows that a rank with so many experts has room for.

    They are those of the worst case, in which each token chooses as many of its experts as it can; with a factor, that
    multiple of a balanced share, rounded down.
    """
    worst = num_ranks * num_tokens * min(per_token, held)
    return worst if factor is None else min(max(int(num_tokens * per_token * factor), 1), worst)


def num_held(settings: StageSettings) -> int:
    """Return G, the number of experts on each rank, which must be the same on all."""
    num_experts, num_ranks = settings.config.num_experts, settings.on_mesh.size(EXPERT)
    check_divides("num_experts", num_experts, "expert_parallelism", num_ranks)
    return num_experts // num_ranks


def gather_rows(x: Float[Array, "T D"], metadata: RouteMetadata, settings: StageSettings) -> Float[Array, "R D"]:
    """Copy its token into every row, times its weight if weights are for the input."""
    weights = None
    if weighs_input(settings):
        weights = pvary_like(metadata.weights, x).reshape(-1)  # backward, summed for T·K slots, not for R rows
        if metadata.slot_of_row is not None:
            weights = jnp.take(weights, metadata.slot_of_row, mode="clip")
    return ragged_gather(
        x,
        metadata.token_of_row,
        end=metadata.num_rows.squeeze(),
        weights=weights,
        inverse=metadata.row_of_slot,
        implementation=settings.execution.kernel_choice.ragged_gather,
        hardware=settings.execution.hardware,
    )


def send_rows(
    move: Callable[[Array, Any], Array], rows: Float[Array, "R D"], places: Any, settings: StageSettings
) -> Float[Array, "N D"]:
    """Send rows to their experts' ranks by ``move(rows, places)``, in 8 bits if the execution says so."""
    qtype = settings.execution.dispatch_dtype
    return move(rows, places) if qtype is None else move_quantized(move, qtype, rows, places)


def combine_rows(rows: Float[Array, "R D"], metadata: RouteMetadata, settings: StageSettings) -> Float[Array, "T D"]:
    """Add up every token's rows, weighted unless the input was."""
    assert metadata.row_of_slot is not None
    return ragged_gather_reduce(
        rows,
        metadata.row_of_slot,
        weights=None if weighs_input(settings) else metadata.weights,
        end=metadata.num_rows.squeeze(),
        inverse=metadata.slot_of_row,
        implementation=settings.execution.kernel_choice.ragged_gather_reduce,
        hardware=settings.execution.hardware,
    )
