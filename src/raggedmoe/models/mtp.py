"""Multi-token prediction: modules that each predict one token further ahead than the model, as DeepSeek V3 has one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from raggedmoe.kernels.arrays import int32
from raggedmoe.kernels.attention.operands import segment_numbers
from raggedmoe.kernels.eager import compile_once
from raggedmoe.models.config import ModelConfig, Stack, check_execution
from raggedmoe.models.decoder import DEFAULT_EXECUTION, ExpertReport, LayerContext, embed, run_stack
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.matmul import project
from raggedmoe.models.norm import rms_norm
from raggedmoe.models.parameters import mtp_specs, under
from raggedmoe.models.rope import rope_cos_sin
from raggedmoe.params import Params
from raggedmoe.sharding.axes import AnyMesh, LogicalMesh, logical_mesh, split_over
from raggedmoe.sharding.dense_layers import all_gather_dense_weights


def mtp_mask(documents: Int[Array, "B S"], module: int) -> Bool[Array, "B S"]:
    """Mark where a module of multi-token prediction knows the token that it joins. A document of -1 is padding."""
    ahead, length = module + 1, documents.shape[1]
    in_row = jnp.arange(length)[None] < length - ahead
    return in_row & (documents == jnp.roll(documents, -ahead, axis=1)) & (documents >= 0)


def mtp_forward(
    params: Params,
    hidden: Float[Array, "B S D"],
    ids: Integer[Array, "B S"],
    config: ModelConfig,
    execution: ModelExecution = DEFAULT_EXECUTION,
    *,
    mask: Bool[Array, "B S"] | None = None,
    segments: Integer[Array, "B S"] | None = None,
    positions: Integer[Array, "B S"] | None = None,
    key: jax.Array | None = None,
    mesh: AnyMesh | None = None,
) -> tuple[list[Float[Array, "B S D"]], list[ExpertReport]]:
    """Compute the hidden states from which `logits` predicts the token after the next, and so on.

    Module m joins the hidden state at position i with the embedding of token i + m + 1 and predicts token i + m + 2.
    A position that knows no such token (the last of a row or of a document, or one before padding) goes to no expert,
    and what stands there is not to be used.

    Args:
      hidden: `DecoderOutput.hidden` of the same tokens, which module 0 starts from; the others as for `decode`.
    """
    check_execution(config, execution)
    mesh = logical_mesh(mesh)
    split_over(mesh, ids.shape[0], "sequences")
    ids, segments = int32(ids), None if segments is None else segment_numbers(segments)
    arrays = (params, hidden, ids, mask, segments, positions, key)
    return _mtp_forward(*arrays, config=config, execution=execution, mesh=mesh)


def _mtp_states(
    params: Params,
    hidden: Float[Array, "B S D"],
    ids: Int[Array, "B S"],
    mask: Bool[Array, "B S"] | None,
    segments: Int[Array, "B S"] | None,
    positions: Integer[Array, "#B S"] | None,
    key: jax.Array | None,
    *,
    config: ModelConfig,
    execution: ModelExecution,
    mesh: LogicalMesh,
) -> tuple[list[Float[Array, "B S D"]], list[ExpertReport]]:
    if positions is None:
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    cos_sin = rope_cos_sin(config.attention.rope, config.attention.rope_dim, positions, config.dtype)
    stack = Stack(first=config.num_layers, kinds=(config.kind(config.num_layers),), repeats=1)
    documents = jnp.zeros_like(ids) if segments is None else segments
    documents = documents if mask is None else jnp.where(mask, documents, -1)
    hidden_states, reports = [], []
    for m in range(config.mtp_layers):
        module = under(f"mtp.{m}.", params)
        dense = all_gather_dense_weights({"projection": module["projection"]}, mtp_specs(config), mesh, config.dtype)
        next_ids = jnp.roll(ids, -(m + 1), axis=1)
        run = LayerContext(
            config=config,
            execution=execution,
            ids=next_ids,
            cos_sin=cos_sin,
            slots=None,
            attends_to_cache=False,
            segments=None if segments is None and mask is None else documents,
            mask=mtp_mask(documents, m),
            mesh=mesh,
        )
        further = embed(params, next_ids, config, mesh)
        joined = jnp.concatenate(
            [
                rms_norm(further, module["embedding_norm"], config.norm_epsilon),
                rms_norm(hidden, module["hidden_norm"], config.norm_epsilon),
            ],
            axis=-1,
        )
        module_key = None if key is None else jax.random.fold_in(key, len(config.stacks) + m)
        layer = {f"0.{name}": jax.tree.map(lambda a: a[None], value) for name, value in module.items()}
        x, _, report = run_stack(run, stack, project(joined, dense["projection"]), layer, None, module_key)
        hidden = rms_norm(x, module["final_norm"], config.norm_epsilon)
        hidden_states.append(hidden)
        reports += report
    return hidden_states, reports


_mtp_forward = compile_once(_mtp_states, static=("config", "execution", "mesh"))
