"""How far rounding may take the value and the gradients of `attention`, to first order.

A query i sees slots j with scores s = scale · Σ q·k, weights p = exp(s − lse), and the sink's weight among them.

- The sum makes an error of at most ``SUM_ROUNDINGS · eps(acc) · a``, a = scale · Σ|q||k|. The scaled queries may be
  rounded to their type: H independent errors, together about ``eps · b``, b = scale · sqrt(Σ q²k²).
- So a weight is off by the relative error of its own score, of lse (at most the largest of the row's), and one rounding
  to the input's type: ``r_i = eps · (1 + 2 max_j b) + SUM_ROUNDINGS · eps(acc) · (1 + 2 max_j a)``.
- The value: ``r_i · Σ_j p|v|``. The gradient of the values: ``Σ_i r_i · p|do|``, twice for its own sum.
- The slopes are g = scale · p · (dp − m), with dp = Σ do·v, and m = Σ_j p·dp read from the rounded output. With
  A = Σ|do||v| and M = Σ_j p·A, they are off by r (A + M) for p, r·A for dp, 2 r·M for m, and r (A + M) when rounded;
  then comes their own sum, and the rounded queries for the keys: ``SLOPE_ROUNDINGS · r_i · scale · p (A + M)``.
- The sinks' gradient is −Σ_i p_sink · m, with the errors of p and of m: ``SLOPE_ROUNDINGS · Σ_i r_i · p_sink · M``.

To each comes the rounding of the result itself, which `error_bounds` adds.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.example import Example
from raggedmoe.kernels.sum_bound import SUM_ROUNDINGS, result_rounding

SLOPE_ROUNDINGS = 6


def error_bounds(example: Example, reference: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Bound the error of every quantity in ``reference``, the value and gradients that the reference computes."""
    errors = rounding_errors(example)
    return {quantity: result_rounding(expected) + errors[quantity] for quantity, expected in reference.items()}


def rounding_errors(example: Example) -> dict[str, np.ndarray]:
    """Bound what all roundings but that of the result make of the value and of each gradient."""
    arrays = {name: np.asarray(array, np.float64) for name, array in example.arrays.items()}
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    cotangent, sinks = np.asarray(example.cotangent, np.float64), arrays.get("sinks")
    scale = query.shape[3] ** -0.5 if example.options["scale"] is None else example.options["scale"]
    dtype = example.arrays["query"].dtype
    eps, sum_eps = float(jnp.finfo(dtype).eps), SUM_ROUNDINGS * float(jnp.finfo(accumulator(dtype)).eps)
    parts = {"value": cotangent, "dquery": query, "dkey": key, "dvalue": value} | (
        {} if sinks is None else {"dsinks": sinks}
    )
    bounds = {name: np.zeros(array.shape) for name, array in parts.items()}
    for b, seen in enumerate(_visible(arrays, example.options["window"])):
        rows = seen.any(1)  # the others have no error: they are zero
        for n in range(query.shape[2]):
            m = n // (query.shape[2] // key.shape[2])
            sink = -np.inf if sinks is None else sinks[n]
            head = (query[b, rows, n], key[b, :, m], value[b, :, m], cotangent[b, rows, n])
            out, dquery, dkey, dvalue, dsink = _one_head(*head, seen[rows], sink, scale, eps, sum_eps)
            bounds["value"][b, rows, n], bounds["dquery"][b, rows, n] = out, dquery
            bounds["dkey"][b, :, m] += dkey
            bounds["dvalue"][b, :, m] += dvalue
            if sinks is not None:
                bounds["dsinks"][n] += dsink
    return bounds


def _visible(arrays: dict[str, np.ndarray], window: int | None) -> np.ndarray:
    """Say whether each query sees each slot, ``[B S L]``."""
    position = arrays.get("positions", np.broadcast_to(np.arange(arrays["query"].shape[1]), arrays["query"].shape[:2]))
    behind = position[:, :, None] - np.arange(arrays["key"].shape[1])[None, None, :]
    seen: np.ndarray = (behind >= 0) & (behind < (np.inf if window is None else window))
    if "segments" in arrays:
        seen &= arrays["segments"][:, :, None] == arrays["segments"][:, None, :]
    return seen


def _one_head(
    query: Any, key: Any, value: Any, cotangent: Any, seen: Any, sink: float, scale: float, eps: float, sum_eps: float
) -> tuple[Any, ...]:
    """Bound the errors of one query head's value and gradients; every query sees something."""
    scores = np.where(seen, scale * (query @ key.T), -np.inf)
    peak = np.maximum(scores.max(1, keepdims=True), sink)
    weights, sink_weight = np.exp(scores - peak), np.exp(sink - peak)
    total = weights.sum(1, keepdims=True) + sink_weight
    weights, sink_weight = weights / total, sink_weight / total

    query, key, value, cotangent = (np.abs(array) for array in (query, key, value, cotangent))
    terms = np.where(seen, scale * (query @ key.T), 0 if sink == -np.inf else abs(sink)).max(1, keepdims=True)
    spread = np.where(seen, scale * np.sqrt(query**2 @ key.T**2), 0).max(1, keepdims=True)
    relative = eps * (1 + 2 * spread) + sum_eps * (1 + 2 * terms)

    products = cotangent @ value.T
    mean = (weights * products).sum(1, keepdims=True)
    slopes = SLOPE_ROUNDINGS * relative * scale * weights * (products + mean)
    dsink = SLOPE_ROUNDINGS * (relative * sink_weight * mean).sum()
    return relative * (weights @ value), slopes @ key, slopes.T @ query, 2 * (relative * weights).T @ cotangent, dsink
