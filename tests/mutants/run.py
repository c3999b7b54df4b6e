"""Draw mutants with a seed, run the closest tests on each, and say which test caught it."""

import random
import time
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.reach import Reach
from tests.mutants.rules import Mutant
from tests.mutants.tree import COMPILED, Result, Tree

STARTING_SECONDS = 60.0  # to import JAX and collect the tests, on a busy machine


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    caught_by: str | None
    num_tests: int  # that ran to their end
    seconds: float
    why_not: str | None = None  # the reviewed reason why no test can catch it

    @property
    def is_explained(self) -> bool:
        return self.caught_by is not None or self.why_not is not None

    @property
    def text(self) -> str:
        if self.caught_by is not None:
            return self.caught_by
        tests = f"{self.num_tests} test{'s' * (self.num_tests != 1)} in {self.seconds:.0f} s"
        return f"survived {tests}: {self.why_not}" if self.why_not else f"SURVIVED {tests}"


@dataclass(frozen=True)
class Review:
    """The reasons in reviewed.toml, each for one mutant, which is known by its function, rule and change."""

    reasons: dict[tuple[str, ...], str]

    @classmethod
    def read(cls, path: Path) -> "Review":
        entries = tomllib.loads(path.read_text()).get("survivor", [])
        keys = ("file", "function", "rule", "before", "after")
        return cls({tuple(entry[key] for key in keys): entry["why"] for entry in entries})

    def reason(self, mutant: Mutant, source: str) -> str | None:
        return self.reasons.get(review_key(mutant, source))


def review_key(mutant: Mutant, source: str) -> tuple[str, ...]:
    return mutant.file, mutant.function, mutant.rule, one_line(mutant.before(source)), mutant.replacement


def one_line(text: str) -> str:
    return " ".join(text.split())


def draw(tree: Tree, folder: str, reach: Reach, *, number: int, seed: int) -> list[Mutant]:
    """So many mutants of a folder: of a rule that is drawn, then of its places, no two in one line or of one rule.

    Rules begin anew when all have been drawn. Every rule is as likely, so that rare ones come up.
    """
    by_rule = defaultdict(list)
    for mutant in tree.mutants(folder):
        if reach.is_testable(mutant):
            by_rule[mutant.rule].append(mutant)
    chance = random.Random(f"{seed} {folder}")
    drawn: list[Mutant] = []
    while len(drawn) < number and by_rule:
        for rule in chance.sample(sorted(by_rule), len(by_rule)):
            taken = {(mutant.file, mutant.line) for mutant in drawn}
            by_rule[rule] = [each for each in by_rule[rule] if (each.file, each.line) not in taken]
            if not by_rule[rule]:
                del by_rule[rule]
            elif len(drawn) < number:
                drawn.append(chance.choice(by_rule[rule]))
    return drawn


def try_mutant(tree: Tree, mutant: Mutant, reach: Reach, review: Review, *, seconds: float) -> Verdict:
    """Run the closest tests, for about so many seconds of theirs, on a copy with the mutant."""
    tests = reach.closest(mutant, seconds)
    files = sorted({test.partition("::")[0] for test in tests})
    started = time.monotonic()
    with tree.copy() as copy:
        path = copy.sources / mutant.file
        path.write_text(mutant.apply(path.read_text()))
        limit = 2 * seconds + STARTING_SECONDS
        results = copy.pytest("-x", *files, cache=tree.root / COMPILED, tests=tests, seconds=limit)
    elapsed = time.monotonic() - started
    caught_by = catcher(results, reach, stopped=elapsed > limit)
    passed = sum(result.outcome == "passed" for result in results)
    why_not = None if caught_by else review.reason(mutant, tree.source(mutant))
    return Verdict(mutant=mutant, caught_by=caught_by, num_tests=passed, seconds=elapsed, why_not=why_not)


def catcher(results: list[Result], reach: Reach, *, stopped: bool) -> str | None:
    """The test that failed, broke off, or did not end in many times the time that it takes without the mutant."""
    for result in results:
        if result.outcome == "failed":
            return result.test
    last = results[-1] if results else None
    if last is None or last.outcome != "started":
        return None
    if not stopped:
        return f"{last.test} (the process broke off)"
    return f"{last.test} (did not end)" if last.seconds > 3 * reach.seconds[last.test] + 10 else None


def table(tree: Tree, verdicts: list[Verdict]) -> str:
    """The verdicts in Markdown."""
    lines = ["| | place | rule | before | after | caught by |", "|---|---|---|---|---|---|"]
    for number, verdict in enumerate(verdicts, start=1):
        mutant = verdict.mutant
        before = one_line(mutant.before(tree.source(mutant)))
        cells = [
            str(number),
            f"`{mutant.file}:{mutant.line}` {mutant.function}",
            mutant.rule,
            f"`{before}`",
            f"`{mutant.replacement}`",
            verdict.text,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def summary(verdicts: list[Verdict]) -> str:
    caught = sum(verdict.caught_by is not None for verdict in verdicts)
    explained = sum(verdict.why_not is not None for verdict in verdicts)
    rest = len(verdicts) - caught - explained
    return f"{len(verdicts)} mutants: {caught} caught, {explained} change nothing, {rest} survived."
