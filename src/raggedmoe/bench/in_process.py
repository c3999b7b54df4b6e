"""What is measured in this process instead: operations without peers from outside JAX, and everything on a GPU or TPU.

An accelerator belongs to one process, and has no thread pools that would fight.
"""

from collections.abc import Iterator

from raggedmoe.bench.cases import LIMIT, Timing, layer_timings, operation_timings, sweep_timings
from raggedmoe.bench.contender import LIMIT as LIMIT_ROLE
from raggedmoe.bench.contender import NOTE, OURS, PEER
from raggedmoe.bench.run import Result
from raggedmoe.bench.training import train_timings
from raggedmoe.kernels.registry import OPERATIONS, implementations


def results_in_process(subject: str, dtype: str, rounds: int, only: str) -> Iterator[list[Result]]:
    """Measure a subject's cases; the limit is XLA's matmul of the same type, or a copy."""
    functions = {"layer": layer_timings, "train": train_timings, "sweep": sweep_timings}
    if subject in functions:
        groups = functions[subject](dtype, rounds, only)
    else:
        groups = operation_timings(subject, dtype, rounds, only)
    for group in groups:
        yield [_result(subject, timing, rounds) for timing in group]


def _result(subject: str, timing: Timing, rounds: int) -> Result:
    known = implementations(subject) if subject in OPERATIONS else {}
    role = PEER if subject in OPERATIONS and timing.contender not in known else OURS
    role = {LIMIT: LIMIT_ROLE, "reading the weights": NOTE}.get(timing.contender, role)
    words = timing.case.removeprefix(subject).split()
    return Result(
        case=timing.case,
        subject=subject,
        shape=words[0] if words else timing.case,
        dtype=timing.dtype,
        direction=words[-1] if len(words) > 1 else "forward",
        contender=timing.contender,
        role=role,
        seconds=timing.seconds,
        turns=rounds,
        gflops=timing.gflops or None,
        of_limit=timing.of_limit,
    )
