"""Copies of the checkout, and pytest in them: nothing here writes to the checkout itself."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.plugin import RESULTS, TESTS
from tests.mutants.rules import Mutant, mutants_of

# Data of the examples that tests and benchmarks run, and what is only looked at.
NOT_MUTATED = (
    "kernels/*/specs.py",
    "kernels/example.py",
    "train/report/*",
    "train/loop/screen.py",
    "interop/progress.py",
)
COPIED = ("src", "tests", "docs", "pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile", ".ci")
FOREIGN = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "TEST_SHARE")  # of tests that run this, and of .ci/run
# What `make test` runs: the Makefile says it once.
SHORT_SUITE = re.findall(r"^MARKS \?= (.+)$", (Path(__file__).parents[2] / "Makefile").read_text(), re.MULTILINE)[0]
COMPILED = ".jax_cache"  # programs that the checkout's tests have compiled; a mutant changes few of them


@dataclass(frozen=True)
class Result:
    """What a test did; one that only "started" took the process along, or was stopped with it."""

    test: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Tree:
    """A package under src/ with its tests under tests/."""

    root: Path
    package: str

    @property
    def sources(self) -> Path:
        return self.root / "src" / self.package

    def source(self, mutant: Mutant) -> str:
        return (self.sources / mutant.file).read_text()

    def mutants(self, folder: str) -> list[Mutant]:
        """Every mutant that the rules make below a folder of the package."""
        found = []
        for path in sorted((self.sources / folder).rglob("*.py")):
            file = path.relative_to(self.sources)
            if not any(file.match(pattern) for pattern in NOT_MUTATED):
                found += mutants_of(str(file), path.read_text())
        return found

    @contextmanager
    def copy(self) -> Iterator["Tree"]:
        """A copy that is removed afterwards, deep in a folder of its own: a mutant may remove too much."""
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
            root = Path(folder, "a", "copy")
            (root / "tmp" / "of" / "tests").mkdir(parents=True)
            for name in COPIED:
                if (self.root / name).is_dir():
                    shutil.copytree(self.root / name, root / name)
                elif (self.root / name).exists():
                    shutil.copy2(self.root / name, root / name)
            yield Tree(root, self.package)

    def pytest(self, *arguments: str, cache: Path, tests: list[str] | None = None, seconds: float) -> list[Result]:
        """Run tests of the short suite as `make test` does, these in their order or all, for so long at most."""
        results, log = self.root / "tmp" / "results", self.root / "tmp" / "log"
        results.write_text("")
        environment = {
            **{name: value for name, value in os.environ.items() if name not in FOREIGN},
            "PYTHONPATH": str(self.root / "src"),
            "TMPDIR": str(self.root / "tmp" / "of" / "tests"),
            "QUICK_COMPILE": "1",
            RESULTS: str(results),
        }
        if cache.is_dir():
            environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
        if tests is not None:
            order = self.root / "tmp" / "order"
            order.write_text(json.dumps(tests))
            environment[TESTS] = str(order)
        options = ["-q", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider", "-m", SHORT_SUITE]
        with log.open("w") as output:
            shown = None if tests is None else output  # all of them take minutes
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *arguments],
                cwd=self.root,
                env=environment,
                stdout=shown,
                stderr=shown,
                start_new_session=True,
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(process)
        stopped = time.time()
        if process.returncode not in (0, 1, 2, -signal.SIGKILL) and not results.read_text():
            raise RuntimeError(f"pytest did not start, exit code {process.returncode}:\n{log.read_text()[-2000:]}")
        return _read(results, stopped)


def _end(process: subprocess.Popen) -> None:
    """Whatever is left of it, and of what its tests have started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _read(results: Path, stopped: float) -> list[Result]:
    """One result for each test, in the order of their starts: the worst of its phases, and the seconds since then."""
    outcomes: dict[str, list[str]] = {}
    times: dict[str, list[float]] = {}
    for line in map(json.loads, results.read_text().splitlines()):
        outcomes.setdefault(line["test"], []).append(line["outcome"])
        times.setdefault(line["test"], []).append(line["time"])
    found = []
    for test, of_phases in outcomes.items():
        ended = len(of_phases) > 1
        outcome = next((worst for worst in ("failed", "skipped") if worst in of_phases), of_phases[-1])
        found.append(Result(test, outcome, (times[test][-1] if ended else stopped) - times[test][0]))
    return found
