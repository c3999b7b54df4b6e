"""The parent's side of the contenders' processes: started when first needed, asked by pipes, ended together."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

ANSWER_SECONDS = 1800.0  # after which a child counts as hung


class ChildError(Exception):
    """A contender failed; the message is its error, or the last that its process printed."""


class Child:
    """One process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.printed = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (`end` closes it)
        # The modules that are importable here are there as well, wherever this was started.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raggedmoe.bench.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment, "PYTHONPATH": path},
        )

    def ask(self, question: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Send one question and wait for its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(self._last_words()) from None
        answer = json.loads(self._line(seconds))
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer["answer"]

    def _line(self, seconds: float) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                self.end()
                raise ChildError(f"no answer within {seconds:.0f} s: ended")
        line = self.process.stdout.readline()
        if not line:
            raise ChildError(self._last_words())
        return line

    def _last_words(self) -> str:
        code = self.process.wait()
        self.printed.seek(0)
        lines = [line for line in self.printed.read().splitlines() if line.strip()]
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"its process was {how}" + (f": {lines[-1][:300]}" if lines else "")

    @property
    def is_alive(self) -> bool:
        """Whether it can still be asked."""
        return self.process.poll() is None

    def close_questions(self) -> None:
        """Let it end by itself, as it will be asked nothing more."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def end(self) -> None:
        """End it: at the end of its questions by itself, otherwise by a signal."""
        self.close_questions()
        deadline = time.monotonic() + 5
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.is_alive:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.printed.close()


class Children:
    """The processes by name. One that died is started again when it is needed for another case."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = dict(environment or {})
        self.running: dict[str, Child] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def ask(self, name: str, environment: Mapping[str, str], question: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the process of that name, which is started with the environment if it does not run."""
        child = self.running.get(name)
        if child is None or not child.is_alive:
            if child is not None:
                child.end()
            child = self.running[name] = Child({**self.environment, **environment})
        return child.ask(question)

    def drop(self) -> None:
        """Have every process forget its calls."""
        for child in self.running.values():
            with contextlib.suppress(ChildError):  # one that has died holds nothing
                child.ask({"do": "drop"})

    def end(self) -> None:
        """End all of them."""
        for child in self.running.values():
            child.close_questions()
        for child in self.running.values():
            child.end()
        self.running.clear()
