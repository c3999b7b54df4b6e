"""One program compiled for one topology: how long it took, what it needs, what it costs, which kernels are in it."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from raggedmoe.aot.topology import Topology, target_topology
from raggedmoe.kernels.chosen import ChosenKernel, chosen_kernels
from raggedmoe.kernels.registry import record_selections


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of one device's HBM that a program needs, by the compiler."""

    arguments: int
    outputs: int
    aliased: int  # of the outputs, what lies where a donated argument was
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The compiler's own count for one device. Inside Pallas kernels it repeats what their authors claim."""

    flops: float
    bytes_accessed: float


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A function as the compiler made it."""

    topology: str
    trace_seconds: float
    compile_seconds: float
    memory: Memory
    cost: Cost
    kernels: tuple[ChosenKernel, ...]
    executable: jax.stages.Compiled | None = field(default=None, repr=False, compare=False)
    traced: Any = field(default=None, repr=False, compare=False)  # the program as a jaxpr
    lowered: Any = field(default=None, repr=False, compare=False)  # and as StableHLO

    def hlo(self) -> str:
        """Return the optimised program as text."""
        if self.executable is None:
            raise ValueError("the program was compiled in another process, which has ended; compile it in this one")
        return self.executable.as_text() or ""


class OutOfHBMError(ValueError):
    """The program does not fit the device; `needed` and `available` are the compiler's figures, in bytes."""

    def __init__(self, needed: int, available: int, message: str) -> None:
        super().__init__(message)
        self.needed, self.available = needed, available


def compile_for(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    topology: Topology,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> Compiled:
    """Compile ``function(*args)`` for one device of a topology, or for a mesh of its devices.

    Args:
      function: pure, as for `jax.jit`.
      args: trees of arrays or of `jax.ShapeDtypeStruct`; only shapes, types and given shardings matter.
      topology: from `find_topology`.
      mesh: from `topology.mesh`; arguments without a sharding are on every device of it.
      donate: numbers of the arguments whose memory the outputs may take.
      options: the compiler's, such as ``{"xla_tpu_scoped_vmem_limit_kib": "65536"}``.
    """
    whole = SingleDeviceSharding(topology.devices[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())

    def with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
        # A concrete array's sharding says where it lies on this machine.
        sharding = getattr(leaf, "sharding", None) if isinstance(leaf, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or whole)

    start = time.perf_counter()
    with target_topology(topology, mesh), record_selections() as selections:
        jitted = jax.jit(function, donate_argnums=donate)
        traced = jitted.trace(*jax.tree.map(with_sharding, args))
        lowered = traced.lower(lowering_platforms=("tpu",))
    lowered_at = time.perf_counter()
    try:
        executable = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise _out_of_hbm(str(error)) or error from None
    return Compiled(
        topology=topology.name,
        trace_seconds=lowered_at - start,
        compile_seconds=time.perf_counter() - lowered_at,
        memory=memory_of(executable),
        cost=cost_of(executable),
        kernels=chosen_kernels(selections),
        executable=executable,
        traced=traced.jaxpr,
        lowered=lowered,
    )


def memory_of(executable: jax.stages.Compiled) -> Memory:
    """Read the memory that a program needs from its compiler."""
    analysis: Any = executable.memory_analysis()
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def cost_of(executable: jax.stages.Compiled) -> Cost:
    """Read the cost of a program from its compiler, which counts a loop's body once."""
    analysis: Any = executable.cost_analysis()
    return Cost(flops=analysis.get("flops", 0.0), bytes_accessed=analysis.get("bytes accessed", 0.0))


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _out_of_hbm(message: str) -> OutOfHBMError | None:
    """Read the compiler's complaint about HBM with its rounded figures; None: it complains about something else."""
    size = r"\(?([\d.]+)([KMGT]?)B?\)?"
    for pattern in (rf"{size} exceeds available HBM {size}", rf"Used {size} of {size} hbm"):
        match = re.search(pattern, message)
        if match:
            needed, available = (round(float(match[i]) * _UNITS[match[i + 1]]) for i in (1, 3))
            return OutOfHBMError(needed, available, message.splitlines()[0])
    return None
