"""Everything that depends on the JAX version: the table of broken versions, and the APIs that they spell differently.

No other file reads a JAX version.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from packaging.version import Version

JAX_VERSION: str = jax.__version__


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A kernel is broken on the JAX versions in ``[broken_from, fixed_in)``; None leaves that side open."""

    implementation: str  # "operation/name", or "*" for all
    broken_from: str | None = None
    fixed_in: str | None = None
    reason: str  # what goes wrong there
    evidence: str  # how it was found: the test, the compile or the thread that showed it


GUARDS: tuple[Guard, ...] = (
    Guard(
        implementation="*",
        fixed_in="0.10.2",
        reason="raggedmoe is tested from JAX 0.10.2 on",
        evidence="the oldest version in .ci/run",
    ),
)


# Before JAX 0.12, XLA's CPU backend widens a whole bfloat16 array to float32 to take slices of it in a loop: experts
# without rows then cost as much as those with. Seen on 0.10.2 and 0.11.0, gone on 0.12.0 (docs/log.md, few tokens).
SLICES_BF16_BY_WIDENING_ALL: bool = Version(JAX_VERSION) < Version("0.12")


def version_why_not(
    implementation: str, jax_version: str = JAX_VERSION, guards: tuple[Guard, ...] = GUARDS
) -> str | None:
    """Return the reason why the kernel ``operation/name`` cannot be used on that JAX version, or None."""
    version = Version(jax_version)
    for guard in guards:
        if guard.implementation not in ("*", implementation):
            continue
        # A development build of the first fixed version may precede the fix: it counts as broken, by PEP 440's order.
        after_start = guard.broken_from is None or version >= Version(guard.broken_from)
        before_end = guard.fixed_in is None or version < Version(guard.fixed_in)
        if after_start and before_end:
            remedy = f"use JAX {guard.fixed_in} or newer" if guard.fixed_in else f"use JAX before {guard.broken_from}"
            return f"JAX {jax_version}: {guard.reason}; {remedy} ({guard.evidence})"
    return None


def in_versions(jax_version: str, first: str | None, last: str | None) -> bool:
    """Tell whether ``first <= jax_version <= last``; None leaves a side open."""
    version = Version(jax_version)
    return (first is None or version >= Version(first)) and (last is None or version <= Version(last))


class PushStream(NamedTuple):
    """An asynchronous copy from the memory of a SparseCore subcore to HBM."""

    start: Callable[[], None]
    wait_read: Callable[[], None]  # until its source may be overwritten
    wait_all_arrived: Callable[[], None]  # until every such copy that was read is where it belongs


def push_stream(source: Any, target: Any, semaphore: Any) -> PushStream:
    """Describe the copy of ``source`` to ``target``, in HBM, which a semaphore counts.

    JAX 0.10.2 counts it on the copy's only semaphore, and that is all there is to wait for. JAX 0.12 ignores that one,
    with a warning; it has one for the source, and a wait without semaphores is a fence (sfence.stream.hbm). A copy is
    made when it is started or waited for: JAX logs an error for each that was made and not used.
    """
    pltpu, plsc = _pallas_tpu()
    if hasattr(plsc, "SparseCorePushStreamWarning"):
        return PushStream(
            lambda: pltpu.make_async_copy(source, target, None, src_sem=semaphore).start(),
            lambda: pltpu.make_async_copy(source, target, None, src_sem=semaphore).wait_read(),
            lambda: pltpu.make_async_copy(source, target, None).wait(),
        )
    return PushStream(
        lambda: pltpu.make_async_copy(source, target, semaphore).start(),
        lambda: pltpu.make_async_copy(source, target, semaphore).wait(),
        lambda: None,
    )


def vector_bitcast(vector: Any, dtype: Any) -> Any:
    """Reinterpret the bits of a SparseCore vector as another type; JAX 0.12 calls it a bitcast along a dimension."""
    pltpu, plsc = _pallas_tpu()
    if "dim" in inspect.signature(pltpu.bitcast).parameters:
        return pltpu.bitcast(vector, dtype, dim=-1)
    return plsc.bitcast(vector, dtype)


def _pallas_tpu() -> tuple[Any, Any]:
    """Import Pallas for TensorCores and for SparseCores, which happens only once a kernel that needs them is called."""
    from jax.experimental.pallas import tpu, tpu_sc

    return tpu, tpu_sc


class Coordination(NamedTuple):
    """The service through which the processes of a run find each other."""

    client: Any  # keys and values, barriers
    address: str  # host:port of process 0
    process: int  # this one
    num_processes: int


def coordination() -> Coordination:
    """Return the coordination service of a process that has called `jax.distributed.initialize`.

    JAX has no public name for it; orbax reads it too.
    Unlike `jax.process_index`, it starts no backend.
    """
    from jax._src import distributed

    state = distributed.global_state
    assert state.client is not None, "jax.distributed is not initialised"
    assert state.coordinator_address is not None
    return Coordination(state.client, state.coordinator_address, state.process_id, state.num_processes)


def get_key_value(client: Any, key: str) -> str | None:
    """Read a key of the coordination service without waiting for it; None if nobody has set it."""
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise
