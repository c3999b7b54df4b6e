"""The named example calls of an operation: what one is, and how its arrays are drawn."""

import functools
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


def make_spec(make: Callable[..., Example], name: str, *, large: bool = False, **sizes: Any) -> Spec:
    """Name the example call that ``make(rng, dtype, **sizes)`` draws."""
    return Spec(name=name, make=functools.partial(make, **sizes), large=large)


# Arrays are made by NumPy and put on the device: operations of JAX would be a small program for every shape and type.
def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Draw normal values with that standard deviation."""
    return jax.device_put((rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)).astype(dtype))


def integers(values: Any) -> jax.Array:
    """Put the values on the device as int32."""
    return jax.device_put(np.asarray(values, np.int32))


def replace_values(array: jax.Array, where: np.ndarray, value: float) -> jax.Array:
    """Write a value to some elements of an array."""
    return jax.device_put(np.where(where, np.asarray(value, array.dtype), np.asarray(array)))


def poison_rows(array: jax.Array, keep: np.ndarray) -> jax.Array:
    """Write NaN, which an implementation must not let through, to every row that is not kept."""
    return replace_values(array, ~keep.reshape(-1, *[1] * (array.ndim - 1)), np.nan)


def routing(rng: np.random.Generator, num_tokens: int, num_experts: int, per_token: int) -> np.ndarray:
    """Draw different experts for each token, unevenly: expert e is about as likely as 1/(e + 1)."""
    scores = rng.gumbel(size=(num_tokens, num_experts)) - np.log1p(np.arange(num_experts))
    return np.argsort(-scores, axis=1)[:, :per_token]


def draw_group_sizes(rng: np.random.Generator, num_rows: int, num_groups: int) -> tuple[int, ...]:
    """Draw a group for each row, all equally likely, and count the rows of each."""
    counts = np.bincount(rng.integers(0, num_groups, num_rows), minlength=num_groups)
    return tuple(int(size) for size in counts)


@dataclass(frozen=True, kw_only=True)
class RoutedRows:
    """Tokens fanned out to rows in the order of their experts, of which those in a range are valid."""

    slots: np.ndarray  # [R], the slot t·K + k that each row serves
    rows: np.ndarray  # [T K], the row that serves each slot
    valid: np.ndarray  # [R]
    range: Mapping[str, jax.Array]  # those of the arguments ``start`` and ``end`` that are given


def draw_routed_rows(
    rng: np.random.Generator, tokens: int, experts: int, per_token: int, start: int | None, end: int | None
) -> RoutedRows:
    """Draw experts for each token by `routing`, and sort the slots by them."""
    slots = np.argsort(routing(rng, tokens, experts, per_token).reshape(-1), kind="stable")
    row = np.arange(slots.size)
    return RoutedRows(
        slots=slots,
        rows=np.argsort(slots).reshape(tokens, per_token),
        valid=(row >= (start or 0)) & (row < (slots.size if end is None else end)),
        range={name: integers(row) for name, row in (("start", start), ("end", end)) if row is not None},
    )
