"""One implementation against the reference: the value and every gradient of one example, within a derived bound.

The bound of a sum is ``eps(result) · |result| + SUM_ROUNDINGS · eps(accumulator) · Σ|terms|``: the two roundings of the
result to its type, and the roundings of the sum, whose error grows like ``eps · sqrt(n) · |partial sums|``, about
``eps · Σ|terms|``. ``Σ|terms|`` is the reference itself on the absolute values of the inputs, so no length or scale is
guessed. The fused FFN rounds its hidden activations as well: there the bound is ``FFN_ROUNDINGS · eps(input)`` times
the same network on absolute values, with the activation replaced by a polynomial that bounds it, its slope and its
curvature. Attention rounds its scores before an exponential: `attention_bound` says what follows from that.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.catalog import Operation
from raggedmoe.kernels.example import Example, Spec
from raggedmoe.kernels.expert_ffn import reference as expert_ffn_reference
from raggedmoe.kernels.expert_ffn.api import ExpertWeights
from raggedmoe.kernels.grouped_matmul.api import group_bounds
from raggedmoe.kernels.registry import CannotRunError, implementations
from raggedmoe.verify.attention_bound import SUM_ROUNDINGS, attention_bounds

FFN_ROUNDINGS = 1


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

    @property
    def passed(self) -> bool:
        return self.problem is None and self.share <= 1


def value_and_gradients(function: Any, arrays: dict[str, Any], cotangent: Any) -> dict[str, Any]:
    """The result, and the gradient of every floating argument (leaf by leaf), by name."""
    floating = {
        name: array
        for name, array in arrays.items()
        if all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(array)) and array is not None
    }
    rest = {name: array for name, array in arrays.items() if name not in floating}
    value, vjp = jax.vjp(lambda floating: function(**floating, **rest), floating)
    (gradients,) = vjp(cotangent.astype(value.dtype))  # a value of the wrong type is for the check to report
    named = {"value": value}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        named[
            "d"
            + "".join(str(getattr(part, "key", getattr(part, "name", ""))) for part in path[:1])
            + "".join("." + str(getattr(part, "name", part)) for part in path[1:])
        ] = leaf
    return named


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(function: Any, options: tuple[tuple[str, Any], ...], arrays: Any, cotangent: Any) -> dict[str, Any]:
    return value_and_gradients(functools.partial(function, **dict(options)), arrays, cotangent)


def magnitudes(operation: Operation, example: Example) -> dict[str, Any]:
    """Σ|terms| of the value and of every gradient; for attention, times the errors of the terms."""
    if operation.name == "attention":
        return attention_bounds(example)
    arrays, cotangent = jax.tree.map(
        lambda a: jnp.abs(a).astype(accumulator(a.dtype)) if jnp.issubdtype(a.dtype, jnp.floating) else a,
        (dict(example.arrays), example.cotangent),
    )
    if operation.name == "expert_ffn":
        return _run(_ffn_majorant, (("activation", example.options["activation"]),), arrays, cotangent)
    options = {**example.options, "implementation": "reference"}
    options.pop("preferred_element_type", None)
    return _run(operation.function, tuple(options.items()), arrays, cotangent)


def _ffn_majorant(rows, wi_0, wi_1, wo, group_sizes, biases=None, *, activation):
    def polynomial(gate, up):
        # |f| <= 1.2 g, |f'| <= 1.2 and |f''| <= 1.8 for the smooth ones, with 1.702² · 0.5 the steepest curvature.
        bound = jnp.square(gate) if activation == "relu2" else 1.2 * gate + jnp.square(gate)
        return bound if up is None else bound * (up + 1 if activation == "clamped_swiglu" else up)

    bounds = group_bounds(group_sizes, wi_0.shape[0], rows.shape[0])
    return expert_ffn_reference.forward_with(polynomial, rows, ExpertWeights(wi_0, wi_1, wo, biases), bounds)


def bound_of(operation: Operation, example: Example, reference: Any, magnitude: Any) -> np.ndarray:
    """The largest difference that rounding explains, element by element."""
    magnitude = np.asarray(magnitude, np.float64)
    if operation.name == "expert_ffn":
        return FFN_ROUNDINGS * float(jnp.finfo(example.arrays["rows"].dtype).eps) * magnitude
    out_eps = float(jnp.finfo(reference.dtype).eps)
    if operation.name == "attention":
        return out_eps * np.abs(np.asarray(reference, np.float64)) + magnitude
    sum_eps = float(jnp.finfo(accumulator(reference.dtype)).eps)
    return out_eps * np.abs(np.asarray(reference, np.float64)) + SUM_ROUNDINGS * sum_eps * magnitude


def runnable(operation: Operation, example: Example) -> list[str]:
    """The implementations, but for the reference, that accept the call on this machine in both directions."""
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
        return _run(operation.function, static, dict(example.arrays), example.cotangent)

    reference, magnitude = run("reference"), magnitudes(operation, example)
    for name in names:
        try:
            found = run(name)
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
            )
            continue
        for quantity, expected in reference.items():
            difference = np.abs(np.asarray(found[quantity], np.float64) - np.asarray(expected, np.float64))
            bound = bound_of(operation, example, expected, magnitude[quantity])
            share = np.divide(difference, bound, out=np.where(difference == 0, 0.0, np.inf), where=bound > 0)
            worst = int(np.argmax(np.nan_to_num(share, nan=np.inf)))
            problem = None
            if found[quantity].dtype != expected.dtype:
                problem = f"expected type {expected.dtype}, got {found[quantity].dtype}"
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
            )
