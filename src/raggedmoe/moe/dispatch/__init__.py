"""How rows reach their experts: one small file a strategy, chosen from a table, and the three stages that call it."""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import pvary_over
from raggedmoe.moe.config import MoEConfig, is_expert_choice, strategy_name
from raggedmoe.moe.dispatch import all_to_all, capacity, dense, local, ring
from raggedmoe.moe.dispatch.strategy import StrategySettings
from raggedmoe.moe.execution import ACROSS_RANKS, TAKES_RANKS, MoEExecution
from raggedmoe.moe.records import RouteMetadata, RouteOutput
from raggedmoe.sharding.axes import EXPERT
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
    dropped = lax.psum(metadata.dropped, strategy.axes.tokens) if strategy.may_drop else jnp.zeros((), jnp.int32)
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
    # Each tensor rank's own from here on: backward their gradients are summed for T tokens, not for R rows.
    x = pvary_over(x[tokens, columns], strategy.axes.tensor)
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
    return lax.psum(out, strategy.axes.partial_sums)


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


def strategy_settings(
    config: MoEConfig, execution: MoEExecution, num_tokens: int, run: OnMesh, num_sequences: int = 1
) -> StrategySettings:
    """The settings of a layer's strategy for so many tokens, of so many sequences, on each device of a mesh."""
    name, num_ranks = strategy_name(config, execution), run.size(EXPERT)
    check_has_mesh(name, run.mesh)
    if num_ranks > 1 and name not in TAKES_RANKS:
        raise ValueError(
            f"strategy={name!r} needs all experts on every device, got a mesh with expert_parallelism={num_ranks}; "
            f"use {' or '.join(map(repr, ACROSS_RANKS))}"
        )
    counts_slots = name == "capacity" and not is_expert_choice(config)
    return StrategySettings(
        name=name,
        num_experts=config.num_experts,
        capacity=config.sequence_capacity(num_tokens // num_sequences) if counts_slots else None,
        num_sequences=num_sequences,
        weigh_input=config.router.weigh == "input",
        kernels=execution.kernel_choice,
        hardware=execution.hardware,
        axes=run.axes,
        num_ranks=num_ranks,
        buffer_factor=execution.ragged_buffer_factor,
        ragged=run.hardware(execution.hardware).platform != "cpu",  # XLA's CPU backend has no ragged all-to-all
    )


def check_has_mesh(strategy: str, mesh: object) -> None:
    """Require a mesh for the strategies whose experts are on several devices."""
    if mesh is None and strategy in ACROSS_RANKS:
        raise ValueError(
            f"strategy={strategy!r} needs the mesh that experts are split over, got None; pass mesh=..., or use "
            "strategy='local'"
        )
