"""The cases of parametrized tests, shared out between several runs of the tests.

`.ci/run` tests both ends of the range of JAX. Every test runs at both; of its cases, unless it is marked `both_ends`,
each runs at one. What is marked `ci` or `tpu` runs at one end alone; so do tests without cases in folders that reach
JAX through others (conftest.py lists them). `make test` by itself runs nothing of that, a few
cases of what is marked `product`, and all of the rest.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable


def function_of(name: str) -> str:
    return name.partition("[")[0]


def share_of(names: Iterable[str], share: str) -> set[str]:
    """Those of the names that are in the share, `1/2` or `2/2`; every test has a case in each, if need be the same.

    In an order that has nothing to do with the parameters': every second one may be every one in bfloat16.
    """
    part, parts = _part_of(share)
    cases = defaultdict(list)
    for name in names:
        cases[function_of(name)].append(name)
    found = set()
    for same_test in cases.values():
        mixed = sorted(same_test, key=lambda name: (zlib.crc32(name.encode()), name))
        found.update(mixed[(part - 1) % len(mixed) :: parts])
    return found


def alternate(names: Iterable[str], share: str) -> set[str]:
    """Those of the names that are in the share, each in one alone: of a test, its cases by turns."""
    part, parts = _part_of(share)
    ordered = sorted(names, key=lambda name: (zlib.crc32(function_of(name).encode()), name))
    return set(ordered[part - 1 :: parts])


def _part_of(share: str) -> tuple[int, int]:
    part, parts = map(int, share.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(f"a share is like 1/2, the first of two, got {share}")
    return part, parts


def covering(names: Iterable[str]) -> set[str]:
    """Few of a test's cases in which every word of their names occurs: always the next with most words that are new."""
    cases = defaultdict(list)
    for name in names:
        cases[function_of(name)].append(name)
    return set().union(*map(_covering, cases.values()))


def _covering(same_test: list[str]) -> set[str]:
    words = {name: set(name.rpartition("[")[2].rstrip("]").split("-")) for name in same_test}
    chosen, missing = set(), set().union(*words.values())
    while missing:
        best = max(same_test, key=lambda name: len(words[name] & missing))
        chosen.add(best)
        missing -= words[best]
    return chosen
