"""`raggedmoe verify`: is every kernel that runs here right?"""

import dataclasses
import sys
import time
from collections.abc import Iterator
from json import dumps

import tyro
from rich.console import Console
from rich.progress import Progress

from raggedmoe import compat
from raggedmoe.hardware import target_hardware
from raggedmoe.kernels.catalog import Operation, operation
from raggedmoe.kernels.proof import (
    Certificate,
    drop_certificates,
    folder_to_write,
    libtpu_version,
    source_digest,
    write_certificate,
)
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.verify.check import Check, check

DTYPES = ("float32", "bfloat16")


def verify(
    operations: tyro.conf.Positional[tuple[str, ...]] = (),
    quick: bool = False,
    every: bool = False,
    json: bool = False,
) -> int:
    """Compare every kernel that can run here with the reference: values and all gradients, over all example calls.

    Each difference is held against a bound derived from the arithmetic (docs/verify.md). An implementation that passes
    everything gets a certificate for this chip and JAX version, which `auto` reads from then on. The exit code is 1 if
    anything fails.

    Args:
        operations: which of the operations; all by default.
        quick: leave out the example calls of a real model's size, and write no certificate.
        every: print every comparison instead of the worst of each kind.
        json: print all comparisons as JSON instead of a table.
    """
    chip, console = target_hardware(), Console(stderr=json)
    folder = None if quick else folder_to_write()  # or an error, before minutes of work
    chosen = [operation(name) for name in operations or OPERATIONS]
    checks, seconds = _run(chosen, quick)
    failed = [c for c in checks if not c.passed]
    for c in failed:
        for path in drop_certificates(f"{c.operation}/{c.implementation}", chip.name):
            console.print(f"certificate withdrawn: {path}")
    if json:
        print(dumps([{**dataclasses.asdict(c), "passed": c.passed} for c in checks], indent=1))
    for line in () if json else _report(checks, every):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"{len(checks) - len(failed)} of {len(checks)} comparisons within their bound on {chip.name}, "
        f"JAX {compat.JAX_VERSION}"
    )
    if folder is not None:
        for certificate in _certificates(checks, seconds, chip.name):
            console.print(f"certificate: {write_certificate(certificate, folder)}")
    return 1 if failed else 0


def _run(chosen: list[Operation], quick: bool) -> tuple[list[Check], dict[str, float]]:
    work = [
        (op, spec, dtype) for op in chosen for spec in op.all_specs if not (quick and spec.large) for dtype in DTYPES
    ]
    checks: list[Check] = []
    seconds: dict[str, float] = {}
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("verify", total=len(work))
        for op, spec, dtype in work:
            progress.update(task, description=f"{op.name} {spec.name} {dtype}")
            start = time.perf_counter()
            checks.extend(check(op, None, spec, dtype))
            seconds[op.name] = seconds.get(op.name, 0.0) + time.perf_counter() - start
            progress.advance(task)
    return checks, seconds


def _report(checks: list[Check], every: bool) -> Iterator[str]:
    """Write every comparison, or for each kind the one that comes nearest to its bound."""
    worst: dict[tuple[str, ...], Check] = {}
    for c in checks:
        key = (c.operation, c.implementation, c.dtype, c.quantity, c.spec if every else "")
        if key not in worst or (not c.passed, c.share) > (not worst[key].passed, worst[key].share):
            worst[key] = c
    yield f"[dim]{'':2}{'quantity':<14} {'example':<20} {'error':>8} {'bound':>8} {'share':>6}[/]"
    title = ""
    for c in sorted(worst.values(), key=lambda c: (OPERATIONS.index(c.operation), c.implementation, c.dtype)):
        if title != (title := f"{c.operation}/{c.implementation} {c.dtype}"):
            yield f"[bold]{title}[/]"
        verdict = "[green]pass[/]" if c.passed else f"[red]FAIL {c.problem or ''}[/]"
        yield f"  {c.quantity:<14} {c.spec:<20} {c.error:>8.1e} {c.bound:>8.1e} {c.share:>6.2f}  {verdict}"


def _certificates(checks: list[Check], seconds: dict[str, float], chip: str) -> list[Certificate]:
    """Make a certificate for each implementation all of whose comparisons passed."""
    names = dict.fromkeys((c.operation, c.implementation) for c in checks)
    certificates = []
    for op, name in names:
        mine = [c for c in checks if (c.operation, c.implementation) == (op, name)]
        if all(c.passed for c in mine):
            certificates.append(
                Certificate(
                    implementation=f"{op}/{name}",
                    source=source_digest(),
                    chip=chip,
                    jax_version=compat.JAX_VERSION,
                    libtpu_version=libtpu_version(),
                    formats=tuple(sorted({qtype for c in mine for qtype in c.formats})),
                    cases=len(mine),
                    worst_error=max(c.share for c in mine),
                    seconds=seconds[op],
                )
            )
    return certificates
