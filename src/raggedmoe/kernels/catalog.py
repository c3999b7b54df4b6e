"""The operations with what tests, verification, benchmark and explanation need of each."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raggedmoe.kernels.example import Example, Spec
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.names import check_known

OPERATION_FILES = ("api", "specs", "bound")  # the files of an operation's folder that are read here


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation's public function, its example calls, and how far rounding may take its results."""

    name: str
    function: Callable[..., Any]
    specs: tuple[Spec, ...]
    quantized_specs: tuple[Spec, ...]  # with quantised operands, which not every implementation takes
    # From an example and the reference's value and gradients, the largest error of each that rounding explains.
    error_bounds: Callable[[Example, Mapping[str, Any]], dict[str, np.ndarray]]

    @property
    def all_specs(self) -> tuple[Spec, ...]:
        """Every example call, plain and with quantised operands."""
        return (*self.specs, *self.quantized_specs)


def operation(name: str) -> Operation:
    """Look up an operation by its name."""
    check_known("operation", name, OPERATIONS)
    api, specs, bound = (importlib.import_module(f"raggedmoe.kernels.{name}.{part}") for part in OPERATION_FILES)
    return Operation(
        name=name,
        function=getattr(api, name),
        specs=specs.SPECS,
        quantized_specs=getattr(specs, "QUANTIZED_SPECS", ()),
        error_bounds=bound.error_bounds,
    )
