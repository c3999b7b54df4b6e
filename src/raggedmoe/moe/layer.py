"""The MoE layer as a function: route → dispatch → gmm_up → gmm_down → unpermute."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, Integer

from raggedmoe.kernels.eager import compile_once
from raggedmoe.moe.config import MoEConfig, check_execution, is_expert_choice
from raggedmoe.moe.dispatch import dispatch, prepare, strategy_settings, unpermute
from raggedmoe.moe.dispatch.strategy import StrategySettings
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.moe.experts import activate, expert_ffn, gmm_down, gmm_up, shared_experts, tp_reduce
from raggedmoe.moe.gathering import gather_experts, gather_router
from raggedmoe.moe.records import MoEOutput, MoEParams, RouteOutput
from raggedmoe.moe.router import check_replay, route
from raggedmoe.sharding.axes import TENSOR, LogicalMesh, logical_mesh, split_over
from raggedmoe.sharding.stage import ACTIVATIONS, TOKENS, OnMesh, stage

DEFAULT_EXECUTION = MoEExecution()


def _check_call(
    x: Any, params: Any, config: MoEConfig, execution: Any = DEFAULT_EXECUTION, *, replay: Any = None, **_: Any
) -> None:
    """Refuse what cannot run; the values of a recorded routing can be looked at here, outside of jit, alone."""
    check_execution(config, execution)
    if replay is not None and not is_expert_choice(config):
        check_replay(replay, x.shape[0], config.experts_per_token, config.num_experts)


@functools.partial(compile_once, static=("config", "execution", "mesh", "num_sequences"), check=_check_call)
def moe_route_and_compute(
    x: Float[Array, "T D"],
    params: MoEParams,
    config: MoEConfig,
    execution: MoEExecution = DEFAULT_EXECUTION,
    *,
    mesh: Mesh | AbstractMesh | LogicalMesh | None = None,
    mask: Bool[Array, " T"] | None = None,
    key: jax.Array | None = None,
    token_ids: Integer[Array, " T"] | None = None,
    replay: Integer[Array, "T K"] | None = None,
    num_sequences: int = 1,
    first_expert: Int[Array, ""] | None = None,
) -> MoEOutput:
    """The layer on a batch of tokens. `raggedmoe.moe.router.route` describes the optional arguments.

    ``params``: arrays by the names of ``config.param_specs()``.
    ``mesh``: devices to compute it on, with the axes of `raggedmoe.sharding.axes`; arrays are global, and the result
    does not depend on the mesh. Tokens are split over all axes but "tensor", parameters by `raggedmoe.sharding.rules`.
    ``first_expert``: where this layer's experts begin in weights that hold several layers', one after the other.
    """
    run = OnMesh(mesh=logical_mesh(mesh), tensor_split=execution.tensor_split)
    num_tokens, sequences = split_over(run.mesh, x.shape[0], "tokens"), sequences_of_device(num_sequences, config, run)
    strategy = strategy_settings(config, execution, num_tokens, run, sequences)
    if mask is not None:
        # What a masked token holds, NaN too, reaches nothing: neither the router's gradient nor a sum.
        x = jnp.where(mask[:, None], x, 0)
    routing = run(
        route,
        *(x, gather_router(params, config, run), mask, key, token_ids, replay),
        config=config.router,
        experts_per_token=config.experts_per_token,
        num_sequences=sequences,
        capacity=config.expert_choice_capacity(num_tokens) if is_expert_choice(config) else None,
        axes=run.axes.tokens,
    )
    with jax.named_scope("experts"):
        output, dropped = routed_experts(x, params, routing, first_expert, strategy, config, execution, run)
        output = run.constrain(output, TOKENS)
    shared = {name.removeprefix("shared_"): array for name, array in params.items() if name.startswith("shared_")}
    if shared:
        with jax.named_scope("shared_experts"):
            # In no stage: without a word about its layout, XLA exchanges two devices' gradients of x (docs/log.md).
            added = shared_experts(run.constrain(x, TOKENS), shared, config.experts.activation)
            output = output + (added if mask is None else jnp.where(mask[:, None], added, 0))
    statistics = {name: getattr(routing, name) for name in MoEOutput.OF_ROUTING}
    return MoEOutput(output=output, dropped=dropped, **statistics)


def routed_experts(
    x: Float[Array, "T D"],
    params: MoEParams,
    routing: RouteOutput,
    first_expert: Int[Array, ""] | None,
    strategy: StrategySettings,
    config: MoEConfig,
    execution: MoEExecution,
    run: OnMesh,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """The routed experts' weighted sum of every token, and how many slots were dropped.

    The tokens, or the model width, come in chunks that do not depend on each other, so that the compiler may move one
    while it computes another, forward and backward. One chunk is the ordinary case.
    """
    weights, up_biases = gather_experts(params, config, run, x.dtype)
    activation, axes, splits_width = config.experts.activation, run.axes, execution.tensor_split == "model_dim"
    num_columns = x.shape[1] // (run.size(TENSOR) if splits_width else 1)
    outputs, dropped = [], jnp.zeros((), jnp.int32)
    for tokens in even_parts(split_over(run.mesh, x.shape[0], "tokens"), execution.token_chunks):
        chunk: dict[str, Any] = {"strategy": strategy, "tokens": tokens}
        metadata, more = run(prepare, routing, first_expert, **chunk, num_stacked=params["wi_0"].shape[0])
        dropped = dropped + more
        if execution.backend.fused:
            rows = run(dispatch, x, routing, metadata, **chunk, columns=slice(0, num_columns))
            ffn: dict[str, Any] = {"activation": activation, "execution": execution, "axes": axes}
            rows = run(expert_ffn, rows, weights, up_biases, metadata, **ffn)
            outputs.append(run(unpermute, rows, routing, metadata, **chunk))
            continue
        sums, columns_out = None, []
        for columns in even_parts(num_columns, execution.width_chunks):
            rows = run(dispatch, x, routing, metadata, **chunk, columns=columns)
            more = run(gmm_up, rows, weights, metadata, columns=columns, execution=execution)
            sums = more if sums is None else jax.tree.map(jnp.add, sums, more)
        if splits_width:
            sums = run(tp_reduce, sums, axes=axes)
        sums = _name_arrays(sums, "moe_up")
        hidden = run(activate, sums, up_biases, metadata, activation=activation, dtype=x.dtype, axes=axes)
        for columns in even_parts(num_columns, execution.width_chunks):
            rows = run(gmm_down, hidden, weights, metadata, columns=columns, execution=execution, axes=axes)
            columns_out.append(run(unpermute, _name_arrays(rows, "moe_down"), routing, metadata, **chunk))
        outputs.append(_concatenate_chunks(columns_out, run, dim=1))
    return _concatenate_chunks(outputs, run, dim=0), dropped


def _name_arrays(arrays: Any, name: str) -> Any:
    """The arrays under a name by which remat can keep them."""
    return jax.tree.map(lambda array: checkpoint_name(array, name), arrays)


@stage(chunks=ACTIVATIONS, result=ACTIVATIONS)
def concatenate(chunks: list[Float[Array, "_ _"]], *, dim: int) -> Float[Array, "_ _"]:
    """Chunks of the tokens (dim 0) or of their columns (1), after each other on every device."""
    return jnp.concatenate(chunks, axis=dim)


def _concatenate_chunks(chunks: list[Float[Array, "_ _"]], run: OnMesh, dim: int) -> Float[Array, "_ _"]:
    return chunks[0] if len(chunks) == 1 else run(concatenate, chunks, dim=dim)


def even_parts(size: int, num_parts: int) -> list[slice]:
    """So many parts, whose sizes differ by one at most, or fewer where some would be empty."""
    bounds = sorted({size * i // num_parts for i in range(num_parts + 1)})
    return [slice(start, end) for start, end in itertools.pairwise(bounds)] or [slice(0, 0)]


def sequences_of_device(num_sequences: int, config: MoEConfig, run: OnMesh) -> int:
    """How many whole sequences are on each device, where the balance loss or the capacity is of each sequence."""
    if config.capacity_factor is not None and not is_expert_choice(config):
        what, instead = "whole sequences, in which a capacity_factor counts slots,", "no capacity_factor"
    elif config.router.aux_loss == "sequence" and config.router.aux_loss_weight:
        what, instead = "whole sequences, of which aux_loss='sequence' is taken,", "aux_loss='batch'"
    else:
        return 1
    return split_over(run.mesh, num_sequences, what, instead)
