"""The decoder, read top to bottom: embed → layers (attention, then MLP or experts) → norm → head."""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Integer

from raggedmoe.hardware import target_hardware
from raggedmoe.kernels.arrays import int32
from raggedmoe.kernels.attention.operands import segment_numbers
from raggedmoe.kernels.dense_matmul import dense_matmuls_for
from raggedmoe.kernels.eager import compile_once
from raggedmoe.kernels.native.library import takes
from raggedmoe.lora import A, B, scale_adapters
from raggedmoe.models.cache import Cache, VisibleMemory, split_layers, update_cache
from raggedmoe.models.config import LayerKind, ModelConfig, Stack, check_execution
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.matmul import wide_project
from raggedmoe.models.mixer import AttentionContext, Memory
from raggedmoe.models.norm import rms_norm
from raggedmoe.models.parameters import layer_specs, mixer_of, under
from raggedmoe.models.rope import RopeCosSin, rope_cos_sin
from raggedmoe.moe.config import strategy_name
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.moe.experts import shared_experts
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.params import Params
from raggedmoe.sharding.axes import ONE_DEVICE, AnyMesh, LogicalMesh, logical_mesh, split_over
from raggedmoe.sharding.dense_layers import (
    all_gather_dense_weights,
    embedding_lookup,
    save_all_but_gathered_weights,
    table_sharding,
)
from raggedmoe.sharding.stage import TOKENS

DEFAULT_EXECUTION = ModelExecution()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertReport:
    """What the MoE layers said, each entry with the layers in front, in the model's order."""

    aux_loss: Float[Array, "*layers"]  # add their sum to the loss as it is: its weight is in it
    z_loss: Float[Array, "*layers"]
    load: Int[Array, "*layers E"]
    entropy: Float[Array, "*layers"]
    max_violation: Float[Array, "*layers"]
    dropped: Int[Array, "*layers"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecoderOutput:
    """What a pass through the layers returns. `logits` turns the hidden states into scores."""

    hidden: Float[Array, "B S D"]  # after the final norm
    experts: ExpertReport | None  # None: no layer has experts
    cache: Cache | None  # with these tokens in it; None: none was given


def decode(
    params: Params,
    ids: Integer[Array, "B S"],
    config: ModelConfig,
    execution: ModelExecution = DEFAULT_EXECUTION,
    *,
    mask: Bool[Array, "B S"] | None = None,
    segments: Integer[Array, "B S"] | None = None,
    positions: Integer[Array, "B S"] | None = None,
    cache: Cache | None = None,
    cache_is_empty: bool = False,
    key: jax.Array | None = None,
    mesh: AnyMesh | None = None,
) -> DecoderOutput:
    """Compute the hidden states of every token.

    Args:
      params: by the names of `param_specs`.
      ids: the tokens; each sees itself and those before it.
      config: what the model is.
      execution: how it runs.
      mask: True for tokens that count. The others go to no expert, no token that counts sees them, and a cache does
        not keep them.
      segments: documents packed into a row, by numbers >= 0: tokens see their own document's only.
      positions: for rope; by default the place in the row, or with a cache the place in the sequence.
      cache: earlier tokens of the same sequences. Needs room for these: under `jit`, where that cannot be checked, the
        states of tokens past its end are NaN.
      cache_is_empty: the caller knows it, so that attention reads these tokens and not all of the cache.
      key: for random routing and jitter.
      mesh: devices over which sequences, weights and experts are split; None: all on one device.
    """
    check_execution(config, execution)
    mesh = logical_mesh(mesh)
    split_over(mesh, ids.shape[0], "sequences")
    _check(ids, mask, segments, positions, cache)
    ids, segments = int32(ids), None if segments is None else segment_numbers(segments)
    arrays = (params, ids, mask, segments, positions, cache, key)
    return _decode(*arrays, config=config, execution=execution, cache_is_empty=cache_is_empty, mesh=mesh)


def _hidden_states(
    params: Params,
    ids: Int[Array, "B S"],
    mask: Bool[Array, "B S"] | None,
    segments: Int[Array, "B S"] | None,
    positions: Integer[Array, "#B S"] | None,
    cache: Cache | None,
    key: jax.Array | None,
    *,
    config: ModelConfig,
    execution: ModelExecution,
    cache_is_empty: bool,
    mesh: LogicalMesh,
) -> DecoderOutput:
    slots = None if cache is None else _slots(cache, mask, ids.shape)
    written = None if slots is None or cache is None else jnp.where(slots < cache.size, slots, -1)
    attends_to_cache = cache is not None and not cache_is_empty
    if mask is not None and not attends_to_cache:
        segments = jnp.where(mask, 0 if segments is None else segments, -1)
    if positions is None:
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] if slots is None else jnp.maximum(slots, 0)
    run = LayerContext(
        config=config,
        execution=execution,
        ids=ids,
        cos_sin=rope_cos_sin(config.attention.rope, config.attention.rope_dim, positions, config.dtype),
        slots=written,
        attends_to_cache=attends_to_cache,
        segments=segments,
        mask=mask,
        mesh=mesh,
    )
    x = embed(params, ids, config, mesh)
    memory, reports = {}, []
    for s, stack in enumerate(config.stacks):
        old = None if cache is None else under(f"stacks.{s}.", cache.memory)
        stack_key = None if key is None else jax.random.fold_in(key, s)
        with jax.named_scope(f"stack_{s}"):
            x, new, report = run_stack(run, stack, x, under(f"stacks.{s}.", params), old, stack_key)
        memory.update({f"stacks.{s}.{name}": value for name, value in new.items()})
        reports += report
    hidden = rms_norm(x, params["final_norm"], config.norm_epsilon)
    if cache is not None:
        assert slots is not None
        hidden = jnp.where((slots < cache.size)[:, :, None], hidden, jnp.nan)
        lengths = jnp.maximum(cache.lengths, slots.max(axis=1) + 1)
        cache = replace(cache, memory=memory, lengths=lengths)
    return DecoderOutput(
        hidden=hidden,
        experts=jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports) if reports else None,
        cache=cache,
    )


_decode = compile_once(_hidden_states, static=("config", "execution", "cache_is_empty", "mesh"))


def embed(
    params: Params, ids: Integer[Array, "B S"], config: ModelConfig, mesh: LogicalMesh = ONE_DEVICE
) -> Float[Array, "B S D"]:
    """Look up the tokens' vectors, in the type of the activations."""
    table = params["embedding"]
    if mesh.mesh is not None:
        return embedding_lookup(table, ids, config.dtype, table_sharding(mesh, table.shape))
    return jnp.take(table, ids, axis=0, mode="clip").astype(config.dtype)


def logits(params: Params, hidden: Float[Array, "B S D"], config: ModelConfig) -> Float[Array, "B S V"]:
    """Compute the scores of every vocabulary entry, in float32 at least."""
    return wide_project(hidden, params["embedding" if config.tied_embeddings else "head"])


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What all layers are given alike."""

    config: ModelConfig
    execution: ModelExecution
    ids: jax.Array
    cos_sin: RopeCosSin
    slots: jax.Array | None  # where the tokens go in the cache; None: there is none
    attends_to_cache: bool
    segments: jax.Array | None
    mask: jax.Array | None
    mesh: LogicalMesh


def run_stack(
    run: LayerContext,
    stack: Stack,
    x: Float[Array, "B S D"],
    params: Params,
    memory: Any,
    key: jax.Array | None,
) -> tuple[Float[Array, "B S D"], Any, list[ExpertReport]]:
    """Run the layers of a stack; return the result, the memory with these tokens, and what its MoE layers said.

    Parameters and memory are arrays with the layers in front, which are scanned over, or have an array for each layer,
    as `unstack_params` and `unstack_cache` make them.
    """
    has_experts = any(kind.moe for kind in stack.kinds)
    is_unstacked = any(isinstance(value, tuple) for value in params.values())
    in_place: Params = {}
    if memory is not None and run.mesh.mesh is None and reads_experts_in_place(run.config, run.execution.moe, x):
        in_place = {name: v for name, v in params.items() if name.endswith(EXPERT_WEIGHTS)}
        in_place = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), in_place)
        params = {name: value for name, value in params.items() if name not in in_place}

    def body(carry: tuple[jax.Array, Memory | None], step: tuple[jax.Array, Params]) -> tuple[Any, Any]:
        x, memory = carry
        repeat, weights = step
        reports = []
        for p, kind in enumerate(stack.kinds):
            layer_key = None if key is None else jax.random.fold_in(key, repeat * len(stack.kinds) + p)
            stored = under(f"{p}.", {**weights, **in_place})
            layer = all_gather_dense_weights(stored, layer_specs(run.config, kind), run.mesh, run.config.dtype)
            with dense_matmuls_for(run.execution.moe.hardware, x, on_mesh=run.mesh.mesh is not None):
                x, memory, report = run_layer(run, kind, x, layer, memory, f"{p}.", repeat, layer_key)
            reports += [] if report is None else [report]
        return (x, memory), jax.tree.map(lambda *parts: jnp.stack(parts), *reports) if has_experts else None

    repeats = jnp.arange(stack.repeats, dtype=jnp.int32)
    carry, step = (x, memory), _rematerialize(body, run)
    if is_unstacked:
        memories, layer_reports = [], []
        for repeat in range(stack.repeats):
            of_layer = (_of_layer(params, repeat), None if memory is None else _of_layer(memory, repeat))
            (x, updated), report = step((x, of_layer[1]), (repeats[repeat], of_layer[0]))
            memories.append(updated)
            layer_reports.append(report)
        memory = {what: tuple(updated[what] for updated in memories) for what in memory or {}}
        reports = jax.tree.map(lambda *parts: jnp.stack(parts), *layer_reports)
    elif run.execution.scan_layers:
        (x, memory), reports = lax.scan(step, carry, (repeats, params))
    else:
        layer_reports = []
        for repeat in range(stack.repeats):
            carry, report = step(carry, (repeats[repeat], jax.tree.map(lambda a, r=repeat: a[r], params)))
            layer_reports.append(report)
        (x, memory), reports = carry, jax.tree.map(lambda *parts: jnp.stack(parts), *layer_reports)
    # [repeats, MoE layers of one repeat, ...] -> the layers in order
    in_order = [jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), reports)] if has_experts else []
    return x, memory or {}, in_order


def _of_layer(arrays: Params, repeat: int) -> dict[str, Any]:
    return {name: layers[repeat] for name, layers in arrays.items()}


def unstack_params(params: Params) -> Params:
    """Split parameters into an array for each layer, but for the experts, which are read in place.

    XLA's CPU backend copies what a program takes out of a stack before it multiplies by it. For decoding, which reads
    each weight for one token only, this copies the dense weights once instead of at every token.
    """
    return {
        name: split_layers(value) if name.startswith("stacks.") and not name.endswith(EXPERT_WEIGHTS) else value
        for name, value in params.items()
    }


# Parameters with an expert axis, but for the router's: nearly all of a model.
EXPERT_WEIGHTS = tuple(
    f".moe.{name}{part}"
    for name in ("wi_0", "wi_1", "wo", "bias_wi_0", "bias_wi_1", "bias_wo")
    for part in (("",) if name.startswith("bias") else ("", A, B))
)


def reads_experts_in_place(config: ModelConfig, execution: MoEExecution, x: Float[Array, "..."]) -> bool:
    """Tell whether the kernel is given all layers' experts, with rows for one layer's only, instead of its slice.

    A scan copies what it slices: every expert of a layer, used or not, which is most of the time of decoding a token
    (docs/log.md). Where empty groups cost nothing, no slice is needed.
    """
    if (
        target_hardware(execution.hardware, (x,)).platform != "cpu"
        or strategy_name(config.moe, execution) != "local"
        or config.param_dtype != config.dtype  # all of them would be cast
        or execution.quantization is not None  # or quantised
    ):
        return False
    choice, backend = execution.kernel_choice.grouped_matmul, execution.moe_backend
    if ((choice == "auto" and backend == "auto") or backend == "cpu_native") and takes(config.dtype):
        return True
    return choice in ("auto", "cpu") and not execution.backend.fused


def run_layer(
    run: LayerContext,
    kind: LayerKind,
    x: Float[Array, "B S D"],
    weights: Params,
    memory: Memory | None = None,
    prefix: str = "",
    repeat: jax.Array | None = None,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "B S D"], Memory | None, ExpertReport | None]:
    """Run one layer: attention, then MLP or experts, each on the normed input and added to it."""
    config, mixer = run.config, mixer_of(run.config)
    eps = config.norm_epsilon
    with jax.named_scope("attention"):
        attention_weights = scale_adapters(under("attention.", weights), config.lora)
        normed = rms_norm(x, weights["attention_norm"], eps)
        query = mixer.project_query(normed, attention_weights, config.attention, run.cos_sin)
        new = mixer.project_key_value(normed, attention_weights, config.attention, run.cos_sin)
        visible = VisibleMemory(new, None, kind.window)
        if memory is not None:
            assert repeat is not None
            assert run.slots is not None
            updated, earlier_too = update_cache(under(prefix, memory), repeat, new, run.slots, kind.window)
            visible = earlier_too if run.attends_to_cache else visible
            memory = {**memory, **{f"{prefix}{what}": value for what, value in updated.items()}}
        context = AttentionContext(
            slots=visible.positions,
            segments=run.segments,
            window=visible.window,
            implementation=run.execution.attention_implementation,
            hardware=run.execution.moe.hardware,
            mesh=run.mesh,
        )
        attended = mixer.attend(query, visible.memory, attention_weights, config.attention, context)
        attended = run.mesh.constrain(attended, TOKENS)
        x = x + checkpoint_name(attended, "attn_proj_out")
    with jax.named_scope("moe" if kind.moe else "mlp"):
        normed = rms_norm(x, weights["mlp_norm"], eps)
        if kind.moe:
            out, report = _experts(run, normed, weights, repeat, key)
        else:
            out, report = _mlp(config, normed, weights), None
    return run.mesh.constrain(x + out, TOKENS), memory, report


def _mlp(config: ModelConfig, x: Float[Array, "B S D"], weights: Params) -> Float[Array, "B S D"]:
    mlp = scale_adapters(under("mlp.", weights), config.lora)
    return shared_experts(x.reshape(-1, x.shape[-1]), mlp, config.activation).reshape(x.shape)


def _experts(
    run: LayerContext, x: Float[Array, "B S D"], weights: Params, repeat: jax.Array | None, key: jax.Array | None
) -> tuple[Float[Array, "B S D"], ExpertReport]:
    config = run.config.moe_layer
    first_expert = None
    if weights["moe.wi_0"].shape[0] > config.num_experts:
        assert repeat is not None
        first_expert = repeat * config.num_experts
    out = moe_route_and_compute(
        x.reshape(-1, x.shape[-1]),
        under("moe.", weights),
        config,
        run.execution.moe,
        mesh=run.mesh,
        mask=None if run.mask is None else run.mask.reshape(-1),
        key=key,
        token_ids=run.ids.reshape(-1),
        num_sequences=x.shape[0],
        first_expert=first_expert,
    )
    report = ExpertReport(**{entry.name: getattr(out, entry.name) for entry in fields(ExpertReport)})
    return out.output.reshape(x.shape), report


def _rematerialize(body: Any, run: LayerContext) -> Any:
    """Have the body of a stack keep for the backward pass only what the execution names."""
    remat = run.execution.remat
    if remat == "none" and run.mesh.mesh is None:
        return body
    policy = jax.checkpoint_policies.save_only_these_names(*run.execution.saved_names)
    if remat == "none":
        policy = save_all_but_gathered_weights(run.mesh)
    # A scan already keeps the two passes apart.
    return jax.checkpoint(body, policy=policy, prevent_cse=not run.execution.scan_layers)


def _slots(cache: Cache, mask: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Return where these tokens go in the cache: after what is there, those that do not count nowhere (-1)."""
    counts = jnp.ones(shape, bool) if mask is None else mask
    after = cache.lengths[:, None] + jnp.cumsum(counts, axis=1, dtype=jnp.int32) - 1
    return jnp.where(counts, after, -1)


def _check(ids: Any, mask: Any, segments: Any, positions: Any, cache: Cache | None) -> None:
    for name, array in (("mask", mask), ("segments", segments), ("positions", positions)):
        fits = array is None or array.shape == ids.shape or (name == "positions" and array.shape == (1, ids.shape[1]))
        if not fits:
            raise ValueError(f"expected {name} [B S] = {list(ids.shape)} as ids, got {list(array.shape)}")
    if cache is None:
        return
    if segments is not None:
        raise ValueError("expected segments without a cache, or a cache without segments; got both")
    if cache.lengths.shape[0] != ids.shape[0]:
        raise ValueError(f"expected ids of the cache's {cache.lengths.shape[0]} sequences, got {ids.shape[0]}")
    if any(isinstance(array, jax.core.Tracer) for array in (cache.lengths, mask)):
        return
    new = ids.shape[1] if mask is None else mask.sum(axis=1)
    needed = int((cache.lengths + new).max())
    if needed > cache.size:
        raise ValueError(f"expected room for {needed} tokens in the cache, got {cache.size} slots; make a larger one")
