"""One training step, as a pure function: loss, gradients over micro-batches, AdamW, and the routers' bias rule."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.decoder import ExpertReport, decode
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.mtp import mtp_forward, mtp_mask
from raggedmoe.models.parameters import param_specs
from raggedmoe.moe.amax_history import is_amax_history
from raggedmoe.moe.balance import load_entropy, max_violation, update_selection_bias
from raggedmoe.params import Params
from raggedmoe.sharding.axes import AnyMesh
from raggedmoe.sharding.training import in_micro_batches
from raggedmoe.train.data.rows import Batch
from raggedmoe.train.settings.step import ResolvedStep
from raggedmoe.train.step.loss import cross_entropy_sum
from raggedmoe.train.step.optimizer import (
    learning_rate_schedule,
    make_optimizer,
    round_to_dtype,
    widen_to_float32,
)
from raggedmoe.train.step.state import TrainState


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Losses:
    """The parts of what is minimised, each as it enters the sum, and what the MoE layers saw.

    Of any array's type, as the sum over micro-batches begins from their shapes.
    """

    loss: Float[Any, ""]  # cross-entropy, in nats per target
    mtp_loss: Float[Any, ""]  # times its weight
    aux_loss: Float[Any, ""]
    z_loss: Float[Any, ""]
    load: Int[Any, "layers E"]  # routed slots, MTP's layers last
    dropped: Int[Any, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The figures of a step: its losses, the gradient's norm, how even the load was, and whether it was skipped."""

    losses: Losses
    grad_norm: Float[Array, ""]  # before clipping
    learning_rate: Float[Array, ""]
    entropy: Float[Array, ""]  # of the load, mean over the layers, in nats
    max_violation: Float[Array, ""]  # of the worst layer
    tokens: Int[Array, ""]  # that are no padding
    targets: Float[Array, ""]  # that were learned from
    finite: Bool[Array, ""]  # otherwise the step was skipped: nothing moved
    skipped_in_a_row: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MicroBatchWeights:
    """What one micro-batch's means count for in the batch's: its part of the tokens and of the sequences.

    Index 0 is the model, m + 1 is module m of multi-token prediction.
    """

    per_target: Float[Array, "*parts M"]  # one over the targets of the whole batch; of the modules, over those of all
    of_tokens: Float[Array, "*parts M"]
    of_sequences: Float[Array, "*parts M"]


def train_step(
    state: TrainState, batch: Batch, config: ResolvedStep, mesh: AnyMesh | None = None
) -> tuple[TrainState, StepReport]:
    """Take one step: return the next state, and what is reported of the step.

    Where the loss or the gradient is not finite, the next state is the old one with the step counted as skipped; where
    rows were dropped and the step is to be run again, it is the old one as it was, whatever the loss.
    The batch is ``[B S]``, or ``[parts B/parts S]`` with the micro-batches apart, as they must be on a mesh.
    """
    key = jax.random.fold_in(state.key, state.step)
    specs = param_specs(config.model)
    trained = {name: value for name, value in state.params.items() if specs[name].trained}
    biases = {name: value for name, value in state.params.items() if name not in trained}
    learned, others = {**trained, **state.amax_history}, {**state.frozen, **biases}
    gradients, losses = batch_gradients(learned, others, batch, config, key, mesh)
    histories = {name: gradients.pop(name) for name in state.amax_history}
    gradients = {name: round_to_dtype(gradient, config.optimizer.grad_dtype) for name, gradient in gradients.items()}
    norm = optax.tree.norm(gradients)

    with jax.named_scope("optimizer"):
        optimizer = make_optimizer(config.optimizer, specs, mesh)
        master = {name: widen_to_float32(value) for name, value in trained.items()}
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, master)
        moved = {name: (master[name] + updates[name]).astype(trained[name].dtype) for name in trained}
        moved |= update_biases(biases, losses.load, config)
        if not config.mtp_layers:  # they have no gradient, but would decay
            moved |= {name: value for name, value in trained.items() if name.startswith("mtp.")}

    # Where the gradient's norm is finite, so is every update: `OptimizerConfig` keeps adam_eps far enough from zero.
    total = losses.loss + losses.mtp_loss + losses.aux_loss + losses.z_loss
    finite = jnp.isfinite(norm) & jnp.isfinite(total)

    counts = losses.dropped == 0 if config.rerun_on_overflow else jnp.ones((), bool)

    def if_good(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(finite & counts, new, old), new, old)

    bad = (~finite).astype(jnp.int32)
    next_state = replace(
        state,
        step=state.step + counts.astype(jnp.int32),
        params=if_good(moved, state.params),
        optimizer=if_good(optimizer_state, state.optimizer),
        amax_history=if_good(histories, state.amax_history),
        skipped=jnp.where(counts, state.skipped + bad, state.skipped),
        skipped_in_a_row=jnp.where(counts, (state.skipped_in_a_row + bad) * bad, state.skipped_in_a_row),
    )
    has_experts = losses.load.shape[0] > 0
    none = jnp.zeros((), jnp.float32)
    report = StepReport(
        losses=losses,
        grad_norm=norm,
        learning_rate=jnp.asarray(learning_rate_schedule(config.optimizer)(_updates_made(state)), jnp.float32),
        entropy=jax.vmap(load_entropy)(losses.load).mean() if has_experts else none,
        max_violation=jax.vmap(max_violation)(losses.load).max() if has_experts else none,
        tokens=(batch.segments >= 0).sum(dtype=jnp.int32),
        targets=batch.weights.sum(),
        finite=finite,
        skipped_in_a_row=next_state.skipped_in_a_row,
    )
    return next_state, report


def _updates_made(state: TrainState) -> Int[Array, ""]:
    """Count the steps as the optimizer does, by which its schedule goes: a skipped step is none."""
    return state.step - state.skipped


def batch_gradients(
    trained: Params, others: Params, batch: Batch, config: ResolvedStep, key: jax.Array, mesh: AnyMesh | None = None
) -> tuple[dict[str, jax.Array], Losses]:
    """Compute the gradients and losses of the whole batch, in float32 at least, in however many micro-batches.

    Histories of delayed scales among what is trained have no gradients: in their place is each after this step.

    Cross-entropy, z-loss and the sequence-wise auxiliary loss are sums over tokens or sequences, so the result does not
    depend on the cut. The batch-wise auxiliary loss is not additive: its mean over the micro-batches is taken.
    """
    parts = config.micro_batches
    micro = batch if batch.ids.ndim == 3 else in_micro_batches(batch, parts)
    weights = micro_batch_weights(micro, config)
    take = jax.value_and_grad(objective, has_aux=True)

    def body(number: Any, batch: Batch, weights: MicroBatchWeights) -> tuple[dict[str, jax.Array], Losses]:
        own_key = jax.random.fold_in(key, number)
        (_, losses), gradients = take(trained, others, batch, weights, config, own_key, mesh)
        return jax.tree.map(widen_to_float32, gradients), losses

    if parts == 1:
        return body(0, *jax.tree.map(lambda a: a[0], (micro, weights)))
    zeros = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype),
        jax.eval_shape(lambda: body(0, *jax.tree.map(lambda a: a[0], (micro, weights)))),
    )
    total, _ = lax.scan(
        lambda total, part: (_add_up(total, body(*part)), None),
        zeros,
        (jnp.arange(parts), micro, weights),
    )
    return total


def _add_up(total: tuple[Params, Losses], part: tuple[Params, Losses]) -> tuple[dict[str, jax.Array], Losses]:
    """Add a micro-batch's gradients and losses; of a history the largest values of any of them count."""
    (gradients, losses), (more, more_losses) = total, part
    both = {
        name: jax.tree.map(jnp.maximum if is_amax_history(name) else jnp.add, value, more[name])
        for name, value in gradients.items()
    }
    return both, jax.tree.map(jnp.add, losses, more_losses)


def objective(
    trained: Params,
    others: Params,
    batch: Batch,
    weights: MicroBatchWeights,
    config: ResolvedStep,
    key: jax.Array,
    mesh: AnyMesh | None = None,
) -> tuple[Float[Array, ""], Losses]:
    """Compute what a micro-batch adds to what is minimised, and its parts."""
    model, params = config.model, {**trained, **others}
    options: dict[str, Any] = {
        "mask": batch.segments >= 0,
        "segments": batch.segments,
        "positions": batch.positions,
        "mesh": mesh,
    }
    out = decode(params, batch.ids, model, config.execution, **options, key=key)
    reports = [] if out.experts is None else [out.experts]
    loss = _cross_entropy(params, out.hidden, batch.targets, batch.weights, model, mesh) * weights.per_target[0]
    aux, z = _router_losses(out.experts, weights, 0)
    mtp_loss = jnp.zeros_like(loss)
    if config.mtp_layers:
        further, more = mtp_forward(params, out.hidden, batch.ids, model, config.execution, **options, key=key)
        reports += more
        for m, hidden in enumerate(further):
            targets, learned = jnp.roll(batch.targets, -(m + 1), axis=1), mtp_weights(batch, m)
            share = weights.per_target[m + 1] * config.losses.mtp_loss_weight
            mtp_loss += _cross_entropy(params, hidden, targets, learned, model, mesh) * share
            more_aux, more_z = _router_losses(more[m], weights, m + 1)
            aux, z = aux + more_aux, z + more_z
    losses = Losses(
        loss=loss,
        mtp_loss=mtp_loss,
        aux_loss=aux,
        z_loss=z,
        load=jnp.concatenate([report.load for report in reports]) if reports else jnp.zeros((0, 1), jnp.int32),
        dropped=sum((report.dropped.sum() for report in reports), jnp.zeros((), jnp.int32)),
    )
    return loss + mtp_loss + aux + z, losses


def held_out_loss(
    params: Params, batch: Batch, config: ModelConfig, execution: ModelExecution, mesh: AnyMesh | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum the cross-entropy of a batch, and count its targets."""
    out = decode(
        params,
        batch.ids,
        config,
        execution,
        mask=batch.segments >= 0,
        segments=batch.segments,
        positions=batch.positions,
        key=jax.random.key(0) if config.moe.router.selection == "random" else None,
        mesh=mesh,
    )
    return _cross_entropy(params, out.hidden, batch.targets, batch.weights, config, mesh), batch.weights.sum()


def _cross_entropy(
    params: Params,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    config: ModelConfig,
    mesh: AnyMesh | None,
) -> Any:
    head = params["embedding" if config.tied_embeddings else "head"]
    rows = hidden.reshape(-1, hidden.shape[-1])
    with jax.named_scope("cross_entropy"):
        return cross_entropy_sum(rows, head, targets.reshape(-1), weights.reshape(-1), mesh)


def _router_losses(report: ExpertReport | None, weights: MicroBatchWeights, index: int) -> tuple[jax.Array, jax.Array]:
    """Return the auxiliary and the z-loss of a micro-batch's layers, as parts of the batch's."""
    if report is None:
        return jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    return report.aux_loss.sum() * weights.of_sequences[index], report.z_loss.sum() * weights.of_tokens[index]


def mtp_weights(batch: Batch, module: int) -> Float[Array, "B S"]:
    """Weigh the targets of a module: it has one where it knows the token that it joins, and there is one after that."""
    ahead = jnp.roll(batch.weights, -(module + 1), axis=1)
    return jnp.where(mtp_mask(batch.segments, module), ahead, 0)


def micro_batch_weights(micro: Batch, config: ResolvedStep) -> MicroBatchWeights:
    """Compute what each micro-batch, in the leading dimension, counts for in the batch."""
    masks = [micro.segments >= 0]
    targets = [micro.weights]
    for m in range(config.mtp_layers):
        masks.append(jax.vmap(lambda segments, m=m: mtp_mask(segments, m))(micro.segments))
        targets.append(jax.vmap(lambda part, m=m: mtp_weights(part, m))(micro))

    def share(counts: jax.Array) -> jax.Array:
        return counts / jnp.maximum(counts.sum(), 1)

    further = sum((weights.sum() for weights in targets[1:]), jnp.zeros(()))
    totals = [micro.weights.sum(), *[further] * config.mtp_layers]
    per_target = jnp.stack([1 / jnp.maximum(total, 1) for total in totals])
    return MicroBatchWeights(
        per_target=jnp.broadcast_to(per_target, (config.micro_batches, len(targets))),
        of_tokens=jnp.stack([share(mask.sum((1, 2)).astype(jnp.float32)) for mask in masks], axis=1),
        of_sequences=jnp.stack([share(mask.any(2).sum(1).astype(jnp.float32)) for mask in masks], axis=1),
    )


def update_biases(biases: Params, load: Int[Array, "layers E"], config: ResolvedStep) -> Params:
    """Move the selection biases once, by the load of the whole batch."""
    if not config.losses.selection_bias_rate:
        return biases
    rule = jax.vmap(lambda bias, load: update_selection_bias(bias, load, config.losses.selection_bias_rate))
    moved = dict(biases)
    for name, rows in layers_of_biases(config).items():
        if name in biases:
            layer_loads = load[jnp.asarray(rows)]
            moved[name] = (
                rule(biases[name], layer_loads)
                if name.startswith("stacks.")
                else rule(biases[name][None], layer_loads)[0]
            )
    return moved


def layers_of_biases(config: ResolvedStep) -> dict[str, list[int]]:
    """List the rows of `Losses.load` that are of each selection bias's layers, by the bias's name."""
    rows_of_biases, first = {}, 0
    for s, stack in enumerate(config.model.stacks):
        with_experts = [p for p, kind in enumerate(stack.kinds) if kind.moe]
        for place, p in enumerate(with_experts):
            rows = [first + repeat * len(with_experts) + place for repeat in range(stack.repeats)]
            rows_of_biases[f"stacks.{s}.{p}.moe.router_selection_bias"] = rows
        first += stack.repeats * len(with_experts)
    for m in range(config.mtp_layers):
        rows_of_biases[f"mtp.{m}.moe.router_selection_bias"] = [first + m]
    return rows_of_biases
