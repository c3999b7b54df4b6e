"""Delayed scaling by hand, in float64: histories of largest values, scales that are made of them, what is clipped.

Nothing is folded here: an operand has one scale, and is what its values stand for.
"""

import numpy as np

from tests.kernels.quantized_training import LARGEST, Rounded, exact, product, round_to


class Histories:
    """The largest values of each operand in the last steps."""

    def __init__(self, length: int) -> None:
        self.length, self.values = length, {}

    def scale(self, name, array, qtype):
        """The scale of a step, made before its own largest value is appended."""
        current = float(np.abs(array[np.isfinite(array)]).max(initial=0))
        before = max(self.values.get(name, [0.0]))
        self.values[name] = [current, *self.values.get(name, [0.0] * self.length)[:-1]]
        largest = before or current
        return largest / LARGEST[qtype] if largest else 1.0


def one_step(config, histories, lhs, weights, sizes, cotangents, *, transpose):
    """The products, and the gradients of the rows and of each weight: a value and a bound for each, by name."""
    ends, live = np.cumsum(sizes), int(np.sum(sizes))
    results = {"dlhs": [np.zeros(lhs.shape), np.zeros(lhs.shape)]}
    rows = quantized(config.rows, histories, "rows", lhs[:live], config.row_scale)
    for number, (weight, cotangent) in enumerate(zip(weights, cotangents)):
        matrices = quantized(config.weights, histories, f"weight{number}", weight, config.weight_scale)
        given = quantized(config.cotangents, histories, f"cotangent{number}", cotangent[:live])
        value = [np.zeros((lhs.shape[0], cotangent.shape[1])) for _ in range(2)]
        dweight = [np.zeros(weight.shape) for _ in range(2)]
        for g, (end, size) in enumerate(zip(ends, sizes)):
            if size == 0:
                continue
            mine = slice(end - size, end)
            matrix = turned(part(matrices, g)) if transpose else part(matrices, g)
            own_rows, own = part(rows, mine), part(given, mine)
            dmatrix = product(turned(own_rows), own)
            for i in range(2):
                value[i][mine] = product(own_rows, matrix)[i]
                results["dlhs"][i][mine] += product(own, turned(matrix))[i]
                dweight[i][g] = dmatrix[i].T if transpose else dmatrix[i]
        results |= {f"value{number}": value, f"dweight{number}": dweight}
    return results


def quantized(qtype, histories, name, array, constant=None):
    if qtype is None:
        return exact(array)
    return round_to(array, qtype, constant or histories.scale(name, array, qtype), ideal=False)


def part(array: Rounded, index) -> Rounded:
    return Rounded(array.values[index], array.slack[index])


def turned(array: Rounded) -> Rounded:
    return Rounded(array.values.T, array.slack.T)
