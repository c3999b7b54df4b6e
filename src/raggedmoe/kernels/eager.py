"""What is called outside of jit, compiled all the same, and once."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import ad, partial_eval

from raggedmoe.hardware import target_hardware
from raggedmoe.kernels.registry import is_recording


def compile_once(
    function: Callable[..., Any], static: tuple[str, ...], check: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """Make ``function`` one program where it is called outside of jit.

    Loops and stages in it, made anew at every call, would otherwise be compiled anew. In another's jit it is the
    function itself, so that this program stays as it is.

    ``static``: the names of its arguments that are no arrays.
    ``check``: what to call with its arguments first, while arrays have values that can be looked at.
    """
    jitted, signature = jax.jit(function, static_argnames=static), inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if check is not None:
            check(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        arrays = jax.tree.leaves([value for name, value in arguments.items() if name not in static])
        # A program is chosen for the default device, so not for arrays that are elsewhere; and it is chosen once.
        elsewhere = target_hardware(arrays=arrays) != target_hardware()
        plain = is_recording() or elsewhere or any(map(_is_traced, arrays))
        return (function if plain else jitted)(*args, **kwargs)

    return call


def _is_traced(array: Any) -> bool:
    """Say whether an array is of another's jit, or of forward mode, which the operations refuse if they see it."""
    while isinstance(array, jax.core.Tracer):
        if isinstance(array, partial_eval.DynamicJaxprTracer | ad.JVPTracer):
            return True
        array = getattr(array, "primal", getattr(array, "val", None))
    return False
