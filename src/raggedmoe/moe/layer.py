"""The MoE layer as a function: route → dispatch → gmm_up → gmm_down → unpermute."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, Integer

from raggedmoe.kernels.eager import compiled_once
from raggedmoe.moe.balance import Axis
from raggedmoe.moe.config import MoEConfig, chosen_by_experts
from raggedmoe.moe.dispatch import make_strategy
from raggedmoe.moe.experts import shared_experts
from raggedmoe.moe.gathering import gathered_experts, gathered_router
from raggedmoe.moe.grid import EACH, TOKENS, WHOLE, Grid
from raggedmoe.moe.overlap import experts_in_parts
from raggedmoe.moe.records import MoEOutput, MoEParams, RouteMetadata, RouteOutput, RouterParams
from raggedmoe.moe.router import checked_replay, route


def moe_route_and_compute(
    x: Float[Array, "T D"],
    params: MoEParams,
    config: MoEConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    mask: Bool[Array, " T"] | None = None,
    key: jax.Array | None = None,
    token_ids: Integer[Array, " T"] | None = None,
    replay: Integer[Array, "T K"] | None = None,
    num_sequences: int = 1,
    first_expert: Int[Array, ""] | None = None,
) -> MoEOutput:
    """The layer on a batch of tokens. `raggedmoe.moe.router.route` describes the optional arguments.

    ``mesh``: devices to compute it on, with the axes of `raggedmoe.mesh`; arrays are global, and the result does not
    depend on the mesh. Tokens are split over all axes but "tensor", parameters as `raggedmoe.partition` says.
    ``first_expert``: where this layer's experts begin in weights that hold several layers', one after the other.
    """
    if replay is not None and config.router.selection != "expert_choice":  # while its values can be looked at
        checked_replay(replay, x.shape[0], config.experts_per_token, config.num_experts)
    arrays = (x, params, mask, key, token_ids, replay, first_expert)
    return _route_and_compute(*arrays, config=config, mesh=mesh, num_sequences=num_sequences)


def _layer(
    x: Float[Array, "T D"],
    params: MoEParams,
    mask: Bool[Array, " T"] | None,
    key: jax.Array | None,
    token_ids: Integer[Array, " T"] | None,
    replay: Integer[Array, "T K"] | None,
    first_expert: Int[Array, ""] | None,
    *,
    config: MoEConfig,
    mesh: Mesh | AbstractMesh | None,
    num_sequences: int,
) -> MoEOutput:
    grid = Grid(mesh=mesh)
    num_tokens = tokens_of_device(x.shape[0], grid)
    sequences = sequences_of_device(num_sequences, config, grid)
    strategy = make_strategy(config, num_tokens, grid, sequences)
    if mask is not None:
        # What a masked token holds, NaN too, reaches nothing: neither the router's gradient nor a sum.
        x = jnp.where(mask[:, None], x, 0)
    with jax.named_scope("route"):
        stage = functools.partial(
            route_part,
            config=config,
            num_sequences=sequences,
            capacity=config.expert_choice_capacity(num_tokens) if chosen_by_experts(config) else None,
            axis=grid.token_axes,
        )
        router = gathered_router(params.router, config, grid)
        places = (TOKENS, EACH, TOKENS, WHOLE, TOKENS, TOKENS)
        found = grid.run(stage, x, router, mask, key, token_ids, replay, places=places, result=(TOKENS, WHOLE))
        routing = RouteOutput(**found[0], **found[1])
    with jax.named_scope("experts"):
        held = gathered_experts(params, config, grid, x.dtype)
        adjust = functools.partial(among_all_layers, first_expert=first_expert, num_experts=params.wi_0.shape[0])
        output, dropped = experts_in_parts(x, held, routing, strategy, config, grid, adjust=adjust)
        output = grid.constrained(output, TOKENS)
    if params.shared is not None:
        with jax.named_scope("shared_experts"):
            # In no stage: without a word about its layout, XLA exchanges two devices' gradients of x (docs/log.md).
            shared = shared_experts(grid.constrained(x, TOKENS), params.shared, config.experts.activation)
            output = output + (shared if mask is None else jnp.where(mask[:, None], shared, 0))
    return MoEOutput(
        output=output,
        aux_loss=routing.aux_loss,
        z_loss=routing.z_loss,
        load=routing.load,
        entropy=routing.entropy,
        max_violation=routing.max_violation,
        dropped=dropped,
        experts=routing.experts,
    )


_route_and_compute = compiled_once(_layer, static=("config", "mesh", "num_sequences"))


def route_part(
    x: Float[Array, "T D"],
    router: RouterParams | dict[str, Any],
    mask: Bool[Array, " T"] | None,
    key: jax.Array | None,
    token_ids: Integer[Array, " T"] | None,
    replay: Integer[Array, "T K"] | None,
    *,
    config: MoEConfig,
    num_sequences: int,
    capacity: int | None,
    axis: Axis,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`route` as a device sees it: what it decides for its tokens, and what all devices agree on."""
    if not isinstance(router, RouterParams):
        router = RouterParams(**{name.removeprefix("router_"): value for name, value in router.items()})
    return route(
        x,
        router,
        config.router,
        config.experts_per_token,
        mask=mask,
        key=key,
        token_ids=token_ids,
        replay=replay,
        num_sequences=num_sequences,
        capacity=capacity,
        axis=axis,
    ).parts()


def tokens_of_device(num_tokens: int, grid: Grid) -> int:
    """How many of the tokens are on each device."""
    shards = grid.num_token_shards
    if num_tokens % shards:
        raise ValueError(
            f"expected tokens that can be split over data × fsdp × expert = {shards} devices, got {num_tokens}; "
            f"use a multiple of {shards}"
        )
    return num_tokens // shards


def sequences_of_device(num_sequences: int, config: MoEConfig, grid: Grid) -> int:
    """How many whole sequences are on each device, where the balance loss or the capacity is of each sequence."""
    shards, router = grid.num_token_shards, config.router
    if config.strategy_name == "capacity" and not chosen_by_experts(config):
        what, instead = "a capacity_factor counts slots in whole sequences", "another strategy"
    elif router.aux_loss == "sequence" and router.aux_loss_weight:
        what, instead = "aux_loss='sequence' is taken of whole sequences", "aux_loss='batch'"
    else:
        return 1
    if num_sequences % shards:
        raise ValueError(
            f"{what}, got {num_sequences} for {shards} devices; use a multiple of {shards} sequences, fewer devices, "
            f"or {instead}"
        )
    return num_sequences // shards


def among_all_layers(metadata: RouteMetadata, first_expert: Int[Array, ""] | None, num_experts: int) -> RouteMetadata:
    """The rows' groups among the experts of all layers: those of the other layers have no rows, and cost nothing."""
    if first_expert is None:
        return metadata
    if metadata.group_sizes is None:
        raise ValueError(
            "expected a strategy with ragged groups for weights of several layers, got one with equal ones"
        )
    sizes = lax.dynamic_update_slice(jnp.zeros(num_experts, jnp.int32), metadata.group_sizes, (first_expert,))
    return replace(metadata, group_sizes=sizes)
