"""Operations that are linear in each of two arrays: their gradients, of any order, are calls of themselves.

``second`` is None for an operation that is linear in ``first`` alone. ``rest`` are indices and sizes. An array may be a
tree of which some leaves have no gradient, as a quantised one is values and scales: the gradient has None there.
"""

import functools
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from raggedmoe.kernels.gradient import with_gradient
from raggedmoe.kernels.registry import Kernels


@runtime_checkable
class BilinearKernels(Protocol):
    """The two directions of a call, as they were chosen. Equal ones compute the same, so what is compiled is shared."""

    def value(self, first: Any, second: Any, rest: Any) -> Any:
        """Compute the operation itself."""

    def gradients(self, first: Any, second: Any, rest: Any, cotangent: Any) -> tuple[Any, Any]:
        """Compute the gradients of both arrays; ``first``, which is not needed then, is None if there is no second."""


@dataclass(frozen=True)
class RowMoveKernels:
    """The kernels of a gather or of its reduction, and the shape of the rows, which the backward pass does without."""

    kernels: Kernels
    rows: jax.ShapeDtypeStruct

    def value(self, rows: Any, weights: Any, indexing: Any) -> Any:
        """Compute the operation itself; ``indexing`` has the indices, start and end of the valid rows, and inverse."""
        indices, start, end, _ = indexing
        return self.kernels.forward(rows, indices, start, end, weights)

    def gradients(self, rows: Any, weights: Any, indexing: Any, cotangent: Any) -> tuple[Any, Any]:
        """Compute the gradients of the rows and of the weights."""
        indices, start, end, inverse = indexing
        rows = self.rows if rows is None else rows
        return self.kernels.backward(rows, indices, start, end, weights, inverse, cotangent)


def _product(kernels: BilinearKernels, first: Any, second: Any, rest: Any) -> Any:
    return kernels.value(first, second, rest)


def _product_forward(kernels: BilinearKernels, first: Any, second: Any, rest: Any) -> tuple[Any, Any]:
    return product(kernels, first, second, rest), (None if second is None else first, second, rest)


def _product_backward(kernels: BilinearKernels, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    return *gradients(kernels, *kept, cotangent), None


def _gradients(kernels: BilinearKernels, first: Any, second: Any, rest: Any, cotangent: Any) -> tuple[Any, Any]:
    return kernels.gradients(first, second, rest, cotangent)


def _gradients_forward(kernels: BilinearKernels, first: Any, second: Any, rest: Any, cotangent: Any) -> tuple[Any, Any]:
    return gradients(kernels, first, second, rest, cotangent), (first, second, rest, cotangent)


def _gradients_backward(kernels: BilinearKernels, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    first, second, rest, cotangent = kept
    of_first, of_second = cotangents
    if second is None:
        return None, None, None, product(kernels, of_first, second, rest).astype(cotangent.dtype)
    dfirst = dsecond = None
    parts = []
    if jax.tree.leaves(of_first):
        of_first = _with_constants(first, of_first)
        parts.append(product(kernels, of_first, second, rest))
        _, dsecond = gradients(kernels, of_first, second, rest, cotangent)
    if jax.tree.leaves(of_second):
        of_second = _with_constants(second, of_second)
        parts.append(product(kernels, first, of_second, rest))
        dfirst, _ = gradients(kernels, first, of_second, rest, cotangent)
    return dfirst, dsecond, None, (functools.reduce(jnp.add, parts).astype(cotangent.dtype) if parts else None)


def _with_constants(array: Any, gradient: Any) -> Any:
    """Put the leaves of ``array`` that have no gradient in their places in ``gradient``, in which it is linear."""
    return jax.tree.map(lambda of, leaf: leaf if of is None else of, gradient, array, is_leaf=lambda of: of is None)


# The value of a call, and its gradients, which are linear in the cotangent and in the other array.
product = with_gradient(_product, _product_forward, _product_backward)
gradients = with_gradient(_gradients, _gradients_forward, _gradients_backward)
