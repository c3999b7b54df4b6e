"""AdamW as an optax chain: the schedule, clipping, and which parameters decay."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax import lax

from raggedmoe.models.specs import is_trained
from raggedmoe.names import unknown
from raggedmoe.params import Specs
from raggedmoe.train.keys import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters learn."""

    steps: int  # of the whole run, which the schedule spans
    learning_rate: float = 3e-3  # at its highest
    schedule: str = "cosine"  # after the warm-up: a cosine down, "wsd" (stable, then a linear decay), or "constant"
    warmup_steps: int = 10
    decay_fraction: float = 0.2  # of the steps, that "wsd" decays over
    final_fraction: float = 0.1  # of the learning rate, that is left at the end
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # of matrices; norms and biases do not decay
    clip_norm: float | None = 1.0  # gradients longer than this are shortened to it; None: never
    grad_dtype: str = "float32"  # to which gradients are rounded before they are used
    mu_dtype: str = "float32"  # of Adam's mean of gradients

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        if self.steps < 1:
            raise ValueError(f"expected steps >= 1, got {self.steps}")
        if not 0 <= self.warmup_steps < self.steps and self.warmup_steps:
            raise ValueError(
                f"expected 0 <= warmup_steps < steps={self.steps}, got {self.warmup_steps}: the learning rate would "
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
        if self.weight_decay < 0:
            raise ValueError(f"expected weight_decay >= 0, got {self.weight_decay}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"expected clip_norm > 0, or None for no clipping, got {self.clip_norm}")
        if self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and decay_fraction={self.decay_fraction} ({self.decay_steps} steps) "
                f"together are more than steps={self.steps}; use less of either"
            )

    @property
    def decay_steps(self) -> int:
        """Steps that "wsd" decays over."""
        return max(1, round(self.decay_fraction * self.steps))


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate of each step, counted from 0: 1/n of the peak at the first of n warm-up steps, what is to be
    left at the last of all.
    """
    peak, last = config.learning_rate, config.learning_rate * config.final_fraction
    after = config.steps - config.warmup_steps
    if config.schedule == "constant" or after == 1:
        rest = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        rest = optax.cosine_decay_schedule(peak, after - 1, alpha=config.final_fraction)
    else:
        decay = min(config.decay_steps, after - 1)
        rest = optax.linear_schedule(peak, last, decay, after - 1 - decay)
    if not config.warmup_steps:
        return rest
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, rest], [config.warmup_steps])


def decays(specs: Specs) -> dict[str, bool]:
    """Which trained parameters decay: those that a matmul sums over. Norms, biases and sinks do not."""
    return {name: spec.contracts is not None for name, spec in specs.items() if is_trained(name)}


def make_optimizer(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Clipping and AdamW over the trained parameters, by name.

    Moments are float32, or float64 for such parameters; the first is ``mu_dtype`` if that is narrower.
    """
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    adam = optax.adamw(
        learning_rate_schedule(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decays(specs),
        mu_dtype=None if config.mu_dtype == "float32" else config.mu_dtype,
    )
    return optax.chain(clip, adam)


def wide(gradient: jax.Array) -> jax.Array:
    """A gradient in float32 at least, in which moments and sums over micro-batches are kept."""
    return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))


def rounded(gradient: jax.Array, dtype: str) -> jax.Array:
    """A gradient with the precision of ``grad_dtype``. XLA may undo a cast there and back, but not this."""
    if dtype == "float32":
        return gradient
    info = jnp.finfo(dtype)
    return lax.reduce_precision(gradient, info.nexp, info.nmant)
