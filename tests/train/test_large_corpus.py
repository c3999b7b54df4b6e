"""A corpus in files takes no memory that grows with it, and a run on it that is killed goes on bit for bit."""

import pytest

from tests.train.large_corpus import is_the_same, measure

CORPUS, GROWTH = 100, 50  # megabytes


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus_and_a_killed_run_goes_on(tmp_path):
    found = measure(tmp_path, CORPUS)
    killed = found.pop("train large, killed")
    assert killed.code == -9
    assert all(process.code == 0 for process in found.values()), found
    for command in ("tokenize", "train"):
        large, small = (found[f"{command} {size}"].megabytes for size in ("large", "small"))
        assert large - small < GROWTH, command
    assert is_the_same(tmp_path)
