"""The MoE layer as a function: route → dispatch → gmm_up → gmm_down → unpermute."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, Integer

from raggedmoe.kernels.eager import compiled_once
from raggedmoe.mesh import TENSOR
from raggedmoe.moe.balance import Axis
from raggedmoe.moe.config import MoEConfig, chosen_by_experts
from raggedmoe.moe.dispatch import dispatch, prepare, strategy_settings, unpermute
from raggedmoe.moe.dispatch.strategy import StrategySettings
from raggedmoe.moe.experts import (
    ExpertExecution,
    activate,
    expert_ffn,
    gmm_down,
    gmm_up,
    shared_experts,
    tp_reduce,
)
from raggedmoe.moe.gathering import gather_experts, gather_router
from raggedmoe.moe.records import MoEOutput, MoEParams, RouteOutput, RouterParams
from raggedmoe.moe.router import checked_replay
from raggedmoe.moe.router import route as choose
from raggedmoe.sharding.stage import ACTIVATIONS, PER_SHARD, REPLICATED, TOKENS, OnMesh, stage


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
    run = OnMesh(mesh=mesh, tensor_split=config.tensor_split)
    num_tokens = tokens_of_device(x.shape[0], run)
    sequences = sequences_of_device(num_sequences, config, run)
    strategy = strategy_settings(config, num_tokens, run, sequences)
    if mask is not None:
        # What a masked token holds, NaN too, reaches nothing: neither the router's gradient nor a sum.
        x = jnp.where(mask[:, None], x, 0)
    router = gather_router(params.router, config, run)
    capacity = config.expert_choice_capacity(num_tokens) if chosen_by_experts(config) else None
    routing = run(
        route,
        *(x, router, mask, key, token_ids, replay),
        config=config,
        num_sequences=sequences,
        capacity=capacity,
        axis=run.token_axes,
    )
    with jax.named_scope("experts"):
        output, dropped = routed_experts(x, params, routing, first_expert, strategy=strategy, config=config, run=run)
        output = run.constrain(output, TOKENS)
    if params.shared is not None:
        with jax.named_scope("shared_experts"):
            # In no stage: without a word about its layout, XLA exchanges two devices' gradients of x (docs/log.md).
            shared = shared_experts(run.constrain(x, TOKENS), params.shared, config.experts.activation)
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


def routed_experts(
    x: Float[Array, "T D"],
    params: MoEParams,
    routing: RouteOutput,
    first_expert: Int[Array, ""] | None,
    *,
    strategy: StrategySettings,
    config: MoEConfig,
    run: OnMesh,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """The routed experts' weighted sum of every token, and how many slots were dropped.

    The tokens, or the model width, come in chunks that do not depend on each other, so that the compiler may move one
    while it computes another, forward and backward. One chunk is the ordinary case.
    """
    weights, up_biases = gather_experts(params, config, run, x.dtype)
    execution = expert_execution(config, run)
    num_columns = x.shape[1] // (run.size(TENSOR) if config.tensor_split == "model_dim" else 1)
    outputs, dropped = [], jnp.zeros((), jnp.int32)
    for tokens in even_parts(x.shape[0] // run.num_token_shards, config.token_chunks):
        these: dict[str, Any] = {"strategy": strategy, "tokens": tokens}
        metadata, more = run(prepare, routing, first_expert, **these, num_stacked=params.wi_0.shape[0])
        dropped = dropped + more
        if config.backend.fused:
            rows = run(dispatch, x, routing, metadata, **these, columns=slice(0, num_columns))
            rows = run(expert_ffn, rows, weights, up_biases, metadata, execution=execution)
            outputs.append(run(unpermute, rows, routing, metadata, **these))
            continue
        sums, columns_out = None, []
        for columns in even_parts(num_columns, config.width_chunks):
            rows = run(dispatch, x, routing, metadata, **these, columns=columns)
            more = run(gmm_up, rows, weights, metadata, columns=columns, execution=execution)
            sums = more if sums is None else jax.tree.map(jnp.add, sums, more)
        sums = _named(maybe_tp_reduce(sums, config, run), "moe_up")
        hidden = run(activate, sums, up_biases, metadata, dtype=x.dtype, execution=execution)
        for columns in even_parts(num_columns, config.width_chunks):
            rows = run(gmm_down, hidden, weights, metadata, columns=columns, execution=execution)
            columns_out.append(run(unpermute, _named(rows, "moe_down"), routing, metadata, **these))
        outputs.append(concatenate(run, columns_out, dim=1))
    return concatenate(run, outputs, dim=0), dropped


def expert_execution(config: MoEConfig, run: OnMesh) -> ExpertExecution:
    """How the experts of a layer are computed."""
    return ExpertExecution(
        activation=config.experts.activation,
        kernels=config.kernel_choice,
        hardware=config.hardware,
        tensor_axis=run.tensor_axis,
        adds_over=run.adds_over,
    )


def maybe_tp_reduce(sums: Any, config: MoEConfig, run: OnMesh) -> Any:
    """The sums over the whole width, where each tensor rank has those over its own part."""
    return run(tp_reduce, sums) if run.mesh is not None and config.tensor_split == "model_dim" else sums


def _named(arrays: Any, name: str) -> Any:
    """The arrays under a name by which remat can keep them."""
    return jax.tree.map(lambda array: checkpoint_name(array, name), arrays)


def concatenate(run: OnMesh, parts: list[Float[Array, "_ _"]], dim: int) -> Float[Array, "_ _"]:
    """Chunks of the tokens (dim 0) or of their columns (1), after each other on every device."""
    if len(parts) == 1:
        return parts[0]
    places = (ACTIVATIONS,) * len(parts)
    return run.run(lambda *parts: jnp.concatenate(parts, axis=dim), *parts, arguments=places, result=ACTIVATIONS)


def even_parts(size: int, num_parts: int) -> list[slice]:
    """So many parts, whose sizes differ by one at most, or fewer where some would be empty."""
    bounds = sorted({size * i // num_parts for i in range(num_parts + 1)})
    return [slice(start, end) for start, end in itertools.pairwise(bounds)] or [slice(0, 0)]


_route_and_compute = compiled_once(_layer, static=("config", "mesh", "num_sequences"))


@stage(
    x=TOKENS,
    router=PER_SHARD,
    mask=TOKENS,
    key=REPLICATED,
    token_ids=TOKENS,
    replay=TOKENS,
    result=RouteOutput.PLACEMENT,
)
def route(
    x: Float[Array, "T D"],
    router: RouterParams,
    mask: Bool[Array, " T"] | None,
    key: jax.Array | None,
    token_ids: Integer[Array, " T"] | None,
    replay: Integer[Array, "T K"] | None,
    *,
    config: MoEConfig,
    num_sequences: int,
    capacity: int | None,
    axis: Axis,
) -> RouteOutput:
    """What the router decides for a device's tokens, and what all devices agree on."""
    return choose(
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
    )


def tokens_of_device(num_tokens: int, run: OnMesh) -> int:
    """How many of the tokens are on each device."""
    shards = run.num_token_shards
    if num_tokens % shards:
        raise ValueError(
            f"expected tokens that can be split over data × fsdp × expert = {shards} devices, got {num_tokens}; "
            f"use a multiple of {shards}"
        )
    return num_tokens // shards


def sequences_of_device(num_sequences: int, config: MoEConfig, run: OnMesh) -> int:
    """How many whole sequences are on each device, where the balance loss or the capacity is of each sequence."""
    shards, router = run.num_token_shards, config.router
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
