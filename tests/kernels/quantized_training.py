"""Matmuls that quantise their operands, by hand in float64: what is multiplied forward, and in both gradients.

Each quantised array comes with a slack: what float32 may do to its scales and products, and where that decides between
two codes, the distance of these.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from raggedmoe.kernels.sum_bound import SUM_ROUNDINGS
from tests.kernels.quantized_oracle import VALUES, nearest_codes

EPS = float(np.finfo(np.float32).eps)
# Of a product with a folded scale, the two factors of its own scale, and what is dequantised.
ROUNDINGS = 4
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# The largest error of a rounded value: relative, and where steps no longer shrink, absolute.
UNIT = {"float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17), "int8": (0.0, 0.5)}


@dataclass(frozen=True)
class Rounded:
    """An array, how far the one that was multiplied may be from it, and what is multiplied with no scale."""

    values: np.ndarray
    slack: np.ndarray


def exact(array: np.ndarray) -> Rounded:
    return Rounded(array, np.zeros_like(array))


def round_to(array: np.ndarray, qtype: str | None, scale: np.ndarray, *, ideal: bool) -> Rounded:
    """Quantise by hand; ``ideal`` keeps the array itself, with all that rounding may do to it as the slack."""
    if qtype is None:
        return exact(array)
    scale = np.broadcast_to(scale, array.shape)
    ratio = np.clip(array / scale, -LARGEST[qtype], LARGEST[qtype])
    if ideal:
        relative, least = UNIT[qtype]
        clipped = np.abs(array - ratio * scale)
        return Rounded(array, np.maximum(relative * np.abs(array), least * scale) * (1 + 8 * EPS) + clipped)
    codes, low, high = (nearest_codes(ratio * factor, qtype) for factor in (1, 1 - 8 * EPS, 1 + 8 * EPS))
    values = VALUES[qtype][codes] * scale
    undecided = np.abs(VALUES[qtype][high] - VALUES[qtype][low]) * scale
    return Rounded(values, undecided + ROUNDINGS * EPS * np.abs(values))


def absmax(array: np.ndarray, qtype: str | None, blocks: tuple[int, ...], constant: float | None) -> np.ndarray:
    """The scale of each element: the largest absolute value of its block over the largest of the format."""
    if qtype is None or constant is not None:
        return np.full(array.shape, 1.0 if constant is None else constant)
    scale = np.ones(array.shape)
    for first in np.ndindex(*(size // block for size, block in zip(array.shape, blocks))):
        place = tuple(slice(i * block, (i + 1) * block) for i, block in zip(first, blocks))
        largest = np.abs(array[place]).max()
        scale[place] = largest / LARGEST[qtype] if largest else 1
    return scale


def product(left: Rounded, right: Rounded) -> tuple[np.ndarray, np.ndarray]:
    """The product, and how far it may be off: by the slack of its operands, and by the rounding of its sums."""
    a, b = np.abs(left.values), np.abs(right.values)
    slack = a @ right.slack + left.slack @ b + left.slack @ right.slack
    return left.values @ right.values, slack + SUM_ROUNDINGS * EPS * (a @ b)


def expected(config: Any, lhs, weights, sizes, cotangents, *, transpose: bool, ideal: bool = False):
    """The products, and the gradients of the rows and of each weight: a value and a bound for each, by name.

    With ``ideal`` the values are of arrays that nothing has rounded.
    """
    ends = np.cumsum(sizes)
    results = {"dlhs": _nothing(lhs.shape)}
    for number, (weight, cotangent) in enumerate(zip(weights, cotangents)):
        value, dweight = _nothing((lhs.shape[0], cotangent.shape[1])), _nothing(weight.shape)
        column = _column_shares(config, lhs, weight, cotangent, sizes, transpose=transpose)
        for g, (end, size) in enumerate(zip(ends, sizes)):
            if size == 0:
                continue
            mine = slice(end - size, end)
            matrix = weight[g].T if transpose else weight[g]  # [I O]
            _one_group(config, lhs[mine], matrix, cotangent[mine], column, results["dlhs"], mine, value, ideal)
            of_weight = _of_weight(config, lhs[mine], cotangent[mine], column, ideal)
            for total, part in zip(dweight, of_weight):
                total[g] = part.T if transpose else part
        results |= {f"value{number}": value, f"dweight{number}": dweight}
    return results


def _nothing(shape):
    return np.zeros(shape), np.zeros(shape)


def _rows_scale(config, rows):
    return absmax(rows, config.rows, (1, config.block or rows.shape[1]), config.row_scale)


def _one_group(config, rows, matrix, cotangent, column, dlhs, mine, value, ideal):
    block = config.block
    row_scale = _rows_scale(config, rows)
    scale = absmax(matrix, config.weights, (block, block) if block else (matrix.shape[0], 1), config.weight_scale)
    left, right = (
        round_to(array, qtype, by, ideal=ideal)
        for array, qtype, by in ((rows, config.rows, row_scale), (matrix, config.weights, scale))
    )
    for total, part in zip(value, product(left, right)):
        total[mine] = part
    if config.cotangents is None:
        parts = product(exact(cotangent), Rounded(right.values.T, right.slack.T))
    else:
        fold = np.ones_like(scale) if block else scale
        folded = cotangent * fold[:1]
        by = absmax(folded, config.cotangents, (1, block or folded.shape[1]), config.cotangent_scale)
        values, slack = (array / fold for array in (right.values, right.slack))
        parts = product(round_to(folded, config.cotangents, by, ideal=ideal), Rounded(values.T, slack.T))
    for total, part in zip(dlhs, parts):
        total[mine] += part


def _folded(config, rows, cotangent):
    """The cotangent times the scales of the rows, where they can be folded, and what is left of the rows' scales."""
    scale = _rows_scale(config, rows)
    folds = config.rows is not None and config.cotangents is not None and config.block is None
    return (cotangent * scale[:, :1], scale) if folds else (cotangent, np.ones_like(scale))


def _column_shares(config, lhs, weight, cotangent, sizes, *, transpose):
    """The largest share of its group's largest value in each column, over the largest value of the format."""
    if config.cotangents is None:
        return None
    ends, largest = np.cumsum(sizes), np.zeros(cotangent.shape[1])
    for end, size in zip(ends, sizes):
        if size:
            folded = np.abs(_folded(config, lhs[end - size : end], cotangent[end - size : end])[0])
            largest = np.maximum(largest, (folded / folded.max()).max(0))
    return largest / LARGEST[config.cotangents]


def _of_weight(config, rows, cotangent, column, ideal):
    left = round_to(rows, config.rows, _rows_scale(config, rows), ideal=ideal)
    if config.cotangents is None:
        return product(Rounded(left.values.T, left.slack.T), exact(cotangent))
    folded, scale = _folded(config, rows, cotangent)
    by = np.abs(folded).max() * column if config.cotangent_scale is None else config.cotangent_scale
    right = round_to(folded, config.cotangents, by, ideal=ideal)
    return product(Rounded((left.values / scale).T, (left.slack / scale).T), right)
