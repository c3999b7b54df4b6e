"""The operations with what tests, verification, benchmark and explanation need of each."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raggedmoe.kernels.example import Spec
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.names import unknown


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation's public function and its example calls."""

    name: str
    function: Callable[..., Any]
    specs: tuple[Spec, ...]


def operation(name: str) -> Operation:
    """The operation with that name."""
    if name not in OPERATIONS:
        raise unknown("operation", name, OPERATIONS)
    function = getattr(importlib.import_module(f"raggedmoe.kernels.{name}.api"), name)
    specs = importlib.import_module(f"raggedmoe.kernels.{name}.specs").SPECS
    return Operation(name=name, function=function, specs=specs)
