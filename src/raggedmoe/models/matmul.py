"""The few ways in which a decoder multiplies by a dense weight: sums in float32 at least, results in the input's type.

On one CPU device the kernel in C++ multiplies, as a `grouped_matmul` of one group, where it is built: it streams a
weight once for few tokens, and with its gradients it is the faster one for many (docs/log.md). Elsewhere XLA does,
written with two dimensions, which its CPU backend multiplies by one token 8 times faster than an einsum with heads
spelled out.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.arrays import accumulator, matmul_precision
from raggedmoe.kernels.grouped_matmul.api import grouped_matmul
from raggedmoe.kernels.native.library import takes
from raggedmoe.kernels.placement import placement
from raggedmoe.lora import B, dense_adapter, first_matrix
from raggedmoe.params import Params
from raggedmoe.sharding.axes import LogicalMesh

_chip: contextvars.ContextVar[Hardware | None] = contextvars.ContextVar("chip", default=None)


@contextlib.contextmanager
def dense_matmuls_for(hardware: Hardware | str | None, mesh: LogicalMesh, array: jax.Array) -> Iterator[None]:
    """Say, while something is traced, for which chip its dense matmuls are, if they are on one device.

    On a mesh XLA divides them, which it can do with its own alone.
    """
    token = _chip.set(target_hardware(hardware, (array,)) if mesh.mesh is None else None)
    try:
        yield
    finally:
        _chip.reset(token)


def project(x: Float[Array, "... I"], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply ``x [..., I]`` by ``weight [*O, I]``: the result is ``[..., *O]``."""
    return _project(x, weight, x.dtype)


def wide_project(x: Float[Array, "... I"], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply as `project` does, but return the float32 accumulator."""
    return _project(x, weight, accumulator(x.dtype))


def _project(x: Float[Array, "... I"], weight: Float[Array, "..."], out_dtype: Any) -> Float[Array, "..."]:
    *outs, inner = weight.shape
    out = _multiply(x.reshape(-1, inner), weight.astype(x.dtype).reshape(-1, inner), True, out_dtype)
    return out.reshape(*x.shape[:-1], *outs)


def project_back(x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply ``x [..., *I]`` by ``weight [*I, O]``: the result is ``[..., O]``."""
    return _project_back(x, weight, x.dtype)


def _project_back(x: Float[Array, "..."], weight: Float[Array, "..."], out_dtype: Any) -> Float[Array, "..."]:
    *inner, out = weight.shape
    size = math.prod(inner)
    product = _multiply(x.reshape(-1, size), weight.astype(x.dtype).reshape(size, out), False, out_dtype)
    return product.reshape(*x.shape[: x.ndim - len(inner)], out)


def linear(x: Float[Array, "... I"], weights: Params, name: str) -> Float[Array, "..."]:
    """Multiply by a weight as `project` does, and by its adapter, if it has one."""
    added = dense_adapter(x.reshape(-1, x.shape[-1]), weights, name)
    if added is None:
        return project(x, weights[name])
    sums = wide_project(x, weights[name])
    return (sums + added.reshape(sums.shape)).astype(x.dtype)


def linear_back(x: Float[Array, "..."], weights: Params, name: str) -> Float[Array, "..."]:
    """Multiply by a weight as `project_back` does, and by its adapter, if it has one."""
    *inner, _ = weights[name].shape
    added = dense_adapter(x.reshape(-1, math.prod(inner)), weights, name)
    if added is None:
        return project_back(x, weights[name])
    sums = _project_back(x, weights[name], accumulator(x.dtype))
    return (sums + added.reshape(sums.shape)).astype(x.dtype)


def linear_per_head(
    x: Float[Array, "B S N I"], weights: Params, name: str, *, back: bool = False
) -> Float[Array, "B S N O"]:
    """Multiply as `per_head` does, and by the weight's adapter, if it has one, whose first matrix all heads share."""
    out = per_head(x, weights[name], back=back)
    if f"{name}{B}" not in weights:
        return out
    of_heads = jnp.moveaxis(weights[f"{name}{B}"], 0, 1)  # [N rank X]
    shared = weights[first_matrix(name)]
    if back:
        return out + project_back(per_head(x, of_heads), shared)
    return out + per_head(project(x, shared), of_heads, back=True)


def _multiply(
    rows: Float[Array, "T I"], matrix: Float[Array, "_ _"], transpose: bool, out_dtype: Any
) -> Float[Array, "T O"]:
    """Multiply rows by ``matrix [I, O]``, or with ``transpose`` by ``matrix [O, I]``."""
    if _takes_native(rows, matrix):
        size = jnp.full(1, rows.shape[0], jnp.int32)
        kernel: dict[str, Any] = {"preferred_element_type": out_dtype, "implementation": "cpu_native"}
        return grouped_matmul(rows, matrix[None], size, transpose_rhs=transpose, **kernel)
    wide = accumulator(rows.dtype)
    if rows.shape[0] == 1 and rows.dtype.itemsize == 2:
        # One row of a 16-bit type goes to no matmul of XLA's CPU backend: 1.8 GB/s, and 5.8 as a sum (docs/log.md).
        row = rows.astype(wide)
        sums = (row * matrix).sum(1)[None] if transpose else (row.reshape(-1, 1) * matrix).sum(0)[None]
        return sums.astype(out_dtype)
    return _einsum("ti,oi->to" if transpose else "ti,io->to", rows, matrix).astype(out_dtype)


def _takes_native(rows: Float[Array, "T I"], matrix: Float[Array, "_ _"]) -> bool:
    chip = _chip.get()
    if chip is None or chip.platform != "cpu" or 0 in (*rows.shape, *matrix.shape) or not takes(rows.dtype):
        return False
    return not placement(rows, matrix)["divided_by_xla"]


def per_head(
    x: Float[Array, "B S N I"], weight: Float[Array, "N X Y"], *, back: bool = False
) -> Float[Array, "B S N O"]:
    """Multiply every head by a matrix of its own, ``weight [N, O, I]``, or with ``back`` ``[N, I, O]``.

    Heads come first: with two or more tokens XLA's CPU backend has no other such product of bfloat16.
    """
    rows = jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 1, 0)
    out = _einsum("nti,nio->nto" if back else "nti,noi->nto", rows, weight.astype(x.dtype))
    return jnp.moveaxis(out, 0, 1).astype(x.dtype).reshape(*x.shape[:3], -1)


def _einsum(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    precision, wide = matmul_precision(x.dtype), accumulator(x.dtype)
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=wide)
