"""The value and the gradients of a call whose arguments have names: what is verified, timed, compiled and tested."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.kernels.qarray import QArray


def differentiable(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments of a call whose leaves are all floating, and the floating scales of quantised ones."""
    parts = {name: array.scale if isinstance(array, QArray) else array for name, array in arrays.items()}
    return {name: part for name, part in parts.items() if part is not None and _is_floating(part)}


def _with_parts(arrays: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Put arguments, or scales of quantised ones, in the place of those that `differentiable` selected."""
    whole = {name: arrays[name] for name in parts}
    return {**arrays} | {
        name: replace(whole[name], scale=part) if isinstance(whole[name], QArray) else part
        for name, part in parts.items()
    }


def _is_floating(array: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(array))


def value_and_pullback(
    function: Callable[..., Any], primals: tuple[Any, ...], cotangent: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Compute ``function(*primals)``, and the gradient of each of its arguments for a cotangent of its result."""
    value, vjp = jax.vjp(function, *primals)
    return value, vjp(cotangent.astype(value.dtype))  # a value of the wrong type is for `verify` to report


def _named_pullback(
    function: Callable[..., Any], arrays: Mapping[str, Any], cotangent: Any, of: str | None
) -> tuple[Any, dict[str, Any]]:
    floating = {name: array for name, array in differentiable(arrays).items() if of in (None, name)}
    value, (gradients,) = value_and_pullback(
        lambda floating: function(**_with_parts(arrays, floating)), (floating,), cotangent
    )
    return value, gradients


def gradients(
    function: Callable[..., Any], arrays: Mapping[str, Any], cotangent: Any, of: str | None = None
) -> dict[str, Any]:
    """Compute the gradient of every floating argument, or of the argument ``of`` alone.

    The value and the other gradients are not returned, so the compiler leaves out what only they need.
    """
    return _named_pullback(function, arrays, cotangent, of)[1]


def value_and_gradients(function: Callable[..., Any], arrays: Mapping[str, Any], cotangent: Any) -> dict[str, Any]:
    """Compute the result, named "value", and each leaf of the gradients, named "d" and the argument: "dbiases.wo"."""
    value, gradients = _named_pullback(function, arrays, cotangent, None)
    named = {"value": value}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        named[
            "d"
            + "".join(str(getattr(part, "key", getattr(part, "name", ""))) for part in path[:1])
            + "".join("." + str(getattr(part, "name", part)) for part in path[1:])
        ] = leaf
    return named


@functools.partial(jax.jit, static_argnums=(0, 1))
def jitted_value_and_gradients(
    function: Callable[..., Any], options: tuple[tuple[str, Any], ...], arrays: Mapping[str, Any], cotangent: Any
) -> dict[str, Any]:
    """Compute what `value_and_gradients` does, but compiled, once for each function with its static options."""
    return value_and_gradients(functools.partial(function, **dict(options)), arrays, cotangent)
