"""Which tests reach an expression: one run of the short suite on a copy with a probe in each expression of a rule.

`a < b` becomes `(__reached__(17) or (a < b))`, which has the same value. A test is known to the probe by the variable
that pytest sets, so that processes that a test starts are counted as well.
"""

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.rules import Mutant
from tests.mutants.tree import COMPILED, Tree

PROBE = """
import builtins
import os

_seen = set()
_last = None


def _reached(number):
    global _last
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (test, number) in _seen:
        return
    _seen.add((test, number))
    with open(os.path.join({folder!r}, str(os.getpid())), "a") as file:
        file.write(f"{{number}}\\t{{test}}\\n" if test != _last else f"{{number}}\\n")
    _last = test


builtins.__reached__ = _reached
"""


@dataclass(frozen=True)
class Reach:
    """The seconds of each test that passed, and the tests that reach each expression; "" is the import."""

    seconds: dict[str, float]
    tests: dict[str, list[str]]

    def write(self, path: Path) -> None:
        names = ["", *self.seconds]  # some expressions are reached by a thousand tests: their names are written once
        places = {name: place for place, name in enumerate(names)}
        tests = {key: [places[test] for test in tests if test in places] for key, tests in self.tests.items()}
        path.write_text(json.dumps({"seconds": self.seconds, "tests": tests}))

    @classmethod
    def read(cls, path: Path) -> "Reach":
        kept = json.loads(path.read_text())
        names = ["", *kept["seconds"]]
        tests = {key: [names[place] for place in places] for key, places in kept["tests"].items()}
        return cls(seconds=kept["seconds"], tests=tests)

    def is_testable(self, mutant: Mutant) -> bool:
        """Whether tests reach the expression and no import does: that one would break all tests at once."""
        tests = self.tests.get(mutant.expression, [])
        return bool(tests) and "" not in tests

    def closest(self, mutant: Mutant, seconds: float) -> list[str]:
        """The tests to run, closest first, for about so many seconds.

        First one case of each test function, then another one of each: of those in the folder of the tests that
        mirrors the mutant's, then of the others, and the quickest before the slower.
        """
        folder = f"tests/{mutant.file.split('/')[0]}/"
        cases = defaultdict(list)
        for test in self.tests[mutant.expression]:
            cases[test.partition("[")[0]].append(test)
        order = []
        for function, tests in cases.items():
            for turn, test in enumerate(sorted(tests, key=lambda test: (self.seconds[test], test))):
                order.append((turn, not function.startswith(folder), self.seconds[test], test))
        chosen = []
        for *_, test in sorted(order):
            seconds -= self.seconds[test]
            if chosen and seconds < 0:
                break
            chosen.append(test)
        return chosen


def with_probes(source: str, numbered: dict[int, Mutant]) -> str:
    """The source with a probe around the expression of each mutant."""
    edits = []
    for number, mutant in numbered.items():
        length = mutant.end - mutant.start
        # Where two begin, the longer is the outer one; where two end, the shorter ends first.
        edits.append(((mutant.start, 1, -length), f"(__reached__({number}) or (".encode()))
        edits.append(((mutant.end, 0, length), b"))"))
    text, done, pieces = source.encode(), 0, []
    for (place, *_), insertion in sorted(edits):
        pieces += [text[done:place], insertion]
        done = place
    return b"".join([*pieces, text[done:]]).decode()


def record(tree: Tree, folders: list[str], tests: list[str], *, workers: int) -> Reach:
    """Run the tests on a copy with probes."""
    expressions = list({mutant.expression: mutant for folder in folders for mutant in tree.mutants(folder)}.values())
    by_file: dict[str, dict[int, Mutant]] = defaultdict(dict)
    for number, mutant in enumerate(expressions):
        by_file[mutant.file][number] = mutant
    with tree.copy() as copy:
        for file, numbered in by_file.items():
            path = copy.sources / file
            path.write_text(with_probes(path.read_text(), numbered))
        probes = copy.root / "tmp" / "probes"
        probes.mkdir()
        (copy.sources / "reached.py").write_text(PROBE.format(folder=str(probes)))
        package = copy.sources / "__init__.py"
        package.write_text(f"import {tree.package}.reached as reached\n" + package.read_text())
        several = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        results = copy.pytest(*several, *tests, cache=tree.root / COMPILED, seconds=3600)
        reached = _read(probes)
    seconds = {result.test: round(result.seconds, 3) for result in results if result.outcome == "passed"}
    failed = [result.test for result in results if result.outcome in ("failed", "started")]
    if failed:
        print("not used, as they fail without a mutant:", *failed, sep="\n  ")
    found = {expressions[number].expression: sorted(tests & {"", *seconds}) for number, tests in reached.items()}
    return Reach(seconds=seconds, tests=found)


def _read(probes: Path) -> dict[int, set[str]]:
    found = defaultdict(set)
    for path in probes.iterdir():
        test = ""
        for line in path.read_text().splitlines():
            number, tab, name = line.partition("\t")
            if tab:
                test = name.rpartition(" (")[0]
            found[int(number)].add(test)
    return found


def recorded(tree: Tree, folders: list[str], tests: list[str], *, workers: int, folder: Path) -> Reach:
    """What was recorded of these sources and tests before, or now."""
    digest = hashlib.sha256(json.dumps([folders, tests]).encode())
    for path in sorted([*tree.sources.rglob("*.py"), *(tree.root / "tests").rglob("*.py")]):
        if path.parent.name != "mutants":
            digest.update(str(path.relative_to(tree.root)).encode() + b"\0" + path.read_bytes())
    kept = folder / f"reach-{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        print(f"running {' '.join(tests)} once to see what each test reaches", flush=True)
        found = record(tree, folders, tests, workers=workers)
        folder.mkdir(parents=True, exist_ok=True)
        found.write(kept)
    return Reach.read(kept)
