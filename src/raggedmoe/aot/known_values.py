"""The integers that steer kernels, from those that a call is given: metadata computed from group sizes, and the like.

Two ways lead to a kernel's scalar operands. A Pallas kernel is an equation of the traced program: all that leads there
from known integers is evaluated on this machine, and nothing else. A kernel that XLA puts in by itself (a ragged dot's)
is a custom call of the compiled program: its operands are followed back to the program's parameters, or to the outputs
of another kernel.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

MAX_ELEMENTS = 2**20  # what is larger steers nothing, and is not evaluated
KERNELS = ("pallas_call", "mpmd_map")  # the second: `pl.kernel` from JAX 0.12 on
# Equations that only wrap others, and the parameter that holds them.
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
# Their functions are also programs, but not ones that run once from their operands to their results.
NO_CALLS = ("scan", "while", "cond", "scatter-add", "scatter", "reduce", "reduce_window", "sort")

Values = Sequence[int | None]


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """A kernel in a traced program: its operands' shapes, and the values of those that are known."""

    shapes: tuple[tuple[int, ...], ...]
    values: Mapping[int, Values]  # by the operand's number


def kernel_calls(traced: ClosedJaxpr, arguments: Sequence[Any]) -> list[KernelCall]:
    """List the kernels of a traced program (Pallas calls, ragged dots). Arguments that are shapes are unknown."""
    calls: list[KernelCall] = []
    known = [np.asarray(a) if isinstance(a, jax.Array | np.ndarray) else None for a in arguments]
    _evaluate(traced.jaxpr, traced.consts, known, calls)
    return calls


def _evaluate(program: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], calls: list[KernelCall]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(program.constvars, consts)) | dict(zip(program.invars, arguments))

    def value(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values.get(variable)

    for equation in program.eqns:
        operands = [value(variable) for variable in equation.invars]
        results = _results(equation, operands, calls)
        values.update(zip(equation.outvars, results))
    return [value(variable) for variable in program.outvars]


def _results(equation: Any, operands: list[Any], calls: list[KernelCall]) -> list[Any]:
    """Compute what an equation gives; None for what is not known."""
    name, unknown = equation.primitive.name, [None] * len(equation.outvars)
    if name in KERNELS:
        calls.append(_kernel_call(equation.invars, operands))
        return unknown
    if name == "ragged_dot_general":  # XLA's own kernel: a program of its own turns the group sizes into tiles
        sizes = equation.invars[2]
        calls.append(_kernel_call([sizes], operands[2:3]))
        return unknown
    inner = next((equation.params[key] for key in CALLS if key in equation.params), None)
    if name not in NO_CALLS and isinstance(inner, ClosedJaxpr | Jaxpr):
        closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
        return _evaluate(closed.jaxpr, closed.consts, operands, calls)
    large = any(np.prod(v.aval.shape, dtype=np.int64) > MAX_ELEMENTS for v in equation.outvars)
    if large or any(operand is None for operand in operands):
        return unknown
    results = equation.primitive.bind(*operands, **equation.params)
    return list(results) if equation.primitive.multiple_results else [results]


def _kernel_call(variables: Sequence[Any], operands: Sequence[Any]) -> KernelCall:
    integer = {
        number: [int(entry) for entry in np.asarray(operand).reshape(-1)]
        for number, operand in enumerate(operands)
        if operand is not None and np.issubdtype(np.asarray(operand).dtype, np.integer)
    }
    return KernelCall(shapes=tuple(tuple(v.aval.shape) for v in variables), values=integer)


_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z\-]+)\((.*?)\)(?:, |$)(.*)")
_SHAPE = re.compile(r"^\(?s32\[([\d,]*)\]")
# What only moves or renames its operand.
SAME = ("copy", "copy-start", "copy-done", "bitcast", "reshape")


class CustomCalls:
    """The kernels that a compiled program calls, and the values of their operands, as far as they are known."""

    def __init__(self, hlo: str, arguments: Sequence[Any], outputs: Callable[[str], Mapping[int, Values]]) -> None:
        """Find the kernels' calls in a compiled program.

        Args:
          hlo: the compiled program.
          arguments: its arguments in any order: a parameter is known by its shape, if one known argument alone has it.
          outputs: returns another custom call's outputs, each by its number among the call's operands and outputs.
        """
        self._outputs = outputs
        self._lines: dict[str, tuple[str, str, list[str], str]] = {}
        for text in hlo.partition("\nENTRY ")[2].splitlines():
            if line := _LINE.match(text):
                self._lines[line[1]] = (line[2], line[3], re.findall(r"%([\w.\-]+)", line[4]), line[5])
        self._known: dict[tuple[int, ...], list[Values]] = {}
        for argument in arguments:
            if isinstance(argument, jax.Array | np.ndarray) and np.issubdtype(argument.dtype, np.integer):
                flat = [int(value) for value in np.asarray(argument).reshape(-1)]
                self._known.setdefault(tuple(argument.shape), []).append(flat)

    def __contains__(self, name: str) -> bool:
        return name in self._lines and self._lines[name][1] == "custom-call"

    def operands(self, name: str) -> dict[int, Values]:
        """Return the known operands of one call, by number."""
        operands = self._lines[name][2] if name in self else []
        values = {number: self._values(operand) for number, operand in enumerate(operands)}
        return {number: known for number, known in values.items() if known is not None}

    def _values(self, name: str) -> Values | None:
        if name not in self._lines:
            return None
        kind, opcode, operands, rest = self._lines[name]
        if opcode == "parameter" and (shape := _SHAPE.match(kind)):
            same = self._known.get(tuple(int(size) for size in shape[1].split(",") if size), [])
            return same[0] if len(same) == 1 else None
        if opcode in SAME:
            return self._values(operands[0])
        if opcode == "get-tuple-element" and operands[0] in self:
            number = re.match(r"index=(\d+)", rest)
            assert number is not None
            return self._outputs(operands[0]).get(len(self._lines[operands[0]][2]) + int(number[1]))
        if opcode == "custom-call":
            return self._outputs(name).get(len(operands))
        return None
