"""Few of a product's cases in which every two values that can meet do."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Case = Mapping[str, Any]


def _always(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    return True


def pairwise(cases: Iterable[Case], matters: Callable[..., bool] = _always) -> list[Case]:
    """Always the case with most pairs that are new; ``matters`` says of two (name, value) whether they must meet."""

    def pairs_of(case: Case) -> set[Any]:
        return {pair for pair in itertools.combinations(case.items(), 2) if matters(*pair)}

    cases, chosen = list(cases), []
    missing = set().union(*map(pairs_of, cases))
    while missing:
        best = max(cases, key=lambda case: len(pairs_of(case) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
