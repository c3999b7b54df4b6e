"""The named example calls of an operation: what one is, and how its arrays are drawn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Example:
    """Arguments of one call of an operation, and a cotangent for its result."""

    arrays: Mapping[str, Any]  # by the operation's argument names; floating ones are differentiable
    options: Mapping[str, Any]  # static arguments
    cotangent: Any
    flops: int  # useful ones, forward


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A named example call. Its arrays are drawn from a seed, for a given dtype."""

    name: str
    make: Callable[[np.random.Generator, Any], Example]
    large: bool = False  # of a real model's size: for speed, and for `raggedmoe verify`, not for every test run

    def example(self, dtype: Any, seed: int = 0) -> Example:
        return self.make(np.random.default_rng(seed), jnp.dtype(dtype))


# Arrays are made by NumPy and put on the device: operations of JAX would be a small program for every shape and type.
def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Normal values with that standard deviation."""
    return jax.device_put((rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)).astype(dtype))


def integers(values: Any) -> jax.Array:
    """The values as int32."""
    return jax.device_put(np.asarray(values, np.int32))


def replaced(array: jax.Array, where: np.ndarray, value: float) -> jax.Array:
    """The array with a value in some of its places."""
    return jax.device_put(np.where(where, np.asarray(value, array.dtype), np.asarray(array)))


def poisoned(array: jax.Array, keep: np.ndarray) -> jax.Array:
    """The array with NaN in every row that is not kept: what an implementation must not let through."""
    return replaced(array, ~keep.reshape(-1, *[1] * (array.ndim - 1)), np.nan)


def routing(rng: np.random.Generator, num_tokens: int, num_experts: int, per_token: int) -> np.ndarray:
    """For each token, different experts, drawn unevenly: expert e about as likely as 1/(e + 1)."""
    scores = rng.gumbel(size=(num_tokens, num_experts)) - np.log1p(np.arange(num_experts))
    return np.argsort(-scores, axis=1)[:, :per_token]
