"""What strategies are made from, and the two moves that most of them share.

A strategy is a file beside this one with three functions, `prepare`, `dispatch` and `unpermute`. They see one device's
part of the tokens, in `shard_map` where there are several, and any columns of it: see width chunks.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import pvary_like
from raggedmoe.kernels.ragged_gather.api import ragged_gather
from raggedmoe.kernels.ragged_gather_reduce.api import ragged_gather_reduce
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.moe.records import RouteMetadata
from raggedmoe.sharding.stage import StageAxes


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """What a strategy is given beside the arrays."""

    name: str
    num_experts: int
    capacity: int | None  # slots of each expert in each sequence, for "capacity"; None: others, or expert choice
    num_sequences: int  # on each device, for "capacity"
    weigh_input: bool  # the weights multiply the rows on the way in, not on the way out
    kernels: KernelChoice
    hardware: Hardware | str | None
    axes: StageAxes  # the mesh axes to send over
    num_ranks: int  # along the axes that experts are split over
    buffer_factor: float | None  # rows of the receive buffer, as a multiple of a balanced share; None: the worst case
    ragged: bool  # the platform has a ragged all-to-all

    @property
    def may_drop(self) -> bool:
        """Whether a slot may be dropped; otherwise nobody has to ask the other ranks."""
        return self.name == "capacity" or self.buffer_factor is not None

    def most_rows(self, num_tokens: int, per_token: int) -> int:
        """Rows that one rank can have for another: every token chooses as many experts there as it can."""
        return num_tokens * min(per_token, num_held(self))

    def buffer_rows(self, num_tokens: int, per_token: int) -> int:
        """Rows of the receive buffer, for so many tokens on each rank."""
        return buffer_rows(num_tokens, per_token, num_held(self), self.num_ranks, self.buffer_factor)


def buffer_rows(num_tokens: int, per_token: int, held: int, num_ranks: int, factor: float | None) -> int:
    """Rows that a rank with so many experts has room for: in the worst case each token chooses as many of them as it
    can; with a factor, that multiple of a balanced share, rounded down.
    """
    worst = num_ranks * num_tokens * min(per_token, held)
    return worst if factor is None else min(max(int(num_tokens * per_token * factor), 1), worst)


def num_held(settings: StrategySettings) -> int:
    """Experts on each rank, G."""
    if settings.num_experts % settings.num_ranks:
        fitting = [n for n in range(1, settings.num_experts + 1) if settings.num_experts % n == 0]
        padded = math.ceil(settings.num_experts / settings.num_ranks) * settings.num_ranks
        raise ValueError(
            f"num_experts={settings.num_experts} is not divisible by expert_parallelism={settings.num_ranks}; "
            f"use one of {fitting}, or pad with num_experts={padded}"
        )
    return settings.num_experts // settings.num_ranks


def gather_rows(x: Float[Array, "T D"], metadata: RouteMetadata, settings: StrategySettings) -> Float[Array, "R D"]:
    """The token of every row, times its weight if weights are for the input."""
    weights = None
    if settings.weigh_input:
        weights = pvary_like(metadata.weights, x).reshape(-1)  # backward, summed for T·K slots, not for R rows
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
