"""How rows reach their experts: one small file a strategy, chosen from a table, and the three stages that call it."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import pvary_over
from raggedmoe.moe.config import strategy_name
from raggedmoe.moe.dispatch import all_to_all, capacity, dense, local, ring
from raggedmoe.moe.dispatch.strategy import may_drop
from raggedmoe.moe.execution import ACROSS_RANKS
from raggedmoe.moe.records import RouteMetadata, RouteOutput, StageSettings
from raggedmoe.sharding.axes import EXPERT, HIDDEN_TENSOR, TENSOR, TOKEN_AXES, WIDTH_TENSOR
from raggedmoe.sharding.stage import PER_DEVICE, REPLICATED, TOKENS, TOKENS_AND_WIDTH, stage

STRATEGY_FILES = {"local": local, "capacity": capacity, "dense": dense, "ring": ring, "all_to_all": all_to_all}


@stage(routing=TOKENS, first_expert=REPLICATED, result=(TOKENS, REPLICATED))
def prepare(
    routing: RouteOutput,
    first_expert: Int[Array, ""] | None,
    *,
    settings: StageSettings,
    tokens: slice,
    num_stacked: int,
) -> tuple[RouteMetadata, Int[Array, ""]]:
    """Find out how some of each device's tokens reach their experts, and how many slots all devices drop."""
    metadata = _strategy(settings).prepare(routing.slice_tokens(tokens), settings)
    axes = settings.on_mesh.axes(*TOKEN_AXES)
    dropped = lax.psum(metadata.dropped.squeeze(), axes) if may_drop(settings) else jnp.zeros((), jnp.int32)
    return offset_into_stacked_experts(metadata, first_expert, num_stacked), dropped


@stage(x=TOKENS_AND_WIDTH, routing=TOKENS, metadata=TOKENS, result=PER_DEVICE)
def dispatch(
    x: Float[Array, "T D"],
    routing: RouteOutput,
    metadata: RouteMetadata,
    *,
    settings: StageSettings,
    tokens: slice,
    columns: slice,
) -> Float[Array, "R columns"]:
    """Bring some columns of the tokens to their experts, as rows in the order of the experts."""
    # Each tensor rank's own from here on: backward their gradients are summed for T tokens, not for R rows.
    x = pvary_over(x[tokens, columns], settings.on_mesh.axes(TENSOR))
    return _strategy(settings).dispatch(x, routing.slice_tokens(tokens), metadata, settings)


@stage(rows=PER_DEVICE, routing=TOKENS, metadata=TOKENS, result=TOKENS_AND_WIDTH)
def unpermute(
    rows: Float[Array, "R columns"],
    routing: RouteOutput,
    metadata: RouteMetadata,
    *,
    settings: StageSettings,
    tokens: slice,
) -> Float[Array, "T columns"]:
    """Bring the rows back to their tokens, and add up each token's, weighted."""
    out = _strategy(settings).unpermute(rows, routing.slice_tokens(tokens), metadata, settings)
    # Where F is split: summed for T tokens, not for R rows, as the combine is linear.
    return lax.psum(out, settings.on_mesh.axes(HIDDEN_TENSOR))


def _strategy(settings: StageSettings) -> Any:
    return STRATEGY_FILES[strategy_name(settings.config, settings.execution)]


def offset_into_stacked_experts(
    metadata: RouteMetadata, first_expert: Int[Array, ""] | None, num_stacked: int
) -> RouteMetadata:
    """Place the rows' groups among the experts of all layers; those of other layers have no rows, and cost nothing."""
    if first_expert is None:
        return metadata
    if metadata.used is not None:
        raise ValueError(
            "expected a strategy with ragged groups for weights of several layers, got one with equal ones"
        )
    sizes = lax.dynamic_update_slice(jnp.zeros(num_stacked, jnp.int32), metadata.group_sizes, (first_expert,))
    return replace(metadata, group_sizes=sizes)


def check_ranks(settings: StageSettings) -> None:
    """Require a strategy that can run on the mesh's number of expert ranks."""
    name, num_ranks = strategy_name(settings.config, settings.execution), settings.on_mesh.size(EXPERT)
    check_has_mesh(name, settings.on_mesh.mesh)
    tensor_ranks = settings.on_mesh.size(TENSOR)
    if settings.execution.quantization is not None and tensor_ranks > 1:
        raise ValueError(
            f"quantization cannot be used with a mesh of tensor_parallelism={tensor_ranks}: what shares a scale would "
            "be cut, and results depend on the mesh; use fsdp or expert parallelism"
        )
    if settings.execution.dispatch_dtype is not None and settings.on_mesh.size(WIDTH_TENSOR) > 1:
        raise ValueError(
            f"dispatch_dtype cannot be used with tensor_split='model_dim' and tensor_parallelism={tensor_ranks}: each "
            "rank's part of a row would have a scale of its own, and results depend on the mesh; use "
            "tensor_split='expert_dim'"
        )
    if num_ranks > 1 and name == "local":
        raise ValueError(
            f"strategy={name!r} needs all experts on every device, got a mesh with expert_parallelism={num_ranks}; "
            f"use {' or '.join(map(repr, ACROSS_RANKS))}"
        )


def check_has_mesh(strategy: str, mesh: object) -> None:
    """Require a mesh for the strategies whose experts are on several devices."""
    if mesh is None and strategy in ACROSS_RANKS:
        raise ValueError(
            f"strategy={strategy!r} needs the mesh that experts are split over, got None; pass mesh=..., or use "
            "strategy='local'"
        )
