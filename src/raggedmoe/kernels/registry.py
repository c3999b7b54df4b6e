"""Which implementation computes an operation: the declarations, the choice, and the only selection loop.

An implementation is one file in its operation's folder that defines ``IMPLEMENTATION``; it is found by looking there.
"""

import contextlib
import contextvars
import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax

from raggedmoe import compat
from raggedmoe.hardware import Hardware
from raggedmoe.kernels.proof import AUTO_TAKES, Certificate, Level, Proof, level_on, read_certificates
from raggedmoe.names import unknown

logger = logging.getLogger("raggedmoe")

OPERATIONS = ("ragged_gather", "ragged_gather_reduce", "grouped_matmul", "expert_ffn", "attention")
FORWARD, BACKWARD = "forward", "backward"
# The gradients of a grouped matmul's operands, where they are chosen each by itself: a forward call, whose ``lhs`` is
# the cotangent, and a transposed matmul, whose call has ``cotangent`` beside both. A backward choice is for both.
DLHS, DRHS = "dlhs", "drhs"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call as it is known before tracing: names, shapes and dtypes of its arrays, and static options."""

    operation: str
    direction: str = FORWARD
    arrays: Mapping[str, jax.ShapeDtypeStruct]
    options: Mapping[str, Any] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)  # of the quantised arrays, whose scales are arrays as well

    @property
    def shapes(self) -> str:
        """The arrays by name and shape, as text: ``lhs[8,16] rhs:int8[4,16,32] rhs_scale[4,1,32]``."""
        names = {name: f"{name}:{self.formats[name]}" if name in self.formats else name for name in self.arrays}
        return " ".join(f"{names[name]}[{','.join(map(str, a.shape))}]" for name, a in self.arrays.items())


class CannotRunError(NotImplementedError):
    """No implementation that the caller allowed accepts the call; the message has each one's reason."""


def _no_reason(call: Call, hardware: Hardware) -> None:
    return None


# What an implementation does with quantised operands.
NATIVE = "native: the chip multiplies the 8-bit values themselves, and scales are applied to the sums"
EMULATED = "emulated: dequantised a part at a time inside the kernel, and multiplied in the type of sums"
WIDENED = "widened: a dequantised copy of each quantised operand is made in memory, in the type of sums"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation, both directions as plain functions (the operation's `api.py` says of what)."""

    operation: str
    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    rank: Mapping[str, int]  # platform -> place in auto's order, smallest first; a platform left out: named use only
    proofs: tuple[Proof, ...]
    why_not: Callable[[Call, Hardware], str | None] = _no_reason  # why it cannot run; None: it can
    why_absent: Callable[[], str | None] = lambda: None  # why it is not part of this installation; None: it is
    auto_why_not: Callable[[Call, Hardware], str | None] = _no_reason  # why auto passes it over though it can run
    note: Callable[[Call, Hardware], str | None] = _no_reason  # what a user should know of its cost there
    # Like forward, but also returns what it computed on its way that the operation's backward passes can use.
    forward_keeping: Callable[..., Any] | None = None
    # What it does with quantised operands, or a function that says it of a call on a chip; None: it takes none.
    quantized: str | Callable[[Call, Hardware], str] | None = None
    # The operation whose groups are of what is summed, ``lhs_gᵀ @ cotangent_g``: the gradient of a grouped matmul's
    # ``rhs``, which those who quantise its operands call by itself. None: it comes with the other gradient alone.
    transposed: Callable[..., Any] | None = None
    takes_hardware: bool = False  # its functions have a keyword `hardware`, the chip that they are compiled for

    @property
    def full_name(self) -> str:
        return f"{self.operation}/{self.name}"


Ordered = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Directions:
    """A choice for each direction of one operation."""

    forward: Ordered = "auto"
    backward: Ordered = "auto"


Choice = str | tuple[str, ...] | Directions


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The implementation of each of a layer's operations: "auto", a name, an ordered tuple of names, or Directions."""

    ragged_gather: Choice = "auto"
    ragged_gather_reduce: Choice = "auto"
    grouped_matmul: Choice = "auto"
    expert_ffn: Choice = "auto"

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_choice(entry.name, getattr(self, entry.name))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An implementation that was looked at for a call, and what was found out about it."""

    implementation: Implementation
    reason: str | None  # why it was not taken; None: it was, or nobody asked it because an earlier one was taken
    by_preference: bool  # it could have run: auto only has something better for such a call
    absent: bool = False  # it could run, were it part of this installation
    level: Level
    shown_by: str
    note: str | None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The implementation that was taken for one call and direction, with all that were looked at, in order."""

    call: Call
    hardware: Hardware
    chosen: Implementation
    candidates: tuple[Candidate, ...]

    @property
    def chosen_candidate(self) -> Candidate:
        """What was found out about the implementation that was taken."""
        return next(c for c in self.candidates if c.implementation is self.chosen)

    @property
    def function(self) -> Callable[..., Any]:
        """The function that computes the call: equal selections give the very same one, so that traces are shared."""
        if self.call.direction == DRHS:
            assert self.chosen.transposed is not None
            return self._bound(self.chosen.transposed)
        return self._bound(self.chosen.backward if self.call.direction == BACKWARD else self.chosen.forward)

    @property
    def function_keeping(self) -> Callable[..., Any] | None:
        """The function that also returns what the backward pass can use, where there is one."""
        return None if self.chosen.forward_keeping is None else self._bound(self.chosen.forward_keeping)

    def _bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _for_hardware(function, self.hardware) if self.chosen.takes_hardware else function


@functools.cache
def _for_hardware(function: Callable[..., Any], hardware: Hardware) -> Callable[..., Any]:
    return functools.partial(function, hardware=hardware)


@functools.cache
def implementations(operation: str) -> dict[str, Implementation]:
    """Find all implementations in an operation's folder, by name."""
    package = importlib.import_module(f"raggedmoe.kernels.{operation}")
    by_name = {}
    for module_info in pkgutil.iter_modules(package.__path__):
        if module_info.name.endswith("_kernel"):  # a kernel's body: it imports Pallas, and is imported when chosen
            continue
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        implementation = getattr(module, "IMPLEMENTATION", None)
        if implementation is not None:
            by_name[implementation.name] = implementation
    return by_name


def order_of(choice: Choice, direction: str) -> Ordered:
    """Return what a choice says of a direction: the backward one also of each gradient by itself."""
    if not isinstance(choice, Directions):
        return choice
    return choice.forward if direction == FORWARD else choice.backward


def check_choice(operation: str, choice: Choice) -> None:
    """Require that a choice names implementations that exist."""
    for direction in (FORWARD, BACKWARD):
        _names(operation, order_of(choice, direction), implementations(operation))


def _names(operation: str, ordered: Ordered, known: Iterable[str]) -> tuple[str, ...] | None:
    """Read the names in a choice, each checked to be known; None for auto."""
    if ordered == "auto":
        return None
    names = (ordered,) if isinstance(ordered, str) else ordered
    if not isinstance(names, tuple) or not names:
        raise ValueError(
            f"implementation of {operation}: expected 'auto', a name, a non-empty tuple of names or Directions, "
            f"got {ordered!r}"
        )
    for name in names:
        if name not in known:
            raise unknown(f"implementation of {operation},", name, ("auto", *known))
    return names


def _assess(
    implementation: Implementation,
    call: Call,
    hardware: Hardware,
    jax_version: str,
    certificates: tuple[Certificate, ...],
    auto: bool,
) -> Candidate:
    level, shown_by = level_on(
        implementation.full_name, implementation.proofs, hardware, jax_version, certificates, call.formats.values()
    )
    reason = (
        compat.version_why_not(implementation.full_name, jax_version)
        or _quantized_why_not(implementation, call)
        or _transposed_why_not(implementation, call)
        or implementation.why_not(call, hardware)
    )
    # An implementation that does not take the call's quantised operands cannot say what such a call costs.
    takes = not call.formats or reason is None
    absent = implementation.why_absent() if reason is None else None
    reason = reason or absent
    if reason is None and auto and hardware.platform not in implementation.rank:
        reason = f"auto does not offer it on {hardware.platform}; it runs when named"
    if reason is None and auto and level < AUTO_TAKES:
        what = f"only {level.name.lower()}" if level else f"unproven ({shown_by})"
        reason = f"{what} on {hardware.name}; name it, or run `raggedmoe verify` on such a chip"
    preference = implementation.auto_why_not(call, hardware) if reason is None and auto else None
    notes = (_quantized_note(implementation, call, hardware), implementation.note(call, hardware)) if takes else ()
    return Candidate(
        implementation=implementation,
        reason=reason or preference,
        by_preference=preference is not None,
        absent=absent is not None,
        level=level,
        shown_by=shown_by,
        note="; ".join(filter(None, notes)) or None,
    )


def _quantized_note(implementation: Implementation, call: Call, hardware: Hardware) -> str | None:
    """Say what an implementation does with the quantised operands of a call that it takes."""
    said = implementation.quantized if call.formats else None
    return said(call, hardware) if callable(said) else said


def _quantized_why_not(implementation: Implementation, call: Call) -> str | None:
    """Say that an implementation takes no quantised operands, where a call has some."""
    if not call.formats or implementation.quantized is not None:
        return None
    operands = ", ".join(f"{name} ({qtype})" for name, qtype in call.formats.items())
    return f"it takes no quantised operands, such as {operands}"


def quantizes_why_not(operation: str, choice: Choice) -> str | None:
    """Say why none of the kernels that a choice names can multiply operands that are quantised on the way, if so."""
    known = implementations(operation)
    for direction in (FORWARD, BACKWARD):
        names = _names(operation, order_of(choice, direction), known)
        taken = [n for n in names or () if known[n].quantized and (direction == FORWARD or known[n].transposed)]
        if names is not None and not taken:
            able = [name for name, i in known.items() if i.quantized and i.transposed]
            return f"{' and '.join(names)} ({direction}) takes no quantised operands; use auto, {', '.join(able)}"
    return None


def _transposed_why_not(implementation: Implementation, call: Call) -> str | None:
    """Say that an implementation cannot compute the gradient of ``rhs`` by itself, where a call asks for that."""
    if call.direction != DRHS or implementation.transposed is not None:
        return None
    return "it computes both gradients together, and quantised operands' are computed each by itself"


def candidates(
    call: Call,
    choice: Choice,
    hardware: Hardware,
    *,
    jax_version: str = compat.JAX_VERSION,
    certificates: tuple[Certificate, ...] = (),
    known: Mapping[str, Implementation] | None = None,
) -> tuple[Candidate, ...]:
    """List the implementations that the choice allows, in order, each with the reason not to take it, or None."""
    known = implementations(call.operation) if known is None else known
    names = _names(call.operation, order_of(choice, call.direction), known)
    auto = names is None
    if names is None:
        last = max((max(i.rank.values(), default=0) for i in known.values()), default=0) + 1
        names = tuple(sorted(known, key=lambda name: (known[name].rank.get(hardware.platform, last), name)))
    return tuple(_assess(known[name], call, hardware, jax_version, certificates, auto) for name in names)


def select(
    call: Call,
    choice: Choice,
    hardware: Hardware,
    *,
    jax_version: str = compat.JAX_VERSION,
    certificates: tuple[Certificate, ...] | None = None,
    known: Mapping[str, Implementation] | None = None,
) -> Selection:
    """Take the first implementation in the choice's order that can run; a skip is logged once, with its reason.

    ``known`` are the implementations to choose from, by name; by default all in the operation's folder.
    """
    if certificates is None:
        certificates = read_certificates()
    considered = candidates(call, choice, hardware, jax_version=jax_version, certificates=certificates, known=known)
    for candidate in considered:
        if candidate.reason is None:
            if candidate.level is Level.UNPROVEN and order_of(choice, call.direction) != "auto":
                report_unproven(
                    candidate.implementation.full_name, call.direction, hardware.name, jax_version, candidate.shown_by
                )
            selection = Selection(call=call, hardware=hardware, chosen=candidate.implementation, candidates=considered)
            recorded = _recorded.get()
            if recorded is not None:
                recorded.append(selection)
            return selection
        if candidate.absent:
            report_absent(candidate.implementation.name, candidate.reason)
            continue
        level = logging.INFO if candidate.by_preference else logging.WARNING
        report_skip(candidate.implementation.full_name, call.direction, hardware.name, candidate.reason, level)
    reasons = "\n".join(f"  {c.implementation.name}: {c.reason}" for c in considered)
    raise CannotRunError(
        f"{call.operation} ({call.direction}) on {hardware.name}: no implementation in "
        f"{order_of(choice, call.direction)!r} can run:\n{reasons}"
    )


@dataclass(frozen=True)
class Kernels:
    """The functions that compute an operation, one for each direction. Equal choices are equal: traces are shared."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    forward_keeping: Callable[..., Any] | None = None


def select_kernels(
    operation: str,
    choice: Choice,
    hardware: Hardware,
    *,
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    options: Mapping[str, Any],
    formats: Mapping[str, str] | None = None,
) -> Kernels:
    """Select for both directions of a call: before anything is traced, so that either one's error comes then."""
    forward, backward = (
        select(
            Call(operation=operation, arrays=arrays, options=options, formats=formats or {}, direction=direction),
            choice,
            hardware,
        )
        for direction in (FORWARD, BACKWARD)
    )
    return Kernels(forward.function, backward.function, forward.function_keeping)


_recorded: contextvars.ContextVar[list[Selection] | None] = contextvars.ContextVar("recorded", default=None)


def is_recording() -> bool:
    """Say whether selections are collected now."""
    return _recorded.get() is not None


@contextlib.contextmanager
def record_selections() -> Iterator[list[Selection]]:
    """Collect every selection made inside: trace a function under it to see what it would use."""
    selections: list[Selection] = []
    token = _recorded.set(selections)
    try:
        yield selections
    finally:
        _recorded.reset(token)


@functools.cache
def report_unproven(full_name: str, direction: str, hardware: str, jax_version: str, shown_by: str) -> None:
    """Warn that a kernel runs because it was named, and that nothing shows that it works. Cached: said once."""
    logger.warning(
        "%s (%s) on %s runs as it was named: with JAX %s it is unproven (%s); check it there by `raggedmoe verify`",
        full_name,
        direction,
        hardware,
        jax_version,
        shown_by,
    )


@functools.cache
def report_skip(full_name: str, direction: str, hardware: str, reason: str, level: int) -> None:
    """Log that an implementation was passed over. Cached, so that each is said once."""
    logger.log(level, "%s (%s) on %s not used: %s", full_name, direction, hardware, reason)


@functools.cache
def report_absent(name: str, reason: str) -> None:
    """Log that kernels are not part of this installation: once for all operations, as no call is at fault."""
    logger.info("%s kernels not used: %s", name, reason)
