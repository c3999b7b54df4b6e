"""`expert_ffn`: up projection, activation and down projection of every group, in one operation."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.arrays import check_array, check_size, check_sizes_fit
from raggedmoe.kernels.dequantize import operand_gradient
from raggedmoe.kernels.expert_ffn import reference
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.gradient import refuse_forward_mode, with_gradient
from raggedmoe.kernels.grouped_matmul.api import group_bounds
from raggedmoe.kernels.placement import placement, pvary_alike
from raggedmoe.kernels.qarray import (
    LHS_FORMATS,
    QArray,
    Quantized,
    check_operand,
    check_scale_values,
    has_group,
    operand_structs,
)
from raggedmoe.kernels.registry import (
    Call,
    Choice,
    Directions,
    Kernels,
    candidates,
    implementations,
    select_kernels,
)
from raggedmoe.names import check_known

NAME = "expert_ffn"

# Implementations that are faster than the three matmuls by themselves in both directions (docs/speed.md).
FASTER_THAN_SPLIT = ("cpu_native",)


class ExpertBiases(NamedTuple):
    """The biases that are added after each projection, to the valid rows only."""

    wi_0: Float[Array, "G F"]
    wi_1: Float[Array, "G F"] | None  # None for ungated experts
    wo: Float[Array, "G D"]


class ExpertWeights(NamedTuple):
    """The differentiable arguments but the rows; gradients come back in the same shape."""

    wi_0: Float[Array, "G F D"] | QArray
    wi_1: Float[Array, "G F D"] | QArray | None
    wo: Float[Array, "G F D"] | QArray
    biases: ExpertBiases | None


class KeptSums(NamedTuple):
    """The activation's arguments, with biases, in the rows' type. The forward pass keeps them for the backward."""

    gate: Float[Array, "R F"]
    up: Float[Array, "R F"] | None


@dataclass(frozen=True)
class _StaticPart:
    """The static part of a call: its kernels and activation."""

    kernels: Kernels
    activation: str


def expert_ffn(
    rows: Float[Array, "R D"] | Quantized,
    wi_0: Float[Array, "G F D"] | Quantized,
    wi_1: Float[Array, "G F D"] | Quantized | None,
    wo: Float[Array, "G F D"] | Quantized,
    group_sizes: Integer[Array, " G"],
    *,
    biases: ExpertBiases | None = None,
    activation: str = "silu",
    implementation: Choice = "auto",
    hardware: Hardware | str | None = None,
) -> Float[Array, "R D"]:
    """Compute ``activation(rows @ wi_0[g]ᵀ, rows @ wi_1[g]ᵀ) @ wo[g]`` for the rows of each group g, zero elsewhere.

    Args:
      rows: rows, ordered by group. What stands past the last group is never used, NaN included.
      wi_0, wi_1, wo: the weights, all ``[G F D]``. ``wi_1`` is None for ungated experts. What an expert's weights hold,
        NaN and infinity included, reaches its own group's rows and gradients only. The rows and each of the weights may
        be quantised, as by `grouped_matmul`; the type of quantised rows is that of their scales.
      group_sizes: the rows of each group. An empty group's gradients are zero. Traced sizes that are negative or run
        past the last row are taken as by `grouped_matmul`.
      biases: added after the projections, to the valid rows.
      activation: one of `ACTIVATIONS`. The sums that it is given are float32; its result is rounded to the input's
        type before the down projection, as are the cotangents before their matmuls.
      implementation: "auto", a name, a tuple of names in order of preference, or `Directions`.
      hardware: the chip to choose for; by default that of the mesh in use, or of the arrays.

    >>> import jax.numpy as jnp
    >>> w = jnp.ones((1, 1, 2))
    >>> expert_ffn(jnp.ones((2, 2)), w, None, w, jnp.array([1]), activation="relu2")
    Array([[4., 4.],
           [0., 0.]], dtype=float32)
    """
    rows = check_operand(NAME, "rows", rows, "R D", LHS_FORMATS)
    wi_0, wo = check_operand(NAME, "wi_0", wi_0, "G F D"), check_operand(NAME, "wo", wo, "G F D")
    wi_1 = None if wi_1 is None else check_operand(NAME, "wi_1", wi_1, "G F D")
    weights = ExpertWeights(wi_0, wi_1, wo, biases)
    _check(rows, weights, group_sizes, activation)
    refuse_forward_mode(NAME, rows, weights)
    if 0 in rows.shape or 0 in wi_0.shape:
        return jnp.zeros(rows.shape, rows.dtype)
    leaves = jax.tree.leaves((rows, weights.wi_0))
    target = target_hardware(hardware, leaves)
    arrays, formats = operand_structs(rows=rows, wi_0=wi_0, wi_1=wi_1, wo=wo, group_sizes=group_sizes)
    options = {"activation": activation, "biases": biases is not None, **placement(*leaves, group_sizes)}
    kernels = select_kernels(NAME, implementation, target, arrays=arrays, options=options, formats=formats)
    static = _StaticPart(kernels, activation)
    bounds = group_bounds(group_sizes, wi_0.shape[0], rows.shape[0])
    check_scale_values(NAME, "rows", rows, "R D", bounds)
    for name in ("wi_0", "wi_1", "wo"):
        check_scale_values(NAME, name, getattr(weights, name), "G F D", bounds)
    return _expert_ffn(static, *pvary_alike(rows, weights, bounds))


def is_faster_than_split(rows: Any, wi_0: Any, activation: str, biases: bool, hardware: Hardware) -> bool:
    """Say whether `auto` would take an implementation that is faster than grouped matmuls and an activation."""
    (arrays, formats), options = operand_structs(rows=rows, wi_0=wi_0), {"activation": activation, "biases": biases}
    considered = candidates(Call(operation=NAME, arrays=arrays, options=options, formats=formats), "auto", hardware)
    return next(c.implementation.name for c in considered if c.reason is None) in FASTER_THAN_SPLIT


def may_keep_sums(choice: Choice) -> bool:
    """Say whether a choice of kernels may keep the activation's arguments for the backward pass, as "moe_up"."""
    names = choice.forward if isinstance(choice, Directions) else choice
    known = implementations(NAME)
    return names == "auto" or any(known[n].forward_keeping for n in ((names,) if isinstance(names, str) else names))


def check_activation(name: str) -> None:
    """Require the name of an activation."""
    check_known("activation", name, ACTIVATIONS)


def _check(rows: Any, weights: ExpertWeights, group_sizes: Any, activation: str) -> None:
    check_activation(activation)
    check_array(NAME, "group_sizes", group_sizes, "G", integer=True)
    num_groups, num_hidden, width = weights.wi_0.shape
    if num_hidden == 0:
        raise ValueError(f"{NAME}: expected F >= 1, got wi_0 [G F D] = {list(weights.wi_0.shape)}")
    check_size(NAME, "D (the last dimension) of wi_0", rows.shape[1], width, "all weights are [G F D], D last")
    for name in ("wi_1", "wo"):
        array = getattr(weights, name)
        if array is None and name == "wi_1":
            continue
        if array.shape != weights.wi_0.shape:
            raise ValueError(
                f"{NAME}: expected {name} [G F D] = {list(weights.wi_0.shape)} like wi_0, got {list(array.shape)}; "
                "all three are stored with D last, the down projection too"
            )
    for name, array in zip(weights._fields[:3], weights[:3]):
        if array is not None and not isinstance(array, QArray) and array.dtype != rows.dtype:
            raise TypeError(f"{NAME}: expected {name} of the rows' type {rows.dtype}, got {array.dtype}; cast it")
    check_size(NAME, "len(group_sizes)", num_groups, group_sizes.shape[0], "give one size for each expert held here")
    check_sizes_fit(NAME, group_sizes, rows.shape[0])
    if weights.biases is not None:
        for name, bias_width in (("wi_0", num_hidden), ("wi_1", num_hidden), ("wo", width)):
            bias = getattr(weights.biases, name)
            if bias is None and name == "wi_1" and weights.wi_1 is None:
                continue
            check_array(NAME, f"biases.{name}", bias, "G F" if name != "wo" else "G D")
            check_size(NAME, f"biases.{name}.shape[0]", num_groups, bias.shape[0], "give one line for each expert")
            check_size(NAME, f"biases.{name}.shape[1]", bias_width, bias.shape[1], "give one bias for each output")


def _value(static, rows, weights, bounds):
    return static.kernels.forward(rows, weights, bounds, activation=static.activation)


def _value_keeping(static, rows, weights, bounds):
    return static.kernels.forward_keeping(rows, weights, bounds, activation=static.activation)


def _forward(static, rows, weights, bounds):
    if static.kernels.forward_keeping is None:
        return _expert_ffn(static, rows, weights, bounds), (rows, weights, bounds, None)
    out, kept = _expert_ffn_keeping(static, rows, weights, bounds)
    return out, (rows, weights, bounds, jax.tree.map(lambda sums: checkpoint_name(sums, "moe_up"), kept))


def _backward(static, residuals, cotangent):
    return *_gradients(static, *residuals, cotangent), None


def _forward_keeping(static, rows, weights, bounds):
    return _expert_ffn_keeping(static, rows, weights, bounds), (rows, weights, bounds, None)


def _backward_keeping(static, residuals, cotangents):
    """Use the result's cotangent alone: what is kept enters gradients only, whose derivatives do without it."""
    return _backward(static, residuals, cotangents[0])


def _gradients_value(static, rows, weights, bounds, kept, cotangent):
    options = {} if kept is None else {"kept": kept}
    gradients = static.kernels.backward(rows, weights, bounds, cotangent, activation=static.activation, **options)
    return _of_operands(rows, weights, bounds, *gradients)


def _of_operands(rows, weights, bounds, drows, dweights):
    """Turn the gradients of what quantised operands stand for into those of their scales."""
    wi_0, wi_1, wo = (operand_gradient(w, dw, bounds[1:] > bounds[:-1]) for w, dw in zip(weights[:3], dweights[:3]))
    drows = operand_gradient(rows, drows, has_group(bounds, rows.shape[0]))
    return drows, ExpertWeights(wi_0, wi_1, wo, dweights.biases)


def _gradients_forward(static, rows, weights, bounds, kept, cotangent):
    return _gradients(static, rows, weights, bounds, kept, cotangent), (rows, weights, bounds, kept, cotangent)


def _gradients_backward(static, residuals, cotangents):
    """Take derivatives of the gradients, hence of any order, from the reference."""
    rows, weights, bounds, kept, cotangent = residuals

    def gradients(rows, weights, cotangent):
        gradients = reference.backward(rows, weights, bounds, cotangent, activation=static.activation)
        return _of_operands(rows, weights, bounds, *gradients)

    drows, dweights, dcotangent = jax.vjp(gradients, rows, weights, cotangent)[1](cotangents)
    return drows, dweights, None, jax.tree.map(jnp.zeros_like, kept), dcotangent


_expert_ffn = with_gradient(_value, _forward, _backward)
_expert_ffn_keeping = with_gradient(_value_keeping, _forward_keeping, _backward_keeping)
_gradients = with_gradient(_gradients_value, _gradients_forward, _gradients_backward)
