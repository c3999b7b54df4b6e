"""The optimizer as an optax chain, AdamW or Muon with AdamW: schedule, clipping, and which parameters decay."""

import itertools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from raggedmoe.params import Specs
from raggedmoe.sharding.axes import AnyMesh, logical_mesh
from raggedmoe.train.settings.sections import OptimizerConfig
from raggedmoe.train.step.muon import scale_by_muon, takes_muon


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Make the schedule of the learning rate, with steps counted from 0.

    It rises to the peak in the warm-up, stays there or decays to ``final_fraction`` of it at the last step, which "wsd"
    does in its last ``decay_steps``, and is 0 after that.
    """
    warmup, remaining = config.num_warmup_steps, config.num_steps - config.num_warmup_steps
    decay = {"cosine": remaining, "wsd": config.decay_steps, "constant": 0}[config.schedule]
    style = "cosine" if config.schedule == "cosine" else config.decay_style
    stable = optax.constant_schedule(config.peak_learning_rate)
    parts = [(warmup, _warmup(config)), (remaining - decay, stable), (decay, _decay(config, decay, style))]
    parts = [(num_steps, schedule) for num_steps, schedule in parts if num_steps]
    ends = list(itertools.accumulate(num_steps for num_steps, _ in parts))
    return optax.join_schedules([*(schedule for _, schedule in parts), optax.constant_schedule(0.0)], ends)


def _warmup(config: OptimizerConfig) -> optax.Schedule:
    peak, num_steps = config.peak_learning_rate, max(config.num_warmup_steps, 1)
    if config.warmup_from == "zero":
        return optax.linear_schedule(0.0, peak, num_steps)
    return optax.linear_schedule(peak / num_steps, peak, max(num_steps - 1, 1))


def _decay(config: OptimizerConfig, num_steps: int, style: str) -> optax.Schedule:
    """Make the decay from the peak at the first of these steps to the final learning rate at the last.

    A single step has MaxText's learning rate: the peak if the decay is linear, the final one if it is a cosine.
    """
    peak, last = config.peak_learning_rate, config.peak_learning_rate * config.final_share
    if num_steps <= 1:
        return optax.constant_schedule(last if style == "cosine" else peak)
    if style == "cosine":
        return optax.cosine_decay_schedule(peak, num_steps - 1, alpha=config.final_share)
    return optax.linear_schedule(peak, last, num_steps - 1)


def decay_mask(specs: Specs, which: str = "matrices") -> dict[str, bool]:
    """Tell which trained parameters decay: weights of matmuls, not norms, biases and sinks; or all."""
    trained = {name: spec for name, spec in specs.items() if spec.trained}
    return {name: which == "all" or spec.contracts is not None for name, spec in trained.items()}


def make_optimizer(config: OptimizerConfig, specs: Specs, mesh: AnyMesh | None = None) -> optax.GradientTransformation:
    """Make the optimizer of the trained parameters, by name: clipping, then AdamW, or Muon for those that it takes.

    Moments are float32, or float64 for parameters of that type; the first is ``mu_dtype`` if that is narrower. A mesh
    splits what Muon computes: with or without it the result is the same.
    """
    largest = config.gradient_clipping_threshold
    clip = _clip_by_global_norm(largest) if largest else optax.identity()
    if config.opt_type == "adamw":
        return optax.chain(clip, _adamw(config, specs))
    labels = {name: "muon" if takes_muon(name, spec) else "adamw" for name, spec in specs.items() if spec.trained}
    others = {name: spec for name, spec in specs.items() if labels.get(name) == "adamw"}
    decay = config.weight_decay if config.muon_weight_decay is None else config.muon_weight_decay
    muon = optax.chain(
        scale_by_muon(config, specs, logical_mesh(mesh)),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(learning_rate_schedule(config)),
    )
    return optax.chain(clip, optax.partition({"muon": muon, "adamw": _adamw(config, others)}, labels))


def _clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """Scale all gradients to this norm where theirs is larger, as `optax.clip_by_global_norm` does.

    By one factor: XLA computes the product anew wherever it is read, where it writes optax's quotients to memory first.
    """

    def update(
        gradients: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        norm = optax.tree.norm(gradients)
        factor = jnp.where(norm > largest, largest / norm, 1.0)
        return jax.tree.map(lambda gradient: gradient * factor.astype(gradient.dtype), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _adamw(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    decays = decay_mask(specs, config.weight_decay_of)
    return optax.adamw(
        learning_rate_schedule(config),
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        eps_root=config.adam_eps_root,
        weight_decay=config.weight_decay,
        mask=lambda params: {name: decays.get(name, value) for name, value in params.items()},  # others are masked
        mu_dtype=None if config.mu_dtype == "float32" else config.mu_dtype,
    )


def widen_to_float32(gradient: jax.Array) -> jax.Array:
    """Cast a gradient to float32 at least, the type of moments and of sums over micro-batches."""
    return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))


def round_to_dtype(gradient: jax.Array, dtype: str) -> jax.Array:
    """Round a gradient to the precision of ``grad_dtype``. XLA may remove a cast there and back, but not this."""
    if dtype == "float32":
        return gradient
    info = jnp.finfo(dtype)
    return lax.reduce_precision(gradient, info.nexp, info.nmant)
