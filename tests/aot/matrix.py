"""Every implementation with a claim on TPUs, compiled for every chip: each `why_not` confronted with the compiler.

Where it says that a call can run, the compile must pass. Where it says no, the guard is taken away, in another process,
as the compiler may abort: if the compile passes then, the guard is wrong.

    make test-tpu                                   # with the rest of what needs libtpu
    python -m tests.aot.matrix --only grouped_matmul/megablox attention/splash
"""

import argparse
import concurrent.futures
import importlib.metadata
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from raggedmoe.aot.case import PASSED, REFUSED, CompileCase, CompileOutcome
from raggedmoe.aot.subjects import OperationCall
from raggedmoe.aot.worker import compile_cases
from raggedmoe.compat import JAX_VERSION
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.registry import BACKWARD, FORWARD, OPERATIONS, Implementation, implementations

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
DTYPES = ("bfloat16", "float32")

# What the compiler is asked for: sizes that divide nothing, a call with options, and further ones.
CALLS = {
    "grouped_matmul": ("spare-rows", "offset-transposed", "several-tiles", "width-2880"),
    "expert_ffn": ("spare-rows", "biases", "relu2-ungated", "gpt-oss"),
    "ragged_gather": ("one-token", "plain", "range-weights", "width-2880"),
    "ragged_gather_reduce": ("one-token", "no-weights-plain", "range", "width-2880"),
    "attention": ("sinks", "B=1,S=256,N=4,M=2,H=64", "positions", "odd-sizes", "one-query"),
}
# With quantised operands: those that take some are asked for one on each chip, another on the next.
QUANTIZED = {
    "grouped_matmul": ("int8-channel", "fp8-block", "mxfp4", "int8-rows", "fp8-rows", "mxfp4-down"),
    "expert_ffn": ("fp8-block", "int8-channel"),
}

# And a production model's sizes, in bfloat16: of kernels, one of them on each of two chips. Most time goes there: on
# three chips, 6 such calls were 58 % of the seconds of the 56 of expert_ffn/pallas_tpu, and 73 % of gmm_v2's.
PRODUCTION_CHIPS = ("v6e", "tpu7x")
PRODUCTION = {
    "grouped_matmul": ("R=8192,I=2048,O=1408,G=16", "R=16384,I=7168,O=2048,G=64,transpose_rhs=true"),
    "expert_ffn": ("R=8192,D=7168,F=2048,G=64", "R=8192,D=7168,F=128,G=64"),
    "ragged_gather": ("T=4096,K=8,D=2048", "T=4096,K=8,D=2880,weights=true"),
    "ragged_gather_reduce": ("T=4096,K=8,D=2048", "T=4096,K=8,D=2880"),
    "attention": ("B=1,S=4096,N=32,M=8,H=128", "training-window"),
}

# Refused because of what the call means: past the guard the kernel compiles, and computes something else.
BY_MEANING = {
    "attention/splash": "it takes no positions",
    "attention/tokamax": "^takes no (positions|segments|sinks)",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One question to the compiler."""

    operation: str
    implementation: str
    call: str
    dtype: str
    direction: str
    chip: str

    @property
    def full_name(self) -> str:
        return f"{self.operation}/{self.implementation}"

    def case(self, *, without_guard: bool = False) -> CompileCase:
        arguments = {
            name: getattr(self, name) for name in ("operation", "implementation", "call", "dtype", "direction")
        }
        title = f"{self.full_name} {self.call} {self.dtype} {self.direction}"
        subject = OperationCall(**arguments, without_guard=without_guard)
        return CompileCase(title=title, subject=subject, topology=TOPOLOGIES[self.chip])


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the compiler said, and, of a call that was refused, what it said without the guard."""

    entry: Entry
    outcome: CompileOutcome
    past_guard: CompileOutcome | None = None

    @property
    def reason(self) -> str | None:
        """Why the implementation refuses the call; None: it does not."""
        if self.outcome.verdict != REFUSED:
            return None
        return (self.outcome.error or "").rpartition(f"{self.entry.implementation}: ")[2]

    @property
    def by_meaning(self) -> bool:
        pattern = BY_MEANING.get(self.entry.full_name)
        return bool(pattern and self.reason and re.search(pattern, self.reason))

    @property
    def contradiction(self) -> str | None:
        """How `why_not` and the compiler disagree; None: they agree."""
        what = f"{self.outcome.case.title} on {self.entry.chip}"
        if self.outcome.verdict == REFUSED:
            passed = self.past_guard is not None and self.past_guard.passed
            return f"{what}: refused ({self.reason}), but it compiles" if passed else None
        return None if self.outcome.passed else f"{what}: {self.outcome.verdict}: {self.outcome.error}"


def for_tpus(implementation: Implementation) -> bool:
    """Whether it has anything to say about TPUs."""
    chips = {name for name, chip in HARDWARE.items() if chip.platform == "tpu"}
    proven = any("tpu" in proof.platforms or chips & set(proof.chips) for proof in implementation.proofs)
    return proven or "tpu" in implementation.rank


def is_kernel(implementation: Implementation) -> bool:
    """Not a plain XLA program, which is offered on other platforms as well."""
    return not {"cpu"} & set(implementation.rank)


def claimants() -> list[Implementation]:
    """Every implementation with a claim on TPUs."""
    return [each for name in OPERATIONS for each in implementations(name).values() if for_tpus(each)]


def entries(only: Iterable[str] = ()) -> Iterator[Entry]:
    """The whole matrix, or that of some implementations: "operation/name"."""
    wanted = set(only)
    for (turn, chip), implementation in itertools.product(enumerate(TOPOLOGIES), claimants()):
        if wanted and implementation.full_name not in wanted:
            continue
        calls = _kernel_calls if is_kernel(implementation) else _plain_calls
        asked = [*calls(implementation.operation, turn, chip), *_quantized_calls(implementation, turn)]
        for (call, dtype), direction in itertools.product(asked, (FORWARD, BACKWARD)):
            yield Entry(
                operation=implementation.operation,
                implementation=implementation.name,
                call=call,
                dtype=dtype,
                direction=direction,
                chip=chip,
            )


def _kernel_calls(operation: str, turn: int, chip: str) -> list[tuple[str, str]]:
    """The first two calls in both types; one more, another on the next chip; on some chips a production model's."""
    first, second, *further = CALLS[operation]
    calls = list(itertools.product((first, second), DTYPES))
    calls.append((further[turn % len(further)], DTYPES[turn // len(further) % 2]))
    if chip in PRODUCTION_CHIPS:
        calls.append((PRODUCTION[operation][turn % 2], "bfloat16"))
    return calls


def _plain_calls(operation: str, turn: int, chip: str) -> list[tuple[str, str]]:
    """Take one of the first two calls of a plain XLA program, the other on the next chip."""
    return [(CALLS[operation][turn % 2], dtype) for dtype in DTYPES]


def _quantized_calls(implementation: Implementation, turn: int) -> list[tuple[str, str]]:
    """Take a call with quantised operands of those that take some; all of them of a kernel."""
    calls = QUANTIZED.get(implementation.operation, ())
    if implementation.quantized is None or not calls:
        return []
    if is_kernel(implementation):
        return [(call, "bfloat16") for call in calls]
    return [(calls[turn % len(calls)], "bfloat16")]


def short_entries(chip: str) -> list[Entry]:
    """One call of each kernel on a chip: other calls, types and directions on other chips."""
    turn = list(TOPOLOGIES).index(chip)
    kernels = [implementation for implementation in claimants() if is_kernel(implementation)]
    return [
        Entry(
            operation=implementation.operation,
            implementation=implementation.name,
            call=CALLS[implementation.operation][(turn + number) % len(CALLS[implementation.operation])],
            dtype=DTYPES[turn // 2 % 2],
            direction=(FORWARD, BACKWARD)[(turn + number) % 2],
            chip=chip,
        )
        for number, implementation in enumerate(kernels)
    ]


def answers(asked: Iterable[Entry]) -> list[Answer]:
    """Each entry's answer, in order. A process compiles them all, and another those without guard; each is replaced by
    a new one if the compiler ends it."""
    asked = list(asked)
    outcomes = compile_cases(entry.case() for entry in asked)
    found = [Answer(entry=entry, outcome=outcome) for entry, outcome in zip(asked, outcomes, strict=True)]
    unguarded = [answer for answer in found if answer.reason is not None and not answer.by_meaning]
    tried = compile_cases(answer.entry.case(without_guard=True) for answer in unguarded)
    past = {answer.entry: outcome for answer, outcome in zip(unguarded, tried, strict=True)}
    return [replace(answer, past_guard=past.get(answer.entry)) for answer in found]


def all_answers(asked: Iterable[Entry], jobs: int | None) -> Iterator[Answer]:
    """Compile the cases in any order: an implementation in a process, so many at a time (None: as many as cores).

    For all chips together: a process is some seconds, and most calls compile in less than one.
    """
    asked = sorted(asked, key=lambda entry: entry.full_name)
    parts = [list(part) for _, part in itertools.groupby(asked, key=lambda entry: entry.full_name)]
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        running = [pool.submit(answers, part) for part in parts]
        for done in concurrent.futures.as_completed(running):
            yield from done.result()


def versions() -> str:
    """JAX, and whatever else is compared, with their versions."""
    found = [f"JAX {JAX_VERSION}"]
    for package in ("libtpu", "tokamax"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def section(found: list[Answer]) -> str:
    """The matrix as Markdown: compiled of asked, by implementation and chip; then every reason to refuse a call."""
    lines = [f"## {versions()}", "", f"{len(found)} calls, compiled / refused on each chip.", ""]
    lines += [f"| | {' | '.join(TOPOLOGIES)} |", f"|---|{'---|' * len(TOPOLOGIES)}"]
    for name in dict.fromkeys(answer.entry.full_name for answer in found):
        cells = [_cell([a for a in found if (a.entry.full_name, a.entry.chip) == (name, chip)]) for chip in TOPOLOGIES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += ["", *_refusals(found)]
    return "\n".join(lines) + "\n"


def _cell(found: list[Answer]) -> str:
    wrong = sum(answer.contradiction is not None for answer in found)
    compiled = sum(answer.outcome.verdict == PASSED for answer in found)
    refused = sum(answer.outcome.verdict == REFUSED for answer in found)
    return f"{compiled} / {refused}" + (f" **{wrong} wrong**" if wrong else "")


def _refusals(found: list[Answer]) -> list[str]:
    """Each reason once, with what the compiler says without the guard."""
    lines = {}
    for answer in found:
        if answer.reason is not None:
            past = answer.past_guard
            truth = "of another meaning: it would compile" if past is None else f"without the guard: {past.error}"
            line = f"- `{answer.entry.full_name}`: {answer.reason}. {truth[:1].upper()}{truth[1:]}"
            lines.setdefault((answer.entry.full_name, answer.reason), line[:300])
    return ["Refused:", *lines.values()] if lines else ["Nothing is refused."]


def written(document: str, new: str) -> str:
    """The document with the section of this JAX version replaced, or added at the end."""
    head, *sections = re.split(r"(?m)^(?=## JAX )", document)
    others = [old for old in sections if not old.startswith(f"## JAX {JAX_VERSION},")]
    ordered = sorted([*(old.rstrip() + "\n" for old in others), new])
    return head.rstrip() + "\n\n" + "\n".join(ordered)


def _seconds(outcome: CompileOutcome) -> str:
    compiled = outcome.compiled
    return "" if compiled is None else f", {compiled.trace_seconds + compiled.compile_seconds:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), metavar="OPERATION/NAME", help="these implementations alone")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes at a time; as many as there are cores")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the table in this Markdown file")
    options = parser.parse_args()
    asked, began = list(entries(options.only)), time.monotonic()
    found = []
    for answer in all_answers(asked, options.jobs):
        found.append(answer)
        mark = "WRONG" if answer.contradiction else answer.outcome.verdict
        what = f"{answer.outcome.case.title} on {answer.entry.chip}{_seconds(answer.outcome)}"
        print(f"[{len(found)}/{len(asked)}, {time.monotonic() - began:.0f} s] {mark}: {what}", flush=True)
    text = section(sorted(found, key=lambda answer: asked.index(answer.entry)))
    wrong = [answer.contradiction for answer in found if answer.contradiction]
    print(f"\n{text}", *wrong, sep="\n")
    if options.write is not None:
        options.write.write_text(written(options.write.read_text(), text))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
