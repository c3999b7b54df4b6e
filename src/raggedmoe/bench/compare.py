"""Whether two contenders computed the same: digests of an array, one line for each row or expert.

A line has the sum of squares of that row's (or expert's) elements and their sum with random signs. A row that was left
out, or computed by another expert, changes both by about as much as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

# How many roundings to the type may add up, each by half an eps at worst: a result goes through about ten in a library
# that rounds after every operation (both projections, the activation's two, their product, the third projection, the
# router's logit and weight, the weighted row, the sum). Routers' gradients are differences of such sums.
ROUNDINGS = {"drouter": 40}
MOST_ROUNDINGS = 10
SMALL_ROW = 0.1  # of the rows' root mean square
SIGN_DEVIATIONS = 6  # a sum with random signs has the norm as its standard deviation


@dataclass(frozen=True)
class Digests:
    """One line for each index of an array's first axis."""

    squares: np.ndarray
    signed: np.ndarray

    @classmethod
    def join(cls, parts: Iterable["Digests"]) -> "Digests":
        """Put the lines of several arrays after each other."""
        parts = list(parts)
        return cls(np.concatenate([p.squares for p in parts]), np.concatenate([p.signed for p in parts]))

    def as_lists(self) -> dict[str, list[float]]:
        """Return the lines as lists, for JSON."""
        return {"squares": self.squares.tolist(), "signed": self.signed.tolist()}

    @classmethod
    def from_lists(cls, lists: Mapping[str, list[float]]) -> "Digests":
        """Read what `as_lists` wrote."""
        return cls(np.asarray(lists["squares"], np.float64), np.asarray(lists["signed"], np.float64))


def digest(array: np.ndarray) -> Digests:
    """Digest an array of any floating type, one index of the first axis at a time."""
    signs = [_signs(size, axis) for axis, size in enumerate(array.shape[1:])]
    squares, signed = np.empty(array.shape[0]), np.empty(array.shape[0])
    for index, line in enumerate(array):
        line = np.asarray(line, np.float32)
        squares[index] = np.vdot(line, line)
        for sign in reversed(signs):
            line = line @ sign
        signed[index] = line
    return Digests(squares, signed)


def _signs(size: int, axis: int) -> np.ndarray:
    return np.random.default_rng(axis).choice(np.asarray([-1, 1], np.float32), size)


def difference(
    results: Mapping[str, Digests],
    expected: Mapping[str, Digests],
    dtype: str,
    inner: int,
    roundings: int | None = None,
) -> str | None:
    """Say what is wrong with a contender's results, or None.

    ``inner`` is the longest sum in it, ``roundings`` how many roundings to the type may add up, if not as in a layer.
    Sums are in float32, whose rounding errors grow with the root of their length; roundings to the type come on top.
    """
    if results.keys() != expected.keys():
        return f"expected {', '.join(expected)}, got {', '.join(results) or 'nothing'}"
    eps, sum_eps = float(jnp.finfo(dtype).eps), float(jnp.finfo(jnp.float32).eps)
    for name, want in expected.items():
        have = results[name]
        if have.squares.shape != want.squares.shape:
            return f"{name}: expected {want.squares.size} rows, got {have.squares.size}"
        allowed = (roundings or ROUNDINGS.get(name, MOST_ROUNDINGS)) * eps / 2 + 4 * sum_eps * inner**0.5
        norm = np.sqrt(want.squares)
        # Of a row that should be zero, or nearly, rounding leaves a small part of what is in the others.
        scale = norm + SMALL_ROW * np.sqrt(want.squares.mean())
        error = np.abs(np.sqrt(have.squares) - norm) / np.maximum(scale, np.finfo(np.float32).tiny)
        signed = np.abs(have.signed - want.signed) / np.maximum(scale * SIGN_DEVIATIONS, np.finfo(np.float32).tiny)
        share = np.maximum(error, signed)
        worst = int(np.argmax(np.nan_to_num(share, nan=np.inf)))
        if not share[worst] <= allowed:
            return f"{name}[{worst}] is {share[worst]:.1e} of its norm from the reference's, allowed {allowed:.1e}"
    return None
