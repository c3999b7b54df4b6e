"""How a checkpoint lays out a tensor, written with the axis names of our `ParamSpec`.

``"(head head_dim) model_dim"`` is a matrix whose rows are heads and head_dim folded together. Of a tensor that holds
several of our parameters, ``nope_dim+value_dim`` is a dimension with one after the other, and ``&`` one that counts
them, as gpt-oss interleaves gate and up. Reshapes and transposes follow from the names alone.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raggedmoe.params import ParamSpec

PARTS = "&"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parsed layout: the stored dimensions, each a fold of atoms."""

    text: str
    folds: tuple[tuple[str, ...], ...]

    @property
    def atoms(self) -> tuple[str, ...]:
        return tuple(atom for fold in self.folds for atom in fold)


def layout(text: str) -> Layout:
    """Parse a layout's text."""
    folds = [tuple(found.strip("()").split()) for found in re.findall(r"\([^)]*\)|\S+", text)]
    return Layout(text=text, folds=tuple(folds))


def _sizes(given: Layout, specs: Sequence[ParamSpec]) -> dict[str, int]:
    """The size of each atom."""
    known: dict[str, int] = {PARTS: len(specs)}
    for spec in specs:
        known.update(zip(spec.axes, spec.shape))
    for atom in given.atoms:
        if "+" in atom:
            known[atom] = sum(known[name] for name in atom.split("+"))
    return {atom: known[atom] for atom in given.atoms}


def stored_shape(given: Layout, specs: Sequence[ParamSpec]) -> tuple[int, ...]:
    """The shape that the checkpoint's tensor must have."""
    sizes = _sizes(given, specs)
    return tuple(math.prod(sizes[atom] for atom in fold) for fold in given.folds)


def parts_of(stored: np.ndarray, given: Layout, specs: Sequence[ParamSpec], num_first: int) -> list[np.ndarray]:
    """Views of each parameter, with its own axes' order, in (some rows of) a stored tensor.

    ``num_first`` is the size of the layout's first atom in what is given: pieces are cut along it.
    """
    sizes = _sizes(given, specs)
    whole = stored.reshape([num_first, *[sizes[atom] for atom in given.atoms[1:]]])
    views = []
    for number, spec in enumerate(specs):
        index: list[slice | int] = []
        names = []
        for atom in given.atoms:
            if atom == PARTS:
                index.append(number)
                continue
            if "+" in atom:
                axes = atom.split("+")
                start = sum(specs[i].shape[specs[i].axes.index(axes[i])] for i in range(number))
                index.append(slice(start, start + spec.shape[spec.axes.index(axes[number])]))
                names.append(axes[number])
            else:
                index.append(slice(None))
                names.append(atom)
        views.append(whole[tuple(index)].transpose([names.index(axis) for axis in spec.axes]))
    return views


def first_axis(given: Layout, spec: ParamSpec) -> int:
    """Which of a parameter's axes is the layout's first atom, along which pieces are cut."""
    return spec.axes.index(given.atoms[0])
