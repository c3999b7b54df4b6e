"""How rows reach their experts: one small file a strategy, chosen from a table, and the three stages that call it."""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import varying_over
from raggedmoe.mesh import EXPERT
from raggedmoe.moe.balance import total
from raggedmoe.moe.config import ACROSS_RANKS, TAKES_RANKS, MoEConfig, chosen_by_experts
from raggedmoe.moe.dispatch import all_to_all, capacity, dense, local, ring
from raggedmoe.moe.dispatch.strategy import StrategySettings
from raggedmoe.moe.records import RouteMetadata, RouteOutput
from raggedmoe.sharding.stage import ACTIVATIONS, PER_DEVICE, REPLICATED, OnMesh, stage

STRATEGIES = {"local": local, "capacity": capacity, "dense": dense, "ring": ring, "all_to_all": all_to_all}


@stage(routing=RouteOutput.PLACEMENT, first_expert=REPLICATED, result=(RouteMetadata.PLACEMENT, REPLICATED))
def prepare(
    routing: RouteOutput,
    first_expert: Int[Array, ""] | None,
    *,
    strategy: StrategySettings,
    tokens: slice,
    num_stacked: int,
) -> tuple[RouteMetadata, Int[Array, ""]]:
    """The metadata of some of each device's tokens, and how many slots all devices drop."""
    metadata = STRATEGIES[strategy.name].prepare(routing.slice_tokens(tokens), strategy)
    dropped = total(metadata.dropped, strategy.token_axes) if strategy.may_drop else jnp.zeros((), jnp.int32)
    return offset_into_stacked_experts(metadata, first_expert, num_stacked), dropped


@stage(x=ACTIVATIONS, routing=RouteOutput.PLACEMENT, metadata=RouteMetadata.PLACEMENT, result=PER_DEVICE)
def dispatch(
    x: Float[Array, "T D"],
    routing: RouteOutput,
    metadata: RouteMetadata,
    *,
    strategy: StrategySettings,
    tokens: slice,
    columns: slice,
) -> Float[Array, "R columns"]:
    """Some columns of the rows, with their experts."""
    x = x[tokens, columns]
    if strategy.tensor_axis is not None:
        # Each tensor rank's own from here on: backward their gradients are summed for T tokens, not for R rows.
        x = varying_over(x, (strategy.tensor_axis,))
    return STRATEGIES[strategy.name].dispatch(x, routing.slice_tokens(tokens), metadata, strategy)


@stage(rows=PER_DEVICE, routing=RouteOutput.PLACEMENT, metadata=RouteMetadata.PLACEMENT, result=ACTIVATIONS)
def unpermute(
    rows: Float[Array, "R columns"],
    routing: RouteOutput,
    metadata: RouteMetadata,
    *,
    strategy: StrategySettings,
    tokens: slice,
) -> Float[Array, "T columns"]:
    """The weighted sums, with their tokens."""
    out = STRATEGIES[strategy.name].unpermute(rows, routing.slice_tokens(tokens), metadata, strategy)
    # Summed for T tokens, not for R rows: the combine is linear.
    return out if strategy.adds_over is None else lax.psum(out, strategy.adds_over)


def offset_into_stacked_experts(
    metadata: RouteMetadata, first_expert: Int[Array, ""] | None, num_stacked: int
) -> RouteMetadata:
    """The rows' groups among the experts of all layers: those of the other layers have no rows, and cost nothing."""
    if first_expert is None:
        return metadata
    if metadata.group_sizes is None:
        raise ValueError(
            "expected a strategy with ragged groups for weights of several layers, got one with equal ones"
        )
    sizes = lax.dynamic_update_slice(jnp.zeros(num_stacked, jnp.int32), metadata.group_sizes, (first_expert,))
    return replace(metadata, group_sizes=sizes)


def strategy_settings(config: MoEConfig, num_tokens: int, run: OnMesh, num_sequences: int = 1) -> StrategySettings:
    """The configuration's strategy for so many tokens, of so many sequences, on each device of a mesh."""
    name, num_ranks = config.strategy_name, run.size(EXPERT)
    if run.mesh is None and name in ACROSS_RANKS:
        raise ValueError(
            f"strategy={name!r} needs the mesh that experts are split over, got None; pass mesh=..., or use "
            "strategy='local'"
        )
    if num_ranks > 1 and name not in TAKES_RANKS:
        raise ValueError(
            f"strategy={name!r} needs all experts on every device, got a mesh with expert_parallelism={num_ranks}; "
            f"use {' or '.join(map(repr, ACROSS_RANKS))}"
        )
    counts_slots = name == "capacity" and not chosen_by_experts(config)
    return StrategySettings(
        name=name,
        num_experts=config.num_experts,
        capacity=config.sequence_capacity(num_tokens // num_sequences) if counts_slots else None,
        num_sequences=num_sequences,
        weigh_input=config.router.weigh == "input",
        kernels=config.kernel_choice,
        hardware=config.hardware,
        axis=EXPERT,
        num_ranks=num_ranks,
        token_axes=run.token_axes,
        tensor_axis=run.tensor_axis,
        adds_over=run.adds_over,
        buffer_factor=config.ragged_buffer_factor,
        ragged=run.hardware(config.hardware).platform != "cpu",  # XLA's CPU backend has no ragged all-to-all
    )
