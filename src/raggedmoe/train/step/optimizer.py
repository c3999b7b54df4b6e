"""The optimizer, AdamW as an optax chain: its schedule, clipping, and which parameters decay."""

import itertools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from raggedmoe.models.parameters import is_trained
from raggedmoe.params import Specs
from raggedmoe.train.settings.sections import OptimizerConfig


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
    peak, last = config.peak_learning_rate, config.peak_learning_rate * config.final_fraction
    if num_steps <= 1:
        return optax.constant_schedule(last if style == "cosine" else peak)
    if style == "cosine":
        return optax.cosine_decay_schedule(peak, num_steps - 1, alpha=config.final_fraction)
    return optax.linear_schedule(peak, last, num_steps - 1)


def decay_mask(specs: Specs, which: str = "matrices") -> dict[str, bool]:
    """Tell which trained parameters decay: weights of matmuls, not norms, biases and sinks; or all."""
    trained = {name: spec for name, spec in specs.items() if is_trained(name)}
    return {name: which == "all" or spec.contracts is not None for name, spec in trained.items()}


def make_optimizer(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Make the optimizer of the trained parameters, by name: clipping and AdamW.

    Moments are float32, or float64 for parameters of that type; the first is ``mu_dtype`` if that is narrower.
    """
    largest = config.gradient_clipping_threshold
    clip = optax.clip_by_global_norm(largest) if largest else optax.identity()
    adam = optax.adamw(
        learning_rate_schedule(config),
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        eps_root=config.adam_eps_root,
        weight_decay=config.weight_decay,
        mask=decay_mask(specs, config.weight_decay_of),
        mu_dtype=None if config.mu_dtype == "float32" else config.mu_dtype,
    )
    return optax.chain(clip, adam)


def widen_to_float32(gradient: jax.Array) -> jax.Array:
    """Cast a gradient to float32 at least, the type of moments and of sums over micro-batches."""
    return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))


def round_to_dtype(gradient: jax.Array, dtype: str) -> jax.Array:
    """Round a gradient to the precision of ``grad_dtype``. XLA may remove a cast there and back, but not this."""
    if dtype == "float32":
        return gradient
    info = jnp.finfo(dtype)
    return lax.reduce_precision(gradient, info.nexp, info.nmant)
