"""The MoE layer as a function: route → dispatch → gmm_up → gmm_down → unpermute."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Integer

from raggedmoe.kernels.dense_matmul import dense_matmuls_for
from raggedmoe.kernels.eager import compile_once
from raggedmoe.kernels.qarray import Quantized, check_operand
from raggedmoe.kernels.quant_config import rounding_key
from raggedmoe.lora import scale_adapters
from raggedmoe.moe.amax_history import largest_before
from raggedmoe.moe.config import MoEConfig, check_execution
from raggedmoe.moe.dispatch import check_ranks, dispatch, prepare, unpermute
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.moe.experts import activate, expert_ffn, fuses_experts, gmm_down, gmm_up, shared_experts, tp_reduce
from raggedmoe.moe.records import MoEOutput, RouteMetadata, RouteOutput, StageSettings
from raggedmoe.moe.router import check_replay, route
from raggedmoe.params import Params
from raggedmoe.sharding.axes import TOKEN_AXES, WIDTH_TENSOR, AnyMesh, even_parts, logical_mesh, split_over
from raggedmoe.sharding.rules import all_gather_params, is_routed
from raggedmoe.sharding.stage import BETWEEN_PROJECTIONS, PER_DEVICE, TOKENS, TOKENS_AND_WIDTH, stage

DEFAULT_EXECUTION = MoEExecution()
KEEP_MATMULS = jax.checkpoint_policies.save_only_these_names("moe_up", "moe_down")


def _check_call(x: Any, params: Params, config: MoEConfig, execution: Any = DEFAULT_EXECUTION, **options: Any) -> None:
    """Refuse what cannot run; the values of a recorded routing can be looked at here, outside of jit, alone."""
    quantized = [name for name, array in params.items() if isinstance(array, Quantized)]
    check_execution(config, execution, quantized)
    replay = options.get("replay")
    if replay is not None and config.router.selection != "expert_choice":
        check_replay(replay, x.shape[0], config.experts_per_token, config.num_experts)


@functools.partial(compile_once, static=("config", "execution", "mesh", "num_sequences"), check=_check_call)
def moe_route_and_compute(
    x: Float[Array, "T D"],
    params: Params,
    config: MoEConfig,
    execution: MoEExecution = DEFAULT_EXECUTION,
    *,
    mesh: AnyMesh | None = None,
    mask: Bool[Array, " T"] | None = None,
    key: jax.Array | None = None,
    token_ids: Integer[Array, " T"] | None = None,
    replay: Integer[Array, "T K"] | None = None,
    num_sequences: int = 1,
    first_expert: Int[Array, ""] | None = None,
) -> MoEOutput:
    """Compute the layer on a batch of tokens. `raggedmoe.moe.router.route` describes the optional arguments.

    ``params``: arrays by the names of ``config.param_specs()``. The matrices of the experts, of shared ones too, may be
    quantised. With delayed scales also the histories that these are made of (`raggedmoe.moe.amax_history`); without
    them, and while they are empty, a scale is made of the call's own largest value.
    ``mesh``: devices to compute it on, with the axes of `raggedmoe.sharding.axes`; arrays are global, and the result
    does not depend on the mesh. Tokens are split over all axes but "tensor", parameters by `raggedmoe.sharding.rules`.
    ``first_expert``: where this layer's experts begin in weights that hold several layers', one after the other.
    """
    on_mesh = replace(logical_mesh(mesh), tensor_split=execution.tensor_split)
    split_over(on_mesh, x.shape[0], "tokens")
    has_slots = config.capacity_factor is not None and config.router.selection != "expert_choice"
    by_sequence = has_slots or (config.router.aux_loss == "sequence" and config.router.aux_loss_weight)
    sequences = split_over(on_mesh, num_sequences, "whole sequences") if by_sequence else 1
    settings = StageSettings(config=config, execution=execution, on_mesh=on_mesh, num_sequences=sequences)
    check_ranks(settings)
    if mask is not None:
        # What a masked token holds, NaN too, reaches nothing: neither the router's gradient nor a sum.
        x = jnp.where(mask[:, None], x, 0)
    router = {name: params[name] for name in params if name.startswith("router_")}
    router = all_gather_params(router, config.param_specs(), on_mesh, TOKENS)
    routing, statistics = on_mesh.run(route, x, router, mask, key, token_ids, replay, settings=settings)
    with jax.named_scope("experts"):
        output, dropped = routed_experts(x, params, routing, first_expert, key, settings)
        output = on_mesh.constrain(output, TOKENS)
    shared = {name.removeprefix("shared_"): array for name, array in params.items() if name.startswith("shared_")}
    if shared:
        with jax.named_scope("shared_experts"):
            # In no stage: without a word about its layout, XLA exchanges two devices' gradients of x (docs/log.md).
            weights = scale_adapters(shared, config.lora)
            with dense_matmuls_for(execution.hardware, x, on_mesh=on_mesh.mesh is not None):
                added = shared_experts(on_mesh.constrain(x, TOKENS), weights, config.experts.activation)
            output = output + (added if mask is None else jnp.where(mask[:, None], added, 0))
    return MoEOutput(output=output, dropped=dropped, experts=routing.experts, **statistics)


def routed_experts(
    x: Float[Array, "T D"],
    params: Params,
    routing: RouteOutput,
    first_expert: Int[Array, ""] | None,
    key: jax.Array | None,
    settings: StageSettings,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """Compute the weighted sum of each token's experts, and count the slots that were dropped.

    The tokens, or the model width, come in chunks that do not depend on each other, so that the compiler may move one
    while it computes another, forward and backward. One chunk is the ordinary case.
    """
    execution, on_mesh, specs = settings.execution, settings.on_mesh, settings.config.param_specs()
    run = functools.partial(on_mesh.run, settings=settings)
    # In the type that they are multiplied in, which is also what is sent.
    experts: dict[str, Any] = {
        name: check_operand("MoE", name, array, "G F D") if isinstance(array, Quantized) else array.astype(x.dtype)
        for name, array in params.items()
        if name in specs and is_routed(name, specs[name])
    }
    biases = {name: experts.pop(name) for name in params if name.startswith("bias_wi")}
    weights = all_gather_params(experts, specs, on_mesh, PER_DEVICE)
    up_biases = all_gather_params(biases, specs, on_mesh, BETWEEN_PROJECTIONS)
    width_parts = even_parts(x.shape[1] // on_mesh.size(WIDTH_TENSOR), execution.width_chunks)
    fused = fuses_experts(x, experts, settings)
    key_of = functools.partial(rounding_key, execution.quantization, key)
    token_chunks = even_parts(x.shape[0] // on_mesh.size(*TOKEN_AXES), execution.token_chunks)

    def weighted_sum(x: jax.Array, metadata: RouteMetadata, weights: Params, tokens: slice) -> Float[Array, "T D"]:
        if fused:
            rows = run(dispatch, x, routing, metadata, tokens=tokens, columns=width_parts[0])
            rows = checkpoint_name(run(expert_ffn, rows, {**weights, **up_biases}, metadata), "moe_down")
            return run(unpermute, rows, routing, metadata, tokens=tokens)
        sums, columns_out = None, []
        for columns in width_parts:
            rows = run(dispatch, x, routing, metadata, tokens=tokens, columns=columns)
            more = run(gmm_up, rows, weights, metadata, key_of(tokens.start, 0), columns=columns)
            sums = more if sums is None else jax.tree.map(jnp.add, sums, more)
        sums = run(tp_reduce, sums)
        hidden = run(activate, checkpoint_name(sums, "moe_up"), up_biases, metadata, dtype=x.dtype)
        for columns in width_parts:
            rows = run(gmm_down, hidden, weights, metadata, key_of(tokens.start, 1), columns=columns)
            rows = checkpoint_name(rows, "moe_down")
            columns_out.append(run(unpermute, rows, routing, metadata, tokens=tokens))
        return on_mesh.run(concatenate, columns_out, dim=1)

    if execution.recompute_dispatch:
        weighted_sum = jax.checkpoint(weighted_sum, policy=KEEP_MATMULS, static_argnums=3)
    outputs, dropped = [], jnp.zeros((), jnp.int32)
    for tokens, largest in zip(token_chunks, largest_before(params, len(token_chunks), on_mesh)):
        metadata, more = run(prepare, routing, first_expert, tokens=tokens, num_stacked=params["wi_0"].shape[0])
        dropped = dropped + more
        outputs.append(weighted_sum(x, metadata, {**weights, **largest}, tokens))
    return on_mesh.run(concatenate, outputs, dim=0), dropped


@stage(chunks=TOKENS_AND_WIDTH, result=TOKENS_AND_WIDTH)
def concatenate(chunks: list[Float[Array, "_ _"]], *, dim: int) -> Float[Array, "_ _"]:
    """Join chunks of the tokens (dim 0) or of their columns (1) on every device."""
    return jnp.concatenate(chunks, axis=dim)
