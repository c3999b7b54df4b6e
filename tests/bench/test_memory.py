"""Peak memory of a known allocation."""

import numpy as np
import pytest

from raggedmoe.bench import memory
from raggedmoe.bench.memory import call_and_peak

SIZE = 64 * 2**20


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="the peak of resident memory is Linux's")
def test_peak_is_what_a_call_allocates_though_it_frees_it():
    result, peak = call_and_peak(lambda: int(np.ones(SIZE, np.uint8).sum()))
    assert result == SIZE
    if peak is None:
        pytest.skip("this system does not let the peak be reset")
    assert 0.98 * SIZE < peak < 1.5 * SIZE
    _, less = call_and_peak(lambda: None)
    assert less < SIZE / 4


def test_where_the_peak_cannot_be_reset_it_is_not_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "no" / "clear_refs")
    assert call_and_peak(lambda: 7) == (7, None)
