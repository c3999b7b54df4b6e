"""The optimizer, AdamW as an optax chain: its schedule, clipping, and which parameters decay."""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax import lax

from raggedmoe.models.parameters import is_trained
from raggedmoe.names import unknown
from raggedmoe.params import Specs
from raggedmoe.train.settings.keys import DECAY_STYLES, SCHEDULES, WARMUP_STARTS, WEIGHT_DECAY_TARGETS

CHOICES = {
    "schedule": SCHEDULES,
    "warmup_from": WARMUP_STARTS,
    "decay_style": DECAY_STYLES,
    "weight_decay_of": WEIGHT_DECAY_TARGETS,
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The settings of AdamW and its schedule."""

    steps: int  # steps of the schedule, after which the learning rate is 0
    learning_rate: float = 3e-3  # the peak of the schedule
    schedule: str = "cosine"  # after the warm-up: a cosine down, "wsd" (stable, then a decay), or "constant"
    warmup_steps: int = 10
    warmup_from: str = "first"  # step i of n warm-up steps, from 0, has (i + 1)/n of the peak, or i/n with "zero"
    decay_style: str = "linear"  # how "wsd" decays: "linear" or "cosine"
    decay_fraction: float = 0.2  # share of the steps over which "wsd" decays
    final_fraction: float = 0.1  # the final learning rate as a share of the peak
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8  # added outside the square root
    epsilon_root: float = 0.0  # added inside the square root
    weight_decay: float = 0.1
    weight_decay_of: str = "matrices"  # "matrices", without norms and biases, or "all" trained parameters
    clip_norm: float | None = 1.0  # the largest global norm of gradients; None: no clipping
    grad_dtype: str = "float32"  # the type to which gradients are rounded before they are clipped
    mu_dtype: str = "float32"  # the type of Adam's first moment

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if self.steps < 1:
            raise ValueError(f"expected steps >= 1, got {self.steps}")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"expected 0 <= warmup_steps <= steps={self.steps}, got {self.warmup_steps}: the learning rate would "
                "never reach its peak; use fewer warm-up steps or more steps"
            )
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"expected 0 <= {name} <= 1, got {getattr(self, name)}")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected 0 <= {name} < 1, got {getattr(self, name)}")
        for name in ("learning_rate", "epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        for name in ("weight_decay", "epsilon_root"):
            if getattr(self, name) < 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"expected clip_norm > 0, or None for no clipping, got {self.clip_norm}")
        if self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and decay_fraction={self.decay_fraction} ({self.decay_steps} steps) "
                f"together are more than steps={self.steps}; use less of either"
            )

    @property
    def decay_steps(self) -> int:
        """Steps over which "wsd" decays."""
        return int(self.decay_fraction * self.steps)


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Make the schedule of the learning rate, with steps counted from 0.

    It rises to the peak in the warm-up, stays there or decays to ``final_fraction`` of it at the last step, which "wsd"
    does in its last ``decay_steps``, and is 0 after that.
    """
    warmup, remaining = config.warmup_steps, config.steps - config.warmup_steps
    decay = {"cosine": remaining, "wsd": config.decay_steps, "constant": 0}[config.schedule]
    style = "cosine" if config.schedule == "cosine" else config.decay_style
    stable = optax.constant_schedule(config.learning_rate)
    parts = [(warmup, _warmup(config)), (remaining - decay, stable), (decay, _decay(config, decay, style))]
    parts = [(num_steps, schedule) for num_steps, schedule in parts if num_steps]
    ends = list(itertools.accumulate(num_steps for num_steps, _ in parts))
    return optax.join_schedules([*(schedule for _, schedule in parts), optax.constant_schedule(0.0)], ends)


def _warmup(config: OptimizerConfig) -> optax.Schedule:
    peak, num_steps = config.learning_rate, max(config.warmup_steps, 1)
    if config.warmup_from == "zero":
        return optax.linear_schedule(0.0, peak, num_steps)
    return optax.linear_schedule(peak / num_steps, peak, max(num_steps - 1, 1))


def _decay(config: OptimizerConfig, num_steps: int, style: str) -> optax.Schedule:
    """Make the decay from the peak at the first of these steps to the final learning rate at the last.

    A single step has MaxText's learning rate: the peak if the decay is linear, the final one if it is a cosine.
    """
    peak, last = config.learning_rate, config.learning_rate * config.final_fraction
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
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    adam = optax.adamw(
        learning_rate_schedule(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        eps_root=config.epsilon_root,
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
