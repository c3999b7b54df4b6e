"""The MoE layer as a function: route → dispatch → gmm_up → gmm_down → unpermute."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from raggedmoe.moe.balance import Axis, total
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.dispatch import Strategy, make_strategy
from raggedmoe.moe.experts import fused_experts, shared_experts
from raggedmoe.moe.overlap import experts_by_width
from raggedmoe.moe.records import MoEOutput, MoEParams, RouteMetadata, RouteOutput
from raggedmoe.moe.router import route


def moe_route_and_compute(
    x: Float[Array, "T D"],
    params: MoEParams,
    config: MoEConfig,
    strategy: Strategy | None = None,
    *,
    mask: Bool[Array, " T"] | None = None,
    key: jax.Array | None = None,
    token_ids: Int[Array, " T"] | None = None,
    replay: Int[Array, "T K"] | None = None,
    num_sequences: int = 1,
    axis: Axis = None,
    first_expert: Int[Array, ""] | None = None,
) -> MoEOutput:
    """The layer on a batch of tokens. `raggedmoe.moe.router.route` describes the optional arguments.

    Inside `shard_map`, ``axis`` is the mesh axis over which tokens (and, for "ring", experts) are split.
    ``first_expert``: where this layer's experts begin in weights that hold several layers', one after the other.
    """
    strategy = strategy or make_strategy(config, x.shape[0], axis if isinstance(axis, str) else None)
    axis = strategy.axis if axis is None else axis
    if mask is not None:
        # What a masked token holds, NaN too, reaches nothing: neither the router's gradient nor a sum.
        x = jnp.where(mask[:, None], x, 0)
    with jax.named_scope("route"):
        routing = route(
            x,
            params.router,
            config.router,
            config.experts_per_token,
            mask=mask,
            key=key,
            token_ids=token_ids,
            replay=replay,
            num_sequences=num_sequences,
            capacity=config.capacity(x.shape[0]) if config.strategy_name == "capacity" else None,
            axis=axis,
        )
        metadata = strategy.prepare(routing)
        if first_expert is not None:
            metadata = among_all_layers(metadata, first_expert, params.wi_0.shape[0])
    with jax.named_scope("experts"):
        output = compute_experts(x, params, routing, metadata, strategy, config)
    if params.shared is not None:
        with jax.named_scope("shared_experts"):
            shared = shared_experts(x, params.shared, config.experts.activation)
            output = output + (shared if mask is None else jnp.where(mask[:, None], shared, 0))
    return MoEOutput(
        output=output,
        aux_loss=routing.aux_loss,
        z_loss=routing.z_loss,
        load=routing.load,
        entropy=routing.entropy,
        max_violation=routing.max_violation,
        dropped=total(metadata.dropped, axis),
        experts=routing.experts,
    )


def among_all_layers(metadata: RouteMetadata, first_expert: Int[Array, ""], num_experts: int) -> RouteMetadata:
    """The rows' groups among the experts of all layers: those of the other layers have no rows, and cost nothing."""
    if metadata.group_sizes is None:
        raise ValueError(
            "expected a strategy with ragged groups for weights of several layers, got one with equal ones"
        )
    sizes = lax.dynamic_update_slice(jnp.zeros(num_experts, jnp.int32), metadata.group_sizes, (first_expert,))
    return replace(metadata, group_sizes=sizes)


def compute_experts(
    x: Float[Array, "T D"],
    params: MoEParams,
    routing: RouteOutput,
    metadata: RouteMetadata,
    strategy: Strategy,
    config: MoEConfig,
) -> Float[Array, "T D"]:
    """The routed experts' weighted sum: split into grouped matmuls, or fused where the backend says so."""
    if not config.backend.fused:
        return experts_by_width(x, params, routing, metadata, strategy, config)
    weights = (params.wi_0, params.wi_1, params.wo, params.biases)
    wi_0, wi_1, wo, biases = jax.tree.map(lambda weight: weight.astype(x.dtype), weights)
    with jax.named_scope("dispatch"):
        rows = strategy.dispatch(x, routing, metadata)
    activation, kernels = config.experts.activation, config.kernel_choice
    with jax.named_scope("expert_ffn"):
        out = fused_experts(rows, wi_0, wi_1, wo, biases, metadata.group_sizes, activation, kernels, config.hardware)
    with jax.named_scope("unpermute"):
        return strategy.unpermute(out, routing, metadata)
