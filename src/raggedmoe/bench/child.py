"""The process that contenders run in: it reads one line of JSON after the other, and answers each with one.

It is started by `children.Children`. Whatever libraries print goes to standard error, never among the answers.
"""

import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from raggedmoe.bench.case import Case, Shape
from raggedmoe.bench.compare import digest
from raggedmoe.bench.contender import Prepared, find_contender
from raggedmoe.bench.memory import call_and_peak

SHORT_TURN = 0.1  # seconds that calls of less are repeated for in one turn, so that caches and threads are awake
# Calls of a turn at least, unless the first took that many seconds: a virtual machine gets the memory of the first from
# its host, which takes longer than what is computed there and hits whoever comes first after a contender that freed it.
CALLS, LONG_CALL = 2, 5.0


class PreparedCalls:
    """The calls that a process has prepared, by key; its methods answer the parent's questions."""

    def __init__(self) -> None:
        self.prepared: dict[str, Prepared] = {}

    def prepare(self, key: str, address: list[str], case: dict[str, Any]) -> dict[str, Any]:
        """Compile a case and call it once: its time, its peak memory, and digests of what it computed."""
        prepared = find_contender(address).prepare(read_case(case))
        start = time.perf_counter()
        result, peak = call_and_peak(prepared.run)
        seconds = prepared.seconds(result) if prepared.seconds else time.perf_counter() - start
        arrays = prepared.arrays(result) if prepared.arrays else {}
        self.prepared[key] = prepared
        return {
            "seconds": seconds,
            "peak": peak,
            "digests": {name: digest(array).as_lists() for name, array in arrays.items()},
        }

    def go(self, key: str) -> dict[str, Any]:
        """Take one turn: the best time of two calls, of one if it is long, or of several short ones."""
        prepared, best, calls = self.prepared[key], float("inf"), 0
        begin = time.perf_counter()
        while True:
            start = time.perf_counter()
            result = prepared.run()
            now = time.perf_counter()
            best, calls = min(best, prepared.seconds(result) if prepared.seconds else now - start), calls + 1
            del result
            if now >= begin + SHORT_TURN and (calls >= CALLS or now >= begin + LONG_CALL):
                return {"seconds": best}

    def drop(self) -> dict[str, Any]:
        """Forget what is prepared, with its arrays and programs."""
        self.prepared.clear()
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        gc.collect()
        return {}


def read_case(plain: dict[str, Any]) -> Case:
    """Make a case from what `write_case` wrote."""
    shape = plain.pop("shape")
    return Case(shape=Shape(**shape) if shape else None, **plain)


def write_case(case: Case) -> dict[str, Any]:
    """Write a case as JSON's types."""
    return dataclasses.asdict(case)


def serve(questions: Any, answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer every line until there are no more. An error is an answer, and the next question is taken."""
    calls = PreparedCalls()
    for line in questions:
        question = json.loads(line)
        try:
            answer({"answer": getattr(calls, question.pop("do"))(**question)})
        except Exception as error:  # whatever a library raises: the other contenders go on
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Serve the parent over the standard streams."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve(sys.stdin, lambda plain: print(json.dumps(plain), file=answers, flush=True))


if __name__ == "__main__":
    main()
