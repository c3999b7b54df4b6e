"""What the stages hand to each other: named, frozen, and pytrees."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.sharding.axes import LogicalMesh


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What the stages of a layer are given beside arrays. It is the same on all devices."""

    config: MoEConfig
    execution: MoEExecution
    on_mesh: LogicalMesh  # whose axes the collectives go over; on one device, it has none
    num_sequences: int  # on each device, if something is counted in each sequence


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RouteOutput:
    """What the router decided for each token. Knows no strategy and no model width.

    Token choice fills ``experts`` and ``weights [T K]``; expert choice fills ``tokens`` and ``weights [E C]``.
    """

    experts: Int[Array, "T K"] | None  # E: nowhere (a masked token)
    tokens: Int[Array, "_ C"] | None  # of each expert, on a mesh on each device; T: none (an empty slot)
    mask: Bool[Array, " T"]  # the tokens that count
    weights: Float[Array, "T K"] | Float[Array, "_ C"]  # zero where there is no expert or no token

    def slice_tokens(self, tokens: slice) -> "RouteOutput":
        """Return what was decided for some of the tokens."""
        if self.experts is None:
            assert tokens == slice(0, self.mask.shape[0]), "expert choice decides for all tokens at once"
            return self
        return replace(self, experts=self.experts[tokens], weights=self.weights[tokens], mask=self.mask[tokens])


class Moves(NamedTuple):
    """A record of which rows go to which rank, and where they lie on both sides. P: ranks."""

    sent: Int[Array, " P"]  # rows for each rank, of those that have room there
    sent_from: Int[Array, " P"]  # where they begin in this rank's rows
    sent_to: Int[Array, " P"]  # and in the receiver's buffer
    received: Int[Array, " P"]  # rows from each rank
    received_from: Int[Array, " P"]  # where they began there
    received_at: Int[Array, " P"]  # and where they begin in this rank's buffer
    grouped: Int[Array, " R"]  # the received row of each row in the order of the experts; out of range: none
    ungrouped: Int[Array, " R"]  # its inverse


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RouteMetadata:
    """What a strategy needs to move the rows to their experts, and back."""

    token_of_row: Int[Array, " R"]  # the token that each row copies; out of range: none
    slot_of_row: Int[Array, " R"] | None  # the slot t·K + k that each row serves; out of range: none
    row_of_slot: Int[Array, "T K"] | None  # the row of each slot; out of range: none here
    weights: Float[Array, "T K"] | Float[Array, " R"]  # of the slots, or of the rows where there are no slots
    group_sizes: Int[Array, " G"]  # rows of each expert held here, in order; R/G each if `used` says which count
    num_rows: Int[Array, " _"]  # valid rows, at the front of the buffer: one number for each device
    used: Bool[Array, " R"] | None  # the rows that stand for a token's choice; None: all valid ones do
    dropped: Int[Array, " _"]  # routed slots (expert choice: tokens that count) without a row, for each device
    moves: Moves | None = None  # the rows above are sent to other ranks, whose groups they are in


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MoEOutput:
    """What a layer returns, whatever its configuration."""

    output: Float[Array, "... D"]
    aux_loss: Float[Array, ""]  # add to the loss as it is: its weight is in it
    z_loss: Float[Array, ""]  # add to the loss as it is: its weight is in it
    load: Int[Array, " E"]  # routed slots of each expert
    entropy: Float[Array, ""]  # of the load, in nats
    max_violation: Float[Array, ""]  # busiest expert's load over the mean, minus 1
    dropped: Int[Array, ""]  # slots (expert choice: tokens) that were routed or present, and computed by no expert
    experts: Int[Array, "... K"] | None  # the routing, to record and to give again as `replay`; None: expert choice
