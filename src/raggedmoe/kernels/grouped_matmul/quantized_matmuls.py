"""Grouped matmuls whose operands are quantised on the way: one of the rows by each of several matrices, for training.

Forward, ``out[r] = q(lhs)[r] @ q(weight)[g]``, where q is an array that was quantised and dequantised. Backward, the
gradients are those of this matmul at what was multiplied, and are given to the arrays as if nothing had been rounded:
the straight-through rule. A scale counts as a constant, so the largest value gets no gradient for setting it.

With g the cotangent, s the scales of a matrix's output channels and t those of the rows:

- ``dlhs = g · s`` (folded in once, as s varies along what is summed) quantised for each row, by the matrix's values;
- ``dweight = valuesᵀ of the rows`` by ``g · t`` (as t varies along the rows), quantised for each group and column.

A scale in blocks varies along both dimensions and cannot be folded: the operand is given to the kernel with its scales.
A delayed scale is one number for an operand (`kernels/amax.py`), and is folded as the others are.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.amax import Amax, delayed_operands, delayed_scale, largest_absolute_value
from raggedmoe.kernels.arrays import accumulator, check_array, pvary_like
from raggedmoe.kernels.gradient import refuse_forward_mode, with_gradient
from raggedmoe.kernels.grouped_matmul.api import NAME, check_matmul, group_bounds, group_of_row, grouped_matmul
from raggedmoe.kernels.placement import placement, pvary_alike
from raggedmoe.kernels.qarray import QArray, operand_structs
from raggedmoe.kernels.quant_config import QuantConfig, rounding_key
from raggedmoe.kernels.quantize import LARGEST, absmax_scale, constant_scale, encode_bits
from raggedmoe.kernels.registry import DLHS, DRHS, FORWARD, Call, Choice, select

Scale = float | Float[Array, ""] | None  # one for all, constant or delayed; None: made of what shares one


@dataclass(frozen=True)
class _StaticPart:
    """The static part of a call: what is quantised, its three kernels, layout and types."""

    config: QuantConfig
    forward: Any
    dlhs: Any
    drhs: Any
    transpose_rhs: bool
    dtype: Any  # of the rows and the matrices, and of their gradients
    out_dtype: Any
    axes: tuple[str, ...]  # of the mesh, over whose devices a first delayed scale is made


def grouped_matmuls(
    lhs: Float[Array, "R I"],
    weights: tuple[Any, ...],
    matmul: Callable[..., Array],
    config: QuantConfig | None,
    key: jax.Array | None,
    axes: tuple[str, ...],
    amax: Amax | None = None,
) -> tuple[Float[Array, "R _"], ...]:
    """Multiply rows by their groups' matrices in each of ``weights``: by ``matmul``, or quantised as ``config`` says.

    ``matmul`` is then `grouped_matmul` with its options. ``axes`` are those of the mesh, each device of which rounds by
    a key of its own; ``amax`` is for delayed scales.
    """
    if config is None:
        return tuple(matmul(lhs, weight) for weight in weights)
    assert isinstance(matmul, functools.partial)
    assert matmul.func is grouped_matmul
    key = rounding_key(config, key, *(lax.axis_index(axis) for axis in axes))
    return quantized_matmuls(lhs, weights, config=config, key=key, amax=amax, axes=axes, **matmul.keywords)


def quantized_matmuls(
    lhs: Float[Array, "R I"],
    weights: tuple[Float[Array, "G _ _"], ...],
    group_sizes: Integer[Array, " G"],
    *,
    config: QuantConfig,
    key: jax.Array | None = None,
    amax: Amax | None = None,
    axes: tuple[str, ...] = (),
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    implementation: Choice = "auto",
    hardware: Hardware | str | None = None,
) -> tuple[Float[Array, "R _"], ...]:
    """Multiply rows by the matrices of their groups, quantised as ``config`` says; the rows are quantised once.

    Args:
      lhs: rows, ordered by group, as `grouped_matmul` takes them.
      weights: arrays ``[G I O]``, or ``[G O I]`` with ``transpose_rhs``, by each of which the rows are multiplied.
      group_sizes: the rows of each group. All of `grouped_matmul`'s contract holds: rows of no group are zero and reach
        nothing, nor does what an idle group's matrix holds; NaN stays with the rows and gradients of its own group.
      config: formats and scales.
      key: for stochastic rounding of the cotangents, backward.
      amax: for delayed scales, the operands' largest absolute values in the steps before; None: there were none.
        Differentiated by it, those of this call come back.
      axes: of the mesh over whose devices this is one call; delayed scales of the first step are those of all of them.
      transpose_rhs, preferred_element_type, hardware: as by `grouped_matmul`.
      implementation: its forward choice is asked for the product, its backward choice for both gradients.

    The gradients are those of the straight-through rule, of first order alone.
    """
    for weight in weights:
        check_array(NAME, "rhs", weight, "G O I" if transpose_rhs else "G I O")
        check_matmul(lhs, weight, group_sizes, transpose_rhs, None)
    refuse_forward_mode(NAME, lhs, weights)
    out_dtype = jnp.dtype(lhs.dtype if preferred_element_type is None else preferred_element_type)
    if 0 in lhs.shape or any(0 in weight.shape for weight in weights):
        return tuple(jnp.zeros((lhs.shape[0], w.shape[1 if transpose_rhs else 2]), out_dtype) for w in weights)
    _check_blocks(config, lhs, weights)
    static = _select(lhs, weights, group_sizes, config, transpose_rhs, out_dtype, implementation, hardware, axes)
    bounds = group_bounds(group_sizes, weights[0].shape[0], lhs.shape[0])
    amax = delayed_operands(config, amax, len(weights))
    lhs, weights, bounds, amax = pvary_alike(lhs, weights, bounds, amax)
    return _products(static, lhs, weights, bounds, key if config.stochastic_rounding else None, amax)


def _check_blocks(config: QuantConfig, lhs: Any, weights: tuple[Any, ...]) -> None:
    for size in {size for array in (lhs[:1], *(weight[0] for weight in weights)) for size in array.shape[-2:]} - {1}:
        if config.block is not None and size % config.block:
            raise ValueError(f"{NAME}: expected sizes divisible by block={config.block}, got {size}; use another block")


def _select(
    lhs: Any,
    weights: tuple[Any, ...],
    group_sizes: Any,
    config: QuantConfig,
    transpose_rhs: bool,
    out_dtype: Any,
    implementation: Choice,
    hardware: Hardware | str | None,
    axes: tuple[str, ...],
) -> _StaticPart:
    """Select the kernels of the product and of both gradients, which may be quantised differently, before tracing."""
    target = target_hardware(hardware, jax.tree.leaves((lhs, weights)))
    wide, weight = accumulator(lhs.dtype), weights[0]
    out_dim = weight.shape[1 if transpose_rhs else 2]
    rows = jax.eval_shape(lambda lhs: _quantize_rows(config, lhs), lhs)
    matrix = jax.eval_shape(lambda weight: _quantize_matrix(config, weight, transpose_rhs), weight)
    cotangent: Any = jax.ShapeDtypeStruct((lhs.shape[0], out_dim), lhs.dtype)
    of_rows, of_groups = cotangent, cotangent
    if config.cotangents is not None:
        wide_cotangent = jax.ShapeDtypeStruct(cotangent.shape, wide)
        of_rows = jax.eval_shape(lambda g: _quantize_cotangent_rows(config, g, None, None), wide_cotangent)
        of_groups = jax.eval_shape(lambda g: _encode(g, _ones(g), str(config.cotangents), None), wide_cotangent)
    folds = config.cotangents is not None and config.block is None
    read_rows = _without_scale(rows) if folds and isinstance(rows, QArray) else rows
    placed = placement(*jax.tree.leaves((lhs, weights)), group_sizes)

    def function(direction: str, transpose_rhs: bool, dtype: Any, **operands: Any) -> Any:
        arrays, formats = operand_structs(**operands, group_sizes=group_sizes)
        options = {"transpose_rhs": transpose_rhs, "group_offset": False, "out_dtype": str(dtype), **placed}
        call = Call(operation=NAME, direction=direction, arrays=arrays, options=options, formats=formats)
        return select(call, implementation, target).function

    return _StaticPart(
        config=config,
        forward=function(FORWARD, transpose_rhs, out_dtype, lhs=rows, rhs=matrix),
        dlhs=function(DLHS, not transpose_rhs, wide, lhs=of_rows, rhs=_without_scale(matrix) if folds else matrix),
        drhs=function(DRHS, transpose_rhs, wide, lhs=read_rows, rhs=weight, cotangent=of_groups),
        transpose_rhs=transpose_rhs,
        dtype=lhs.dtype,
        out_dtype=out_dtype,
        axes=axes,
    )


def _value(static: _StaticPart, lhs: Any, weights: Any, bounds: Any, key: Any, amax: Amax) -> Any:
    return _value_and_operands(static, lhs, weights, bounds, amax)[0]


def _forward(static: _StaticPart, lhs: Any, weights: Any, bounds: Any, key: Any, amax: Amax) -> tuple[Any, Any]:
    sums, operands = _value_and_operands(static, lhs, weights, bounds, amax)
    return sums, (*operands, bounds, key, amax)


def _backward(static: _StaticPart, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    dlhs, dweights, current = _gradients(static, residuals, cotangents)
    return dlhs, dweights, None, None, current


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Operands:
    """What was multiplied forward, and of operands with delayed scales these, and the largest values now."""

    rows: Any
    matrices: tuple[QArray, ...]
    scales: Amax
    current: Amax


def _compute(static: _StaticPart, lhs: Any, weights: Any, bounds: Any, amax: Amax) -> tuple[Any, Any]:
    config, nothing = static.config, (None,) * len(weights)
    live = group_of_row(bounds, lhs.shape[0])[1]
    of_rows, row_scale = _current_and_scale(static, "rows", amax.rows, jnp.where(live[:, None], lhs, 0))
    of_weights = [
        _current_and_scale(static, "weights", before, weight) for before, weight in zip(amax.weights, weights)
    ]
    scales = tuple(scale for _, scale in of_weights)
    operands = _Operands(
        rows=_quantize_rows(config, lhs, row_scale),
        matrices=tuple(_quantize_matrix(config, w, static.transpose_rhs, scale) for w, scale in zip(weights, scales)),
        scales=Amax(rows=row_scale, weights=scales, cotangents=nothing),
        current=Amax(rows=of_rows, weights=tuple(current for current, _ in of_weights), cotangents=nothing),
    )
    options = {"transpose_rhs": static.transpose_rhs, "out_dtype": static.out_dtype}
    sums = tuple(static.forward(operands.rows, matrix, bounds, **options) for matrix in operands.matrices)
    return sums, (operands,)


def _current_and_scale(static: _StaticPart, operand: str, before: Any, array: Any) -> tuple[Any, Any]:
    """Return the largest value of an operand and the scale that its history makes; None twice: it has none."""
    if before is None:
        return None, None
    current = largest_absolute_value(array)
    qtype = getattr(static.config, operand)
    return current, delayed_scale(before, current, qtype, accumulator(static.dtype), static.axes)


def _compute_gradients(static: _StaticPart, residuals: Any, cotangents: Any) -> tuple[Any, Any, Amax]:
    operands, bounds, key, amax = residuals
    rows, matrices, config = operands.rows, operands.matrices, static.config
    if static.config.stochastic_rounding and key is None:  # forward nothing is left to chance
        raise ValueError("stochastic_rounding=True needs a random key, got None; pass key=jax.random.key(…)")
    group, here = group_of_row(bounds, rows.shape[0])
    wide, dlhs, dweights, largest = accumulator(static.dtype), [], [], []
    for number, (matrix, cotangent) in enumerate(zip(matrices, cotangents)):
        keys = [None, None] if key is None else [jax.random.fold_in(key, 2 * number + i) for i in range(2)]
        # What stands in rows without a group, NaN too, must not enter a scale.
        cotangent = jnp.where(here[:, None], cotangent, 0)
        current, scale = _current_and_scale(static, "cotangents", amax.cotangents[number], cotangent)
        largest.append(current)
        # A constant scale is of cotangents times what is folded into them; a history is of cotangents alone.
        of_rows = of_groups = config.cotangent_scale
        if scale is not None:
            of_rows = scale * _first(operands.scales.weights[number], config.weight_scale, 1)
            of_groups = scale * _first(operands.scales.rows, config.row_scale, 1)
        cotangent = cotangent.astype(wide)
        dlhs.append(_lhs_gradient(static, matrix, bounds, group, here, cotangent, keys[0], of_rows))
        dweights.append(_weight_gradient(static, rows, bounds, group, here, cotangent, keys[1], of_groups))
    total = sum(dlhs[1:], start=dlhs[0])
    amax_now = replace(operands.current, cotangents=tuple(largest))
    return total.astype(static.dtype), tuple(dweight.astype(static.dtype) for dweight in dweights), amax_now


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _refuse(*arguments: Any) -> Any:
    raise NotImplementedError(
        "quantised matmuls have gradients of first order alone, as the straight-through rule says nothing of others; "
        "leave the quantization out to differentiate twice"
    )


_products = with_gradient(_value, _forward, _backward)
_value_and_operands = with_gradient(_compute, _refuse, _refuse)
_gradients = with_gradient(_compute_gradients, _refuse, _refuse)


def _lhs_gradient(static, matrix, bounds, group, here, cotangent, key, scale):
    """Multiply the cotangent by the matrices as they were multiplied."""
    config, options = static.config, {"transpose_rhs": not static.transpose_rhs, "out_dtype": cotangent.dtype}
    if config.cotangents is None:
        return static.dlhs(cotangent.astype(static.dtype), matrix, bounds, **options)
    if config.block is None:
        of_channel = matrix.scale.reshape(matrix.scale.shape[0], -1)  # [G O]
        cotangent = jnp.where(here[:, None], cotangent * jnp.take(of_channel, group, axis=0), 0)
        matrix = _without_scale(matrix)
    return static.dlhs(_quantize_cotangent_rows(config, cotangent, key, scale), matrix, bounds, **options)


def _weight_gradient(static, rows, bounds, group, here, cotangent, key, scale):
    """Multiply the rows as they were multiplied, transposed, by the cotangent of each group."""

    config, qtype = static.config, static.config.cotangents
    # Of arrays alone the kernels give their type.
    options = {"out_dtype": cotangent.dtype} if isinstance(rows, QArray) or qtype is not None else {}

    def product(rows, cotangent):
        first, second = (cotangent, rows) if static.transpose_rhs else (rows, cotangent)
        return static.drhs(first, second, bounds, **options)

    if qtype is None:
        return product(rows, cotangent.astype(static.dtype))
    if isinstance(rows, QArray) and config.block is None:
        cotangent = jnp.where(here[:, None], cotangent * rows.scale, 0)
        rows = _without_scale(rows)
    scale = _group_scale(config, cotangent, bounds, group, here, scale)  # [G O]
    of_rows = jnp.take(scale, group, axis=0)
    out = product(rows, _encode(cotangent, of_rows, qtype, key, _ones(cotangent)))
    return out * (scale[:, :, None] if static.transpose_rhs else scale[:, None, :])


def _group_scale(config, cotangent, bounds, group, here, constant):
    """Make the scales of each group and column: the group's largest value times the column's largest share of that.

    So a group with small gradients keeps its resolution beside one with large ones, by two passes over the rows. Those
    of a group in which something is not finite are NaN, as its gradient then is, and do not reach the others'.
    """
    num_groups = bounds.shape[0] - 1
    largest = jnp.max(jnp.abs(cotangent), axis=1)  # NaN where a row has it
    none = pvary_like(jnp.zeros(num_groups, cotangent.dtype), cotangent, bounds)
    of_group = none.at[jnp.where(here, group, num_groups)].max(largest, mode="drop")
    finite = jnp.isfinite(of_group)
    if constant is not None:
        scale = jnp.broadcast_to(jnp.asarray(constant, cotangent.dtype), (num_groups, cotangent.shape[1]))
        return jnp.where(finite[:, None], scale, jnp.nan)
    of_group = jnp.where(finite & (of_group > 0), of_group, 1)
    shares = jnp.abs(cotangent) / jnp.take(of_group, group)[:, None]
    shares = jnp.where(jnp.take(finite, group)[:, None], shares, 0)
    of_column = jnp.max(shares, axis=0, keepdims=True) / np.asarray(LARGEST[config.cotangents], cotangent.dtype)
    scale = jnp.maximum(of_group[:, None] * of_column, jnp.finfo(cotangent.dtype).tiny)
    return jnp.where(finite[:, None], scale, jnp.nan)


def _quantize_rows(config: QuantConfig, rows: Float[Array, "R I"], delayed: Scale = None) -> Array | QArray:
    """Quantise rows, each by itself; those without a group too, which no kernel reads."""
    if config.rows is None:
        return rows
    shape = (rows.shape[0], _num_blocks(config, rows.shape[1]))
    return _quantize(rows, config.rows, shape, config.row_scale if delayed is None else delayed)


def _quantize_cotangent_rows(config: QuantConfig, rows: Float[Array, "R O"], key: Any, scale: Scale) -> QArray:
    assert config.cotangents is not None
    shape = (rows.shape[0], _num_blocks(config, rows.shape[1]))
    return _quantize(rows, config.cotangents, shape, scale, key)


def _quantize_matrix(
    config: QuantConfig, weight: Float[Array, "G _ _"], transpose_rhs: bool, delayed: Scale = None
) -> QArray:
    num_groups, first, second = weight.shape
    blocks = _num_blocks(config, first), _num_blocks(config, second)
    channels = (first, 1) if transpose_rhs else (1, second)
    shape = (num_groups, *(channels if config.block is None else blocks))
    return _quantize(weight, config.weights, shape, config.weight_scale if delayed is None else delayed)


def _num_blocks(config: QuantConfig, size: int) -> int:
    return 1 if config.block is None else size // config.block


def _quantize(array: Array, qtype: str, scale_shape: tuple[int, ...], constant: Scale, key: Any = None) -> QArray:
    if constant is None:
        return _encode(array, absmax_scale(array, qtype, scale_shape), qtype, key)
    return _encode(array, constant_scale(array, constant, scale_shape), qtype, key)


def _encode(array: Array, scale: Array, qtype: str, key: Any, kept: Array | None = None) -> QArray:
    """Quantise an array in the form that kernels read; ``kept`` are the scales that they are given, if others."""
    return QArray(encode_bits(array, scale, qtype, key), scale if kept is None else kept, None, qtype)


def _without_scale(operand: QArray) -> QArray:
    """Return the values of a quantised operand with a scale of one, where theirs is in the other operand."""
    return QArray(operand.qvalue, _ones(operand), None, operand.qtype)


def _ones(array: Array | QArray) -> Array:
    """Make the scale of values that are multiplied as they are."""
    dtype = array.scale.dtype if isinstance(array, QArray) else array.dtype
    return jnp.ones((1,) * len(array.shape), dtype)
