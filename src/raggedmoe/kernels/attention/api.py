"""`attention`: each query's mean of the values before it, weighted by the softmax of its scores."""

import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from raggedmoe.hardware import Hardware, target_hardware
from raggedmoe.kernels.arrays import check_array, check_size, int32, structs
from raggedmoe.kernels.attention import reference
from raggedmoe.kernels.attention.operands import Operands, sees_any_slot, segment_numbers
from raggedmoe.kernels.gradient import refuse_forward_mode, with_gradient
from raggedmoe.kernels.placement import placement
from raggedmoe.kernels.registry import Choice, Kernels, select_kernels

NAME = "attention"


@dataclass(frozen=True)
class _StaticPart:
    """The static part of a call: its kernels, scale and window."""

    kernels: Kernels
    scale: float
    window: int | None


def attention(
    query: Float[Array, "B S N H"],
    key: Float[Array, "B L M H"],
    value: Float[Array, "B L M W"],
    *,
    scale: float | None = None,
    positions: Integer[Array, "B S"] | None = None,
    segments: Integer[Array, "B S"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: Choice = "auto",
    hardware: Hardware | str | None = None,
) -> Float[Array, "B S N W"]:
    """Compute causal attention: ``softmax(scale · query · key)`` over the slots that a query sees, times ``value``.

    Key slot j is at position j, and a query at position p sees it if ``j <= p``. Query head n reads key head
    ``n // (N // M)``. A query that sees nothing gives zero and gets no gradient.

    Args:
      query, key, value: of one type. N is a multiple of M; H and W may differ. Slots that no query sees, such as a
        cache's that are not yet written, may hold anything finite.
      scale: of the scores, by default ``H ** -0.5``.
      positions: where each query is; negative: it sees nothing. By default query i is at position i, and L == S.
      segments: a query sees slots of its own segment only (packed sequences). Not together with ``positions``.
      window: a query sees the last ``window`` positions up to its own.
      sinks: for each query head, a logit that joins the softmax's sum and brings no value; minus infinity: none.
      implementation: "auto", a name, a tuple of names in order of preference, or `Directions`.
      hardware: the chip to choose for; by default that of the mesh in use, or of the arrays.

    >>> import jax.numpy as jnp
    >>> query, value = jnp.zeros((1, 3, 1, 2)), jnp.array([3.0, 1.0, 5.0]).reshape(1, 3, 1, 1)
    >>> attention(query, query, value)[0, :, 0, 0]
    Array([3., 2., 3.], dtype=float32)
    """
    _check(query, key, value, positions, segments, sinks)
    refuse_forward_mode(NAME, query, key, value, sinks)
    scale, window = _static(scale, window, query.shape[3])
    batch, length, heads, _ = query.shape
    if 0 in (batch, length, heads, key.shape[1], value.shape[3]):
        return jnp.zeros((batch, length, heads, value.shape[3]), query.dtype)
    positions = None if positions is None else int32(positions)
    segments = None if segments is None else segment_numbers(segments)
    target = target_hardware(hardware, (query, key, value))
    arrays = structs(query=query, key=key, value=value, positions=positions, segments=segments, sinks=sinks)
    options = {"scale": scale, "window": window, **placement(query, key, value)}
    kernels = select_kernels(NAME, implementation, target, arrays=arrays, options=options)
    static = _StaticPart(kernels, scale, window)
    if positions is None:
        return _attention(static, Operands(query, key, value, None, segments, sinks))[0]
    # What stands in a query that sees nothing reaches nothing, NaN included; and so for its cotangent.
    seeing = sees_any_slot(positions, key.shape[1], window)[:, :, None, None]
    out, _ = _attention(static, Operands(jnp.where(seeing, query, 0), key, value, positions, None, sinks))
    return jnp.where(seeing, out, 0)


def _static(scale: Any, window: Any, width: int) -> tuple[float, int | None]:
    """Check the two static options, and make them Python numbers."""
    if scale is None:
        scale = width**-0.5
    elif isinstance(scale, jax.Array) or not isinstance(scale, float | int):
        raise TypeError(f"{NAME}: expected scale to be a static float, got {scale!r}; scale the queries by an array")
    if window is None:
        return float(scale), None
    if isinstance(window, bool) or not hasattr(window, "__index__") or isinstance(window, jax.core.Tracer):
        raise TypeError(f"{NAME}: expected window to be a static int, got {window!r}")
    window = operator.index(window)
    if window < 1:
        raise ValueError(f"{NAME}: expected window >= 1, got {window}; a query sees itself, or pass None for all")
    return float(scale), window if window < 2**31 else None


def _check(query: Any, key: Any, value: Any, positions: Any, segments: Any, sinks: Any) -> None:
    check_array(NAME, "query", query, "B S N H")
    check_array(NAME, "key", key, "B L M H")
    check_array(NAME, "value", value, "B L M W")
    batch, length, heads, width = query.shape
    for name, array in (("key", key), ("value", value)):
        check_size(NAME, f"B of {name}", batch, array.shape[0], "give one sequence of slots for each of queries")
        if array.dtype != query.dtype:
            raise TypeError(f"{NAME}: expected {name} of the query's type {query.dtype}, got {array.dtype}; cast it")
    check_size(NAME, "H of key", width, key.shape[3], "queries and keys are as wide as each other")
    check_size(NAME, "L of value", key.shape[1], value.shape[1], "give one value for each key")
    check_size(NAME, "M of value", key.shape[2], value.shape[2], "give one value for each key")
    if width == 0 or key.shape[2] == 0:
        raise ValueError(f"{NAME}: expected H >= 1 and M >= 1, got key [B L M H] = {list(key.shape)}")
    if heads % key.shape[2]:
        raise ValueError(
            f"{NAME}: expected N, the query heads, to be a multiple of M, the key heads, got N = {heads} and "
            f"M = {key.shape[2]}; check which heads these are"
        )
    if positions is None:
        check_size(NAME, "L without positions", length, key.shape[1], "give the positions of the queries in the cache")
    else:
        check_array(NAME, "positions", positions, "B S", integer=True)
        check_size(NAME, "positions.shape[0]", batch, positions.shape[0], "give one position for each query")
        check_size(NAME, "positions.shape[1]", length, positions.shape[1], "give one position for each query")
    if segments is not None:
        if positions is not None:
            raise ValueError(f"{NAME}: expected segments or positions, got both; slots of a cache have no segment")
        check_array(NAME, "segments", segments, "B S", integer=True)
        check_size(NAME, "segments.shape[0]", batch, segments.shape[0], "give one segment for each query")
        check_size(NAME, "segments.shape[1]", length, segments.shape[1], "give one segment for each query")
    if sinks is not None:
        check_array(NAME, "sinks", sinks, "N")
        check_size(NAME, "len(sinks)", heads, sinks.shape[0], "give one sink for each query head")


def _value(static, operands):
    return static.kernels.forward(operands, scale=static.scale, window=static.window)


def _forward(static, operands):
    # Named here, where they become what the backward pass reads: a name given to the result outside would be a copy's.
    out, logsumexp = (checkpoint_name(array, "attn_out") for array in _attention(static, operands))
    return (out, logsumexp), (operands, out, logsumexp)


def _backward(static, residuals, cotangents):
    cotangent, _ = cotangents  # only the backward pass reads the logsumexp
    return (_gradients(static, *residuals, cotangent),)


def _gradients_value(static, operands, out, logsumexp, cotangent):
    gradients = static.kernels.backward(operands, out, logsumexp, cotangent, scale=static.scale, window=static.window)
    dquery, dkey, dvalue, dsinks = gradients
    return Operands(dquery, dkey, dvalue, None, None, dsinks)


def _gradients_forward(static, operands, out, logsumexp, cotangent):
    return _gradients(static, operands, out, logsumexp, cotangent), (operands, cotangent)


def _gradients_backward(static, residuals, cotangents):
    """Take derivatives of the gradients, hence of any order, from the reference, which holds all scores at once."""
    operands, cotangent = residuals
    floating = operands._replace(positions=None, segments=None)

    def gradients(floating, cotangent):
        whole = floating._replace(positions=operands.positions, segments=operands.segments)
        results = reference.backward(whole, None, None, cotangent, scale=static.scale, window=static.window)
        dquery, dkey, dvalue, dsinks = results
        return Operands(dquery, dkey, dvalue, None, None, dsinks)

    doperands, dcotangent = jax.vjp(gradients, floating, cotangent)[1](cotangents)
    return (
        doperands,
        None,
        None,
        dcotangent,
    )  # what out and logsumexp add is in it: there they are functions of the rest


_attention = with_gradient(_value, _forward, _backward)
_gradients = with_gradient(_gradients_value, _gradients_forward, _gradients_backward)
