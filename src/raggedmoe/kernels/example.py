"""The named example calls of an operation: what one is, and how its arrays are drawn."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.quantize import LARGEST


@dataclass(frozen=True, kw_only=True)
class Example:
    """Arguments of one call of an operation, and a cotangent for its result."""

    # By the operation's argument names. Floating ones are differentiable, and of a `QArray` its floating scale is.
    arrays: Mapping[str, Any]
    options: Mapping[str, Any]  # static arguments
    cotangent: Any
    flops: int  # useful ones, forward


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A named example call. Its arrays are drawn from a seed, for a given dtype."""

    name: str
    make: Callable[[np.random.Generator, Any], Example]
    large: bool = False  # of a real model's size: for speed, and for `raggedmoe verify`, not for every test run
    formats: tuple[str, ...] = ()  # of its quantised operands

    def example(self, dtype: Any, seed: int = 0) -> Example:
        return self.make(np.random.default_rng(seed), jnp.dtype(dtype))


def make_spec(
    make: Callable[..., Example], name: str, *, large: bool = False, formats: tuple[str, ...] = (), **sizes: Any
) -> Spec:
    """Name the example call that ``make(rng, dtype, **sizes)`` draws."""
    return Spec(name=name, make=functools.partial(make, **sizes), large=large, formats=formats)


# Arrays are made by NumPy and put on the device: operations of JAX would be a small program for every shape and type.
def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Draw normal values with that standard deviation."""
    return jax.device_put((rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)).astype(dtype))


def draw_quantized(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    qtype: str,
    blocks: tuple[int, ...],
    idle: np.ndarray,
    size: float = 1.0,
) -> QArray:
    """Draw values of about that size, stored with a scale for each block; ``idle`` marks whose scales are poisoned.

    ``blocks`` says how much of each dimension shares a scale, 0 being all of it. The values are in the form in which
    kernels read them: int8, or bits in uint8, which have no gradient. mxfp4 has shared exponents, the others float32.
    """
    scale_shape = tuple(num // (block or num) for num, block in zip(shape, blocks))
    unused = idle.reshape(-1, *[1] * (len(shape) - 1))
    if qtype == "mxfp4":
        codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
        exponents = rng.integers(-1, 2, scale_shape) + 126 + round(float(np.log2(size)))
        return QArray(
            jax.device_put(codes), jax.device_put(np.where(unused, 255, exponents).astype(np.uint8)), None, qtype
        )
    # Normal values of which one in a hundred is the largest of the format.
    values = np.clip(rng.standard_normal(shape, np.float32) * (LARGEST[qtype] / 2.5), -LARGEST[qtype], LARGEST[qtype])
    codes = (
        np.rint(values).astype(np.int8) if qtype == "int8" else values.astype(getattr(ml_dtypes, qtype)).view(np.uint8)
    )
    scale = rng.uniform(0.5, 2, scale_shape) * size * 2.5 / LARGEST[qtype]
    return QArray(
        jax.device_put(codes), jax.device_put(np.where(unused, np.nan, scale).astype(np.float32)), None, qtype
    )


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
    rng: np.random.Generator,
    *,
    tokens: int,
    experts: int,
    per_token: int,
    start: int | None = None,
    end: int | None = None,
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
