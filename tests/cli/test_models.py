"""`raggedmoe models` as a user types it: sizes as published, and as counted by hand."""

import json
import tracemalloc

import jax
import pytest

from raggedmoe.cli.models import models
from raggedmoe.models.presets import ALIASES, PRESETS

PUBLISHED = {  # total and active in billions, as their makers say
    "deepseek-v3": (671.0, 37.6),
    "deepseek-v2-lite": (15.7, 2.66),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.35),
    "olmoe-1b-7b": (6.92, 1.28),
    "gpt-oss-20b": (20.9, None),  # its makers leave the embedding out of what is active
    "gpt-oss-120b": (116.8, None),
    "kimi-k2": (1026.0, 32.9),
}


@pytest.fixture
def counted(capsys):
    """The rows of `raggedmoe models --json`, by name."""

    def rows(*names):
        assert models(names=names, json=True) == 0
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)}

    return rows


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_within_half_a_percent_of_what_is_published(name, counted):
    row, (total, active) = counted(name)[name], PUBLISHED[name]
    assert row["total"] == pytest.approx(total * 1e9, rel=0.005)
    assert active is None or row["active"] == pytest.approx(active * 1e9, rel=0.005)


def test_deepseek_v3_is_counted_as_by_hand(counted):
    width, layers, dense, experts, expert_width, heads, q_rank, kv_rank = 7168, 61, 3, 256, 2048, 128, 1536, 512
    attention = (
        (width * q_rank + q_rank + q_rank * heads * (128 + 64))
        + (width * (kv_rank + 64) + kv_rank + kv_rank * heads * (128 + 128))
        + heads * 128 * width
    )
    one = 3 * width * expert_width
    moe = width * experts + experts + experts * one + one
    total = 2 * 129_280 * width + width + layers * (attention + 2 * width)
    total += dense * 3 * width * 18_432 + (layers - dense) * moe
    row = counted("deepseek-v3")["deepseek-v3"]
    assert row["total"] == total
    assert row["active"] == total - (layers - dense) * (experts - 8) * one
    # Two norms and a projection of both halves before a layer, a norm after it.
    assert row["mtp"] == attention + 2 * width + moe + 3 * width + 2 * width * width


def test_gpt_oss_20b_is_counted_as_by_hand(counted):
    width, layers, experts, expert_width = 2880, 24, 32, 2880
    queries, keys = 64 * 64, 8 * 64
    attention = (width + 1) * queries + 2 * (width + 1) * keys + (queries + 1) * width + 64
    one = (width + 1) * 2 * expert_width + (expert_width + 1) * width
    total = 2 * 201_088 * width + width
    total += layers * (attention + 2 * width + (width + 1) * experts + experts * one)
    row = counted("gpt-oss-20b")["gpt-oss-20b"]
    assert row["total"] == total
    assert row["active"] == total - layers * (experts - 4) * one


def test_counting_allocates_nothing(counted):
    arrays = len(jax.live_arrays())
    tracemalloc.start()
    row = counted("deepseek-v3")["deepseek-v3"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(jax.live_arrays()) == arrays
    assert row["bytes"] > 1e12
    assert peak < 50e6


def test_all_models_are_listed_and_none_is_cut_where_the_terminal_is_narrow(raggedmoe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = raggedmoe("models")
    assert code == 0
    assert "…" not in out
    for name in (*PRESETS, *ALIASES):
        assert name in out
    assert "671.0B" in out
    assert "37.6B" in out


def test_an_alias_is_counted_as_the_model_it_stands_for(counted):
    rows = counted("deepseek-v3", "deepseek3-671b")
    assert rows["deepseek3-671b"]["total"] == rows["deepseek-v3"]["total"]


def test_the_size_follows_the_type(raggedmoe):
    sizes = []
    for dtype in ("float32", "bfloat16"):
        code, out, _ = raggedmoe("models", "mixtral-tiny", "--json", "--dtype", dtype)
        assert code == 0
        sizes.append(json.loads(out)[0]["bytes"])
    assert 1.9 < sizes[0] / sizes[1] <= 2


def test_an_unknown_model_or_type_suggests_the_nearest(raggedmoe):
    code, _, error = raggedmoe("models", "mixtral-8x7")
    assert code == 2
    assert "did you mean 'mixtral-8x7b'" in error
    code, _, error = raggedmoe("models", "--dtype", "bfloat61")
    assert code == 2
    assert "did you mean 'bfloat16'" in error
