"""One implementation against the reference: the value and every gradient of one example, within a derived bound.

The bound is the operation's own: `bound.py` in its folder derives it.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.catalog import Operation
from raggedmoe.kernels.example import Example, Spec
from raggedmoe.kernels.registry import CannotRunError, implementations
from raggedmoe.kernels.value_and_gradients import jitted_value_and_gradients


@dataclass(frozen=True, kw_only=True)
class Check:
    """One compared quantity."""

    operation: str
    implementation: str
    spec: str
    dtype: str
    quantity: str  # "value", or "d" and the argument's name
    error: float  # the difference where it is the largest share of its bound
    bound: float  # the bound there
    share: float  # that share
    problem: str | None  # what else is wrong
    formats: tuple[str, ...] = ()  # of the quantised operands

    @property
    def passed(self) -> bool:
        return self.problem is None and self.share <= 1


def runnable(operation: Operation, example: Example) -> list[str]:
    """List the implementations, but for the reference, that accept the call on this machine in both directions."""
    hardware = target_hardware()

    def accepts(name: str) -> bool:
        call = functools.partial(operation.function, **example.options, implementation=name, hardware=hardware)
        try:
            jax.eval_shape(lambda arrays: call(**arrays), dict(example.arrays))
        except CannotRunError:  # its reason is in the log
            return False
        return True

    return [name for name in implementations(operation.name) if name != "reference" and accepts(name)]


def check(
    operation: Operation, names: list[str] | None, spec: Spec, dtype: Any, hardware: Hardware | None = None
) -> Iterator[Check]:
    """Compare implementations (None: all that run here) with the reference on one spec: one `Check` a quantity.

    A kernel for another chip than this machine's can be named with that ``hardware``, in TPU interpret mode.
    """
    example = spec.example(dtype)
    names = runnable(operation, example) if names is None else names
    options = dict(example.options)

    def run(name: str) -> dict[str, Any]:
        static = (*options.items(), ("implementation", name), ("hardware", hardware))
        return jitted_value_and_gradients(operation.function, static, dict(example.arrays), example.cotangent)

    reference = run("reference")
    bounds = operation.error_bounds(example, reference)
    for name in names:
        try:
            result = run(name)
        except Exception as error:  # a kernel that crashes has failed; the others are still to be checked
            yield Check(
                operation=operation.name,
                implementation=name,
                spec=spec.name,
                dtype=str(jnp.dtype(dtype)),
                quantity="value",
                error=float("inf"),
                bound=0.0,
                share=float("inf"),
                problem=f"{type(error).__name__}: {error}",
                formats=spec.formats,
            )
            continue
        for quantity, expected in reference.items():
            bound = bounds[quantity]
            difference = np.abs(np.asarray(result[quantity], np.float64) - np.asarray(expected, np.float64))
            share = np.divide(difference, bound, out=np.where(difference == 0, 0.0, np.inf), where=bound > 0)
            worst = int(np.argmax(np.nan_to_num(share, nan=np.inf)))
            problem = None
            if result[quantity].dtype != expected.dtype:
                problem = f"expected type {expected.dtype}, got {result[quantity].dtype}"
            elif not np.isfinite(difference).all():
                problem = "not finite"
            yield Check(
                operation=operation.name,
                implementation=name,
                spec=spec.name,
                dtype=str(jnp.dtype(dtype)),
                quantity=quantity,
                error=float(difference.flat[worst]),
                bound=float(bound.flat[worst]),
                share=float(share.flat[worst]),
                problem=problem,
                formats=spec.formats,
            )
