"""What a strategy is, and the two moves that most of them share."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.ragged_gather.api import ragged_gather
from raggedmoe.kernels.ragged_gather_reduce.api import ragged_gather_reduce
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.moe.records import RouteMetadata, RouteOutput


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """What strategies are made from."""

    num_experts: int
    capacity: int | None  # slots of each expert, for "capacity"
    weigh_input: bool  # the weights multiply the rows on the way in, not on the way out
    kernels: KernelChoice
    hardware: Hardware | str | None
    axis: str | None  # the mesh axis that experts are split over, for "ring"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How rows reach the experts and come back. ``x`` may be any columns of the tokens: see width chunks."""

    prepare: Callable[[RouteOutput], RouteMetadata]
    dispatch: Callable[[Float[Array, "T D"], RouteOutput, RouteMetadata], Float[Array, "R D"]]
    unpermute: Callable[[Float[Array, "R D"], RouteOutput, RouteMetadata], Float[Array, "T D"]]
    axis: str | None = None  # the mesh axis that tokens are split over, hence the one to reduce losses over


def gather_rows(x: Float[Array, "T D"], metadata: RouteMetadata, settings: StrategySettings) -> Float[Array, "R D"]:
    """The token of every row, times its weight if weights are for the input."""
    weights = None
    if settings.weigh_input:
        weights = metadata.weights.reshape(-1)
        if metadata.slot_of_row is not None:
            weights = jnp.take(weights, metadata.slot_of_row, mode="clip")
    return ragged_gather(
        x,
        metadata.token_of_row,
        end=metadata.num_rows,
        weights=weights,
        inverse=metadata.row_of_slot,
        implementation=settings.kernels.ragged_gather,
        hardware=settings.hardware,
    )


def combine_rows(rows: Float[Array, "R D"], metadata: RouteMetadata, settings: StrategySettings) -> Float[Array, "T D"]:
    """The weighted sum of every token's rows."""
    assert metadata.row_of_slot is not None
    return ragged_gather_reduce(
        rows,
        metadata.row_of_slot,
        weights=None if settings.weigh_input else metadata.weights,
        end=metadata.num_rows,
        inverse=metadata.slot_of_row,
        implementation=settings.kernels.ragged_gather_reduce,
        hardware=settings.hardware,
    )
