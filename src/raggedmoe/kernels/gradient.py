"""How an operation gets its gradient: reverse mode of any order, and no forward mode."""

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import ad


def with_gradient(value: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Give ``value(static, *arrays)`` its gradient, from the two rules of a `jax.custom_vjp`; ``static`` is hashable.

    The rules call the result, not ``value``, so that they can be differentiated in turn. It is jitted, so that a call
    outside of jit is compiled once, and not whenever its loops are made anew. In another's jit it is inline: the
    program is as it would be without.
    """
    function = jax.custom_vjp(value, nondiff_argnums=(0,))
    function.defvjp(forward, backward)
    return jax.jit(function, static_argnums=0, inline=True)


def refuse_forward_mode(operation: str, *arrays: Any) -> None:
    """Say that an operation has no forward mode, where one of its arguments is being differentiated so."""
    if not jax.config.values["jax_use_direct_linearize"]:  # then reverse mode begins with the same tracers
        return
    for array in jax.tree.leaves(arrays):
        while isinstance(array, jax.core.Tracer):
            if isinstance(array, ad.JVPTracer):
                raise NotImplementedError(
                    f"{operation} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.hessian); use reverse mode, "
                    "of any order: jax.grad, jax.vjp, jax.jacrev, and jax.grad of jax.grad"
                )
            array = getattr(array, "primal", getattr(array, "val", None))
