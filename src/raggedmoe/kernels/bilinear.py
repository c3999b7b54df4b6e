"""Operations that are linear in each of two arrays: their gradients, of any order, are calls of themselves.

``second`` is None for an operation that is linear in ``first`` alone. ``rest`` are indices and sizes.
"""

from typing import Any, Protocol, runtime_checkable

from raggedmoe.kernels.gradient import with_gradient


@runtime_checkable
class Plan(Protocol):
    """The two directions of a call, as they were chosen. Equal plans compute the same: what is compiled is shared."""

    def value(self, first: Any, second: Any, rest: Any) -> Any:
        """The operation itself."""

    def gradients(self, first: Any, second: Any, rest: Any, cotangent: Any) -> tuple[Any, Any]:
        """Those of both arrays. ``first`` is None where there is no second one: it is not needed then, nor kept."""


def _product(plan: Plan, first: Any, second: Any, rest: Any) -> Any:
    return plan.value(first, second, rest)


def _product_forward(plan: Plan, first: Any, second: Any, rest: Any) -> tuple[Any, Any]:
    return product(plan, first, second, rest), (None if second is None else first, second, rest)


def _product_backward(plan: Plan, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    return *gradients(plan, *kept, cotangent), None


def _gradients(plan: Plan, first: Any, second: Any, rest: Any, cotangent: Any) -> tuple[Any, Any]:
    return plan.gradients(first, second, rest, cotangent)


def _gradients_forward(plan: Plan, first: Any, second: Any, rest: Any, cotangent: Any) -> tuple[Any, Any]:
    return gradients(plan, first, second, rest, cotangent), (first, second, rest, cotangent)


def _gradients_backward(plan: Plan, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    first, second, rest, cotangent = kept
    of_first, of_second = cotangents
    dcotangent = product(plan, of_first, second, rest)
    if second is None:
        return None, None, None, dcotangent.astype(cotangent.dtype)
    dcotangent = dcotangent + product(plan, first, of_second, rest)
    dfirst, _ = gradients(plan, first, of_second, rest, cotangent)
    _, dsecond = gradients(plan, of_first, second, rest, cotangent)
    return dfirst, dsecond, None, dcotangent.astype(cotangent.dtype)


# The value of a call, and its gradients, which are linear in the cotangent and in the other array.
product = with_gradient(_product, _product_forward, _product_backward)
gradients = with_gradient(_gradients, _gradients_forward, _gradients_backward)
