"""Rows by one matrix that all of them use, or heads by one each: arrays, or quantised. Sums are float32 at least.

On one CPU device the kernel in C++ multiplies, as a `grouped_matmul` of one group, where it is built: it streams a
matrix once for few rows, as it is stored, and with its gradients it is the faster one for many (docs/log.md). Elsewhere
XLA does. What is quantised is dequantised there to the type of the rows, as a model would be that is loaded so, in the
backward pass once more: no dequantised matrix is kept for it.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.arrays import accumulator, matmul_precision
from raggedmoe.kernels.bilinear import product
from raggedmoe.kernels.dequantize import dequantize, operand_gradient
from raggedmoe.kernels.grouped_matmul.api import grouped_matmul
from raggedmoe.kernels.native.library import takes
from raggedmoe.kernels.placement import placement
from raggedmoe.kernels.qarray import QArray, Quantized, check_operand

_chip: contextvars.ContextVar[Hardware | None] = contextvars.ContextVar("chip", default=None)


@contextlib.contextmanager
def dense_matmuls_for(hardware: Hardware | str | None, array: jax.Array, *, on_mesh: bool) -> Iterator[None]:
    """Say, while something is traced, for which chip its dense matmuls are, if they are on one device.

    On a mesh XLA divides them, which it can do with its own alone.
    """
    token = _chip.set(None if on_mesh else target_hardware(hardware, (array,)))
    try:
        yield
    finally:
        _chip.reset(token)


def merge_rows(weight: Float[Array, "..."] | Quantized) -> Any:
    """Make one dimension of all dimensions of a weight but its last; of a quantised one those of values and scales."""
    if isinstance(weight, Quantized):
        sizes, scales = (list(part.shape[:-1]) for part in (weight.qvalue, weight.scale))
        if any(size != num and math.prod(scales[i + 1 :]) > 1 for i, (size, num) in enumerate(zip(sizes, scales))):
            raise ValueError(
                f"expected scales whose blocks are connected rows of a matrix, got {scales} of them for {sizes} rows; "
                "give each of an outer dimension its own"
            )
    return jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]), weight)


def dense_matmul(
    rows: Float[Array, "T I"], matrix: Float[Array, "_ _"] | Quantized, *, transpose_rhs: bool, out_dtype: Any
) -> Float[Array, "T O"]:
    """Multiply rows by ``matrix [I O]``, or with ``transpose_rhs`` by ``matrix [O I]``, of their type or quantised."""
    matrices = _check(jax.tree.map(lambda array: array[None], matrix), transpose_rhs)
    if _takes_native(rows, matrices):
        return _native(rows, matrices, rows.shape[0], transpose_rhs, out_dtype)
    matrix = jax.tree.map(lambda array: array[0], matrices)
    return _multiply("ti,oi->to" if transpose_rhs else "ti,io->to", rows, matrix, out_dtype)


def matmul_per_head(
    x: Float[Array, "N T I"], matrices: Float[Array, "N _ _"] | Quantized, *, transpose_rhs: bool
) -> Float[Array, "N T O"]:
    """Multiply each head's rows by its own matrix, ``[I O]`` or with ``transpose_rhs`` ``[O I]``.

    Heads come first: with two or more tokens XLA's CPU backend has no other such product of bfloat16.
    """
    matrices = _check(matrices, transpose_rhs)
    if isinstance(matrices, QArray) and _takes_native(x, matrices):
        out = _native(x.reshape(-1, x.shape[2]), matrices, x.shape[1], transpose_rhs, x.dtype)
        return out.reshape(*x.shape[:2], -1)
    return _multiply("nti,noi->nto" if transpose_rhs else "nti,nio->nto", x, matrices, x.dtype)


def _check(matrices: Any, transpose_rhs: bool) -> Any:
    """Bring a quantised operand into the form that kernels read."""
    if not isinstance(matrices, Quantized):
        return matrices
    return check_operand("dense matmul", "matrix", matrices, "G O I" if transpose_rhs else "G I O")


def _takes_native(rows: Float[Array, "..."], matrices: Float[Array, "G _ _"] | QArray) -> bool:
    chip = _chip.get()
    if chip is None or chip.platform != "cpu" or 0 in (*rows.shape, *matrices.shape) or not takes(rows.dtype):
        return False
    return not placement(rows, *jax.tree.leaves(matrices))["divided_by_xla"]


def _native(
    rows: Float[Array, "R I"], matrices: Float[Array, "G _ _"] | QArray, size: int, transpose_rhs: bool, out_dtype: Any
) -> Float[Array, "R O"]:
    sizes = jnp.full(matrices.shape[0], size, jnp.int32)
    kernel: dict[str, Any] = {"preferred_element_type": out_dtype, "implementation": "cpu_native"}
    return grouped_matmul(rows, matrices, sizes, transpose_rhs=transpose_rhs, **kernel)


def _multiply(equation: str, x: Float[Array, "..."], weight: Any, out_dtype: Any) -> Float[Array, "..."]:
    if isinstance(weight, QArray):
        return product(_DequantizedProduct(equation, jnp.dtype(out_dtype)), x, weight, ())
    return _einsum(equation, x, weight, out_dtype)


def _einsum(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."], out_dtype: Any) -> Float[Array, "..."]:
    wide = accumulator(x.dtype)
    if x.ndim == 2 and x.shape[0] == 1 and x.dtype.itemsize == 2:
        # One row of a 16-bit type goes to no matmul of XLA's CPU backend: 1.8 GB/s, and 5.8 as a sum (docs/log.md).
        row = x.astype(wide)
        sums = (row * weight).sum(1)[None] if "oi" in equation else (row.reshape(-1, 1) * weight).sum(0)[None]
        return sums.astype(out_dtype)
    precision = matmul_precision(x.dtype)
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=wide).astype(out_dtype)


@dataclass(frozen=True)
class _DequantizedProduct:
    """A product by a matrix that is dequantised for it, in both directions, and kept as it is stored between them."""

    equation: str
    out_dtype: Any

    def value(self, x: Any, stored: Any, rest: Any) -> Any:
        """Compute the product."""
        weight = dequantize(stored, accumulator(x.dtype)).astype(x.dtype)
        return _einsum(self.equation, x, weight, self.out_dtype)

    def gradients(self, x: Any, stored: Any, rest: Any, cotangent: Any) -> tuple[Any, Any]:
        """Compute the gradients of ``x`` and of the scales."""
        _, pull_back = jax.vjp(lambda x: self.value(x, stored, rest), x)
        of_terms, result = self.equation.split("->")
        of_x, of_weight = of_terms.split(",")
        wide, precision = accumulator(x.dtype), matmul_precision(x.dtype)
        terms = f"{of_x},{result}->{of_weight}", x, cotangent.astype(x.dtype)
        weight_gradient = jnp.einsum(*terms, precision=precision, preferred_element_type=wide)
        used = jnp.ones(stored.shape[0], bool)
        return *pull_back(cotangent), operand_gradient(stored, weight_gradient, used)
