"""A program lowered on this machine, not run: its matrix products, their operations and bytes; compiled if asked for.

Counted in the lowered StableHLO: a loop whose bounds are constants counts as often as it runs, one whose bounds are
data counts once and is named as such, and of the branches of a conditional the costliest counts.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from raggedmoe.aot.case import CompileCase
from raggedmoe.aot.compiled import Cost, Memory, cost_of, memory_of
from raggedmoe.aot.program_text import ProgramCounts, counts_of, write_programs
from raggedmoe.kernels.chosen import ChosenKernel, chosen_kernels
from raggedmoe.kernels.registry import record_selections


@dataclass(frozen=True, kw_only=True)
class Products:
    """The matrix products of a program, or of a part of it."""

    written: int = 0  # in the text
    executed: int = 0  # with the loops that are known
    flops: int = 0
    bytes_touched: int = 0  # their operands and results, each once
    open_loops: int = 0  # loops that run as often as the data says: counted once

    def plus(self, other: "Products", times: int = 1) -> "Products":
        return Products(
            written=self.written + other.written,
            executed=self.executed + times * other.executed,
            flops=self.flops + times * other.flops,
            bytes_touched=self.bytes_touched + times * other.bytes_touched,
            open_loops=self.open_loops + other.open_loops,
        )


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A program as it was lowered: its sizes, products and kernels."""

    seconds: float
    argument_bytes: int
    output_bytes: int
    products: Products
    kernels: tuple[ChosenKernel, ...]
    compiled: "HostProgram | None" = None  # where the case asks for its texts


@dataclass(frozen=True, kw_only=True)
class HostProgram:
    """A program as this machine's compiler made it."""

    compile_seconds: float
    memory: Memory
    cost: Cost
    counts: ProgramCounts


def lower_here(case: CompileCase) -> Lowered:
    """Trace and lower a case's program for this machine. Nothing is allocated: arguments are shapes.

    Where the case names a folder it is compiled as well, and both programs are written there.
    """
    start = time.perf_counter()
    program = case.subject.program()
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), program.args)
    with record_selections() as selections:
        traced = jax.jit(program.function, donate_argnums=program.donate).trace(*args)
        lowered = traced.lower()
    seconds = time.perf_counter() - start
    return Lowered(
        seconds=seconds,
        argument_bytes=_num_bytes(args),
        output_bytes=_num_bytes(traced.jaxpr.out_avals),
        products=count_products(lowered.compiler_ir(dialect="stablehlo")),
        kernels=chosen_kernels(selections),
        compiled=None if case.hlo is None else _compile(lowered, Path(case.hlo)),
    )


def _compile(lowered: jax.stages.Lowered, folder: Path) -> HostProgram:
    start = time.perf_counter()
    executable = lowered.compile()
    seconds = time.perf_counter() - start
    hlo = executable.as_text() or ""
    write_programs(folder, lowered.as_text(), hlo)
    return HostProgram(
        compile_seconds=seconds, memory=memory_of(executable), cost=cost_of(executable), counts=counts_of(hlo)
    )


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def count_products(module: Any) -> Products:
    """Count the products of a StableHLO module, from its function `main` on."""
    functions = {operation.attributes["sym_name"].value: operation for operation in module.body.operations}
    known: dict[str, Products] = {}

    def count_function(name: str) -> Products:
        if name not in known:
            known[name] = count_block(functions[name].regions[0].blocks[0])
        return known[name]

    def count_block(block: Any) -> Products:
        total = Products()
        for operation in block.operations:
            total = total.plus(*count_operation(operation.operation))
        return total

    def count_operation(operation: Any) -> tuple[Products, int]:
        if operation.name == "stablehlo.dot_general":
            return _dot(operation), 1
        if operation.name == "chlo.ragged_dot":
            return _ragged_dot(operation), 1
        if operation.name == "func.call":
            return count_function(operation.attributes["callee"].value), 1
        if operation.name == "stablehlo.while":
            body, trips = count_block(operation.regions[1].blocks[0]), _trips(operation)
            return (body, trips) if trips is not None else (body.plus(Products(open_loops=1)), 1)
        if operation.name in ("stablehlo.case", "stablehlo.if"):
            branches = [count_block(region.blocks[0]) for region in operation.regions]
            costliest = max(branches, key=lambda branch: branch.flops)
            written = sum(branch.written for branch in branches)
            return Products(**{**vars(costliest), "written": written}), 1
        return Products(), 1

    return count_function("main")


def _dot(operation: Any) -> Products:
    lhs, rhs = operation.operands[0].type, operation.operands[1].type
    numbers = operation.attributes["dot_dimension_numbers"]
    contracted = _contracted_dims(str(numbers))
    out = operation.results[0].type
    return _product(2 * math.prod(out.shape) * math.prod(lhs.shape[d] for d in contracted), (lhs, rhs, out))


def _ragged_dot(operation: Any) -> Products:
    """Count each row with its own group's matrix only; what a backend makes of it may be more."""
    lhs, rhs, out = operation.operands[0].type, operation.operands[1].type, operation.results[0].type
    contracted = _contracted_dims(str(operation.attributes["ragged_dot_dimension_numbers"]))
    if out.rank == 3:  # a group's own rows are summed over: the rows are contracted, and shared by the groups
        flops = 2 * math.prod(out.shape[1:]) * lhs.shape[contracted[0]]
    else:
        flops = 2 * math.prod(out.shape) * math.prod(lhs.shape[d] for d in contracted)
    return _product(flops, (lhs, rhs, out))


def _contracted_dims(numbers: str) -> list[int]:
    """Read the left side's contracted dimensions from the printed attribute."""
    text = numbers.partition("lhs_contracting_dimensions = [")[2].partition("]")[0]
    return [int(d) for d in text.split(",") if d.strip()]


def _product(flops: int, types: tuple[Any, ...]) -> Products:
    return Products(written=1, executed=1, flops=flops, bytes_touched=sum(_type_bytes(t) for t in types))


def _type_bytes(tensor: Any) -> int:
    width: Mapping[str, int] = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i8": 1, "i1": 1}
    return math.prod(tensor.shape) * width.get(str(tensor.element_type), 4)


def _trips(loop: Any) -> int | None:
    """Count the turns of a loop that counts by a constant from a constant to a constant, as a scan does."""
    condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
    test = condition.operations[len(condition.operations) - 1].operands[0].owner
    if getattr(test, "name", "") != "stablehlo.compare" or "LT" not in str(test.attributes["comparison_direction"]):
        return None
    counter, limit = test.operands
    number = _argument_number(counter, condition)
    if number is None:
        return None
    end = _constant(limit)
    if end is None and (other := _argument_number(limit, condition)) is not None:
        end = _constant(loop.operands[other]) if _is_unchanged(body, other) else None
    start, step = _constant(loop.operands[number]), _step(body, number)
    if start is None or end is None or not step:
        return None
    return max(0, -(-(end - start) // step))


def _argument_number(value: Any, block: Any) -> int | None:
    return next((i for i, argument in enumerate(block.arguments) if argument == value), None)


def _result(body: Any, number: int) -> Any:
    return body.operations[len(body.operations) - 1].operands[number]


def _is_unchanged(body: Any, number: int) -> bool:
    return _result(body, number) == body.arguments[number]


def _step(body: Any, number: int) -> int | None:
    """Read the constant that is added to a counter in each turn."""
    added: Any = getattr(_result(body, number), "owner", None)
    if getattr(added, "name", "") != "stablehlo.add" or added.operands[0] != body.arguments[number]:
        return None
    return _constant(added.operands[1])


def _constant(value: Any) -> int | None:
    owner: Any = getattr(value, "owner", None)
    if getattr(owner, "name", "") != "stablehlo.constant":
        return None
    entries = list(owner.attributes["value"])
    return int(entries[0]) if len(entries) == 1 else None
