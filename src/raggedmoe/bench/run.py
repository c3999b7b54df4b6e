"""Measuring a case: every contender prepares it in its process, and then they take turns."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp

from raggedmoe.bench.case import FORMAT_ERRORS, Case
from raggedmoe.bench.child import write_case
from raggedmoe.bench.children import ChildError, Children
from raggedmoe.bench.compare import Digests, difference
from raggedmoe.bench.contender import LIMIT, MODULES, OURS, PEER, Contender, contenders
from raggedmoe.bench.reference import reference_digests

SETTLE = 0.03  # seconds between turns, after which threads that spin for work have gone to sleep
# Of a whole model: each layer rounds the residual stream some ten times, and routers without margins may choose
# differently by it. Of bfloat16 only a fault as large as the values themselves is seen, of float32 every other.
MODEL_ROUNDINGS = 100
BUDGET = 20.0  # seconds that the turns of one contender take in a case, after one at least


@dataclass(frozen=True, kw_only=True)
class Result:
    """One contender in one case."""

    case: str
    subject: str
    shape: str
    dtype: str
    direction: str
    contender: str
    role: str
    seconds: float | None = None  # the best turn; None: it has none, and the next field says why
    reason: str | None = None
    failed: bool = False  # whether that is a fault: an error, or a wrong result
    turns: int = 0
    gflops: float | None = None  # useful ones, a second
    gigabytes: float | None = None  # of weights that it uses, each once, a second
    tokens: float | None = None  # a second, of a whole model
    of_limit: float | None = None  # the fastest limit's time over this one's
    peak: int | None = None  # bytes above what was resident before; None: not measured

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Session:
    """What the cases of one run have in common: the processes, how often each takes its turn, and which are wanted."""

    children: Children
    rounds: int
    dtypes: tuple[str, ...]
    only: str = ""  # measures the cases whose name, with the type, holds this text
    say: Callable[[str], None] = lambda text: None
    modules: tuple[str, ...] = MODULES

    def wants(self, name: str, dtype: str) -> bool:
        """Tell whether a case of that name and type is to be measured."""
        return self.only in f"{name} {dtype}"

    def measure(self, case: Case) -> list[Result]:
        """Measure a case with all contenders for its subject."""
        return measure(case, contenders(case.subject, self.modules), self.children, self.rounds, self.say)


def measure(
    case: Case,
    candidates: Iterable[Contender],
    children: Children,
    rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Measure a case; the fastest correct limit is what all others are a share of.

    A contender that fails, or whose results differ from the reference's, gets its reason instead of a time.
    """
    reasons: dict[str, tuple[str, bool]] = {}
    prepared: dict[str, dict[str, Any]] = {}
    # A limit that is none of this case is not worth a line.
    contenders = [c for c in candidates if c.role in (OURS, PEER) or c.reason(case) is None]
    # A whole model has no plain reference: there the first peer's results are what the others' are compared with.
    expected = None if case.shape is None else reference_digests(case)
    for contender in contenders:
        reason = contender.reason(case)
        if reason is not None:
            reasons[contender.name] = (reason, False)
            continue
        say(f"{case.name}, {case.dtype}: {contender.name} prepares")
        try:
            first = _ask(children, contender, "prepare", address=contender.address, case=write_case(case))
        except ChildError as error:
            reasons[contender.name] = (str(error), True)
            continue
        prepared[contender.name] = first
    for contender in contenders:
        if contender.role not in (OURS, PEER) or contender.name not in prepared:
            continue
        of_peer = expected or _digests_of_a_peer(contenders, prepared)
        wrong = _difference(case, prepared[contender.name], of_peer, contender.weights)
        if wrong is not None:
            reasons[contender.name] = (f"wrong result: {wrong}", True)
    fit = [c for c in contenders if c.name in prepared and c.name not in reasons]
    turns = _take_turns(fit, prepared, reasons, children, rounds, say)
    children.drop()
    results = [_result(case, c, turns.get(c.name, ()), prepared, reasons.get(c.name)) for c in contenders]
    return _with_shares(results)


def _digests_of_a_peer(
    contenders: Sequence[Contender], prepared: dict[str, dict[str, Any]]
) -> Mapping[str, Digests] | None:
    """Return the digests of the first peer that has any; None: there is nothing to compare with."""
    peers = (c.name for c in contenders if c.role == PEER and c.name in prepared and prepared[c.name]["digests"])
    first = next(peers, None)
    return None if first is None else _digests(prepared[first])


def _digests(first: dict[str, Any]) -> dict[str, Digests]:
    return {name: Digests.from_lists(lists) for name, lists in first["digests"].items()}


def _difference(
    case: Case, first: dict[str, Any], expected: Mapping[str, Digests] | None, weights: str | None
) -> str | None:
    if expected is None:
        return None
    if case.shape is None:
        return difference(_digests(first), expected, case.dtype, inner=1, roundings=MODEL_ROUNDINGS)
    inner = max(case.shape.model_dim, case.shape.expert_dim, case.shape.rows)
    # Of weights in 8 bits, as many halves of an eps as the format's error is.
    roundings = None if weights is None else math.ceil(2 * FORMAT_ERRORS[weights] / float(jnp.finfo(case.dtype).eps))
    return difference(_digests(first), expected, case.dtype, inner, roundings)


def _ask(children: Children, contender: Contender, do: str, **question: Any) -> dict[str, Any]:
    return children.ask(contender.process, contender.environment, {"do": do, "key": contender.name, **question})


def _take_turns(
    contenders: Sequence[Contender],
    prepared: dict[str, dict[str, Any]],
    reasons: dict[str, tuple[str, bool]],
    children: Children,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    """Return the times of each. A first call that took the whole budget is the only turn."""
    turns: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        if prepared[contender.name]["seconds"] > BUDGET:
            turns[contender.name].append(prepared[contender.name]["seconds"])
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}")
        for contender in contenders:
            taken = turns[contender.name]
            if contender.name in reasons or sum(taken) > BUDGET:
                continue
            time.sleep(SETTLE)
            try:
                taken.append(_ask(children, contender, "go")["seconds"])
            except ChildError as error:
                reasons[contender.name] = (str(error), True)
    return turns


def _result(
    case: Case,
    contender: Contender,
    turns: Sequence[float],
    prepared: dict[str, dict[str, Any]],
    reason: tuple[str, bool] | None,
) -> Result:
    named: dict[str, Any] = {
        "case": case.name,
        "subject": case.subject,
        "shape": case.shape.name if case.shape else case.model,
        "dtype": case.dtype,
        "direction": case.direction,
        "contender": contender.name,
        "role": contender.role,
    }
    if reason is not None:
        return Result(**named, reason=reason[0], failed=reason[1])
    seconds = min(turns)
    read_bytes = case.read_bytes // (1 if contender.weights is None else jnp.dtype(case.dtype).itemsize)
    return Result(
        **named,
        seconds=seconds,
        turns=len(turns),
        gflops=case.flops / seconds / 1e9 if case.flops else None,
        gigabytes=read_bytes / seconds / 1e9 if case.reads else None,
        tokens=case.tokens / seconds if case.tokens else None,
        peak=prepared[contender.name]["peak"],
    )


def _with_shares(results: list[Result]) -> list[Result]:
    """Fill in each one's share of the fastest limit."""
    limit = min((r.seconds for r in results if r.role == LIMIT and r.seconds is not None), default=math.nan)
    return [
        Result(**{**asdict(r), "of_limit": limit / r.seconds if r.seconds and not math.isnan(limit) else None})
        for r in results
    ]
