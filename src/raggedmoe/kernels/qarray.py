"""Quantised operands: values of 8 or 4 bits with scales, as a user gives them, and in the form that kernels read."""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Integer

from raggedmoe.kernels.arrays import FLOATS, check_array, structs
from raggedmoe.names import unknown

FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8", "mxfp4")
LHS_FORMATS = FORMATS[:3]


@runtime_checkable
class Quantized(Protocol):
    """An array stored as values and scales: a QArray of ours, or of qwix."""

    @property
    def qvalue(self) -> Any: ...
    @property
    def scale(self) -> Any: ...
    @property
    def zero_point(self) -> Any: ...
    @property
    def qtype(self) -> Any: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QArray:
    """An array stored as ``qvalue · scale``: the fields of qwix's QArray, which is taken in its place.

    A dimension of the scale divides that of the values: the granularity is the quotient, and nothing else says it. Only
    the first dimension, experts or rows, has one scale for all or one for each.

    Attributes:
      qvalue: float8_e4m3fn, float8_e5m2, int8 or float4_e2m1fn; or uint8, whose meaning ``qtype`` says: the bits of a
        float8, or for "mxfp4" two neighbours of the last dimension in a byte, the first one in the lower half.
      scale: of a floating type; or the powers of two that values share, as float8_e8m0fnu or its bits in uint8, where
        127 is a factor of 1.
      zero_point: None; values that are not symmetric are refused.
      qtype: what the values mean, where their type does not say it.
    """

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that is stored so."""
        *rest, last = self.qvalue.shape
        return (*rest, 2 * last) if str(self.qtype) == "mxfp4" and self.qvalue.dtype == jnp.uint8 else (*rest, last)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.qvalue.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the array that is stored so: as in qwix that of the scale, and with shared exponents float32."""
        return jnp.dtype(jnp.float32) if self.scale.dtype.itemsize == 1 else self.scale.dtype


@dataclass(frozen=True, kw_only=True)
class QuantizedForm:
    """How matrices are stored quantised, in the form that kernels read, whatever their number and size."""

    qtype: str  # one of FORMATS
    block: tuple[int, ...]  # what shares a scale, of the last dimensions; of those before each place has its own
    scale_dtype: str

    def struct(self, shape: tuple[int, ...]) -> QArray:
        """Describe the values and scales of so many matrices of that size, by their shapes alone."""
        *rows, columns = shape
        values = (*rows, columns // 2 if self.qtype == "mxfp4" else columns)
        lead = len(shape) - len(self.block)
        scales = (*shape[:lead], *(size // step for size, step in zip(shape[lead:], self.block)))
        return QArray(
            jax.ShapeDtypeStruct(values, jnp.int8 if self.qtype == "int8" else jnp.uint8),
            jax.ShapeDtypeStruct(scales, jnp.dtype(self.scale_dtype)),
            None,
            self.qtype,
        )


def cast_array(array: Any, dtype: Any) -> Any:
    """Cast an array to the type that it is multiplied or kept in; what is quantised stays so."""
    return array if isinstance(array, Quantized) else array.astype(dtype)


def check_operand(
    operation: str, name: str, operand: Any, dims: str, formats: tuple[str, ...] = FORMATS
) -> Array | QArray:
    """Require an array of the rank that the letters spell, or one stored as values and scales; return it for kernels.

    They read a quantised one as a QArray of integers, which have no gradient: int8 itself, or bits in uint8, with
    ``qtype`` one of ``FORMATS``, and scales of a floating type or the bits of shared exponents.
    """
    if not isinstance(operand, Quantized):
        check_array(operation, name, operand, dims)
        return operand
    values, scale = operand.qvalue, operand.scale
    if operand.zero_point is not None:
        raise ValueError(
            f"{operation}: expected {name} without a zero_point, got one; quantise it by its absolute maximum"
        )
    qtype = _format(operation, name, values, operand.qtype, formats)
    if qtype == "float4_e2m1fn":
        values, qtype = jnp.asarray(values).astype(jnp.float8_e4m3fn), "float8_e4m3fn"  # which has all of its values
    packed = QArray(values, scale, None, qtype)
    if values.ndim != len(dims.split()):
        raise ValueError(f"{operation}: expected {name} [{dims}], got values {list(values.shape)}")
    _check_scale(operation, name, packed.shape, scale, dims)
    if jnp.issubdtype(values.dtype, jnp.floating):
        values = lax.bitcast_convert_type(jnp.asarray(values), jnp.uint8)
    if str(scale.dtype) == "float8_e8m0fnu":
        scale = lax.bitcast_convert_type(jnp.asarray(scale), jnp.uint8)
    return QArray(jnp.asarray(values), jnp.asarray(scale), None, qtype)


def _format(operation: str, name: str, values: Any, qtype: Any, formats: tuple[str, ...]) -> str:
    """Say what the values mean: what their type says, or ``qtype`` where they are bits."""
    dtype = str(values.dtype)
    if dtype == "uint8" and isinstance(qtype, str):
        meant = qtype
    elif dtype == "uint8":
        meant = "uint8" if qtype is None else str(jnp.dtype(qtype))
    else:
        meant = dtype
    if meant not in formats and not (meant == "float4_e2m1fn" and "mxfp4" in formats):
        raise unknown(f"format of {name}, a quantised operand of {operation},", meant, formats)
    return meant


def _check_scale(operation: str, name: str, shape: tuple[int, ...], scale: Any, dims: str) -> None:
    letters = dims.split()
    expected = (
        f"{operation}: expected the scale of {name} to divide [{dims}] = {list(shape)}, {_granularities(*letters)}; "
        f"got {list(scale.shape)}"
    )
    if str(scale.dtype) not in (*FLOATS, "float8_e8m0fnu", "uint8"):
        raise TypeError(
            f"{operation}: expected the scale of {name} in one of {', '.join(FLOATS)}, or as shared exponents in "
            f"float8_e8m0fnu or uint8, got {scale.dtype}"
        )
    if len(scale.shape) != len(letters):
        raise ValueError(f"{expected}, of {len(scale.shape)} dimensions")
    for letter, size, num in zip(letters, shape, scale.shape):
        first = letter == letters[0]
        if size > 0 and (num not in (1, size) if first else num < 1 or size % num):
            fitting = f"1 or {size}" if first else f"a divisor of {size}"
            raise ValueError(f"{expected}, and its {num} for {letter} are not {fitting}")


def _granularities(first: str, *rest: str) -> str:
    """Name the usual shapes of a scale."""
    if first == "R":
        return f"such as [R, 1] for each row, or [R, {rest[0]}/128] for each row in blocks"
    a, b = rest
    channels = f"[G, {a}, 1] or [G, 1, {b}] for each expert and channel"
    return f"such as {channels}, or [G, {a}/128, {b}/128] for each expert in blocks"


def check_scale_values(operation: str, name: str, operand: Any, dims: str, bounds: Any) -> None:
    """Require scales that are known now, of the groups or rows that are used, to be finite and not zero.

    Where they are traced they are multiplied as they are: zero makes the values of its block zero, and NaN makes them
    NaN, which reaches the rows and gradients of its own group, as NaN among the weights does.
    """
    if not isinstance(operand, QArray) or any(isinstance(a, jax.core.Tracer) for a in (operand.scale, bounds)):
        return
    scale, ends = np.asarray(operand.scale), np.asarray(bounds)
    used = _mark_used(dims, ends, operand.shape[0]) if scale.shape[0] > 1 else np.asarray([ends[-1] > ends[0]])
    if scale.dtype == np.uint8:
        wrong = scale == 255
    else:
        wrong = ~np.isfinite(scale.astype(np.float64)) | (scale == 0)
    wrong &= used.reshape(-1, *[1] * (scale.ndim - 1))
    if wrong.any():
        place = np.argwhere(wrong)[0]
        value = "NaN" if scale.dtype == np.uint8 else scale[tuple(place)]
        at = ", ".join(
            f"{letter}={i * (size // num)}" + (f"..{(i + 1) * (size // num) - 1}" if size > num else "")
            for letter, i, size, num in zip(dims.split(), place.tolist(), operand.shape, scale.shape)
        )
        raise ValueError(
            f"{operation}: expected scales of {name} that are finite and not zero, got {value} at [{at}]; where all "
            "values are zero any scale will do, such as 1"
        )


def _mark_used(dims: str, ends: np.ndarray, size: int) -> np.ndarray:
    """Mark the groups that have rows, or the rows that belong to a group."""
    if dims.startswith("R"):
        row = np.arange(size)
        return (row >= ends[0]) & (row < ends[-1])
    return ends[1:] > ends[:-1]


def operand_structs(**operands: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, str]]:
    """Describe operands, and the scales of quantised ones, for a `Call`, and the formats of these by name."""
    arrays: dict[str, jax.ShapeDtypeStruct] = {}
    formats: dict[str, str] = {}
    for name, operand in operands.items():
        if isinstance(operand, QArray):
            arrays[name] = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
            arrays[f"{name}_scale"] = jax.ShapeDtypeStruct(operand.scale.shape, operand.scale.dtype)
            formats[name] = operand.qtype
        else:
            arrays |= structs(**{name: operand})
    return arrays, formats


def has_group(bounds: Integer[Array, " N"], num_rows: int) -> Bool[Array, " R"]:
    """Say of each row whether it belongs to a group."""
    row = jnp.arange(num_rows, dtype=jnp.int32)
    return (row >= bounds[0]) & (row < bounds[-1])
