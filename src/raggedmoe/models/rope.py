"""Rotary positions: plain, interleaved, and YaRN."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.models.config import RopeConfig, YarnConfig

RopeCosSin = tuple[Float[Array, "_ S P"], Float[Array, "_ S P"]]  # cos and sin of each pair's angle, P = H/2 pairs


def inverse_frequencies(config: RopeConfig, dim: int) -> np.ndarray:
    """Compute the radians per position of each of the ``dim / 2`` pairs, in float64."""
    frequencies = config.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.yarn is None:
        return frequencies
    low, high = _blend_range(config.yarn, config.theta, dim)
    slowed = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return frequencies * (1 - slowed) + frequencies / config.yarn.factor * slowed


def _blend_range(yarn: YarnConfig, theta: float, dim: int) -> tuple[float, float]:
    """Find the pairs between which YaRN blends: they turn beta_fast and beta_slow times over the original length."""

    def pair(turns: float) -> float:
        return dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    return low, high if high != low else high + 0.001


def rope_cos_sin(config: RopeConfig, dim: int, positions: Int[Array, "B S"], dtype: Any = jnp.float32) -> RopeCosSin:
    """Compute cosine and sine for each position, in float32 at least: once, as all layers use the same."""
    wide = accumulator(dtype)
    angles = positions[:, :, None].astype(wide) * jnp.asarray(inverse_frequencies(config, dim), wide)[None, None, :]
    yarn = config.yarn
    length = 1.0 if yarn is None else yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)
    return jnp.cos(angles) * length, jnp.sin(angles) * length


def apply_rope(x: Float[Array, "B S N H"], cos_sin: RopeCosSin, interleaved: bool) -> Float[Array, "B S N H"]:
    """Rotate every pair of a head by its angle, in float32 at least."""
    cos, sin = (part[:, :, None, :] for part in cos_sin)
    wide = x.astype(accumulator(x.dtype))
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    out = jnp.stack(pair, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return out.astype(x.dtype)
