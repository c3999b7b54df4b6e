"""Generation: in which pieces prompts are read and tokens are made changes no token. And what a cache keeps."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import Decoder, compat
from raggedmoe.kernels.native.library import takes
from raggedmoe.models import generate as generation
from raggedmoe.models.cache import empty_cache, unstack_cache, update_cache
from raggedmoe.models.decoder import decode, logits, reads_experts_in_place, unstack_params
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.generate import Sampling, generate
from raggedmoe.models.parameters import param_specs
from raggedmoe.sharding.axes import ONE_DEVICE
from tests.models.drawn import EINSUM, drawn_ids, drawn_params, quick_jit, tiny

WINDOW, NEW = 8, 12
LENGTHS = (1, WINDOW, WINDOW + 1, 23)  # of prompts


@pytest.fixture(scope="module")
def windowed():
    """A model whose first layer has a window, some prompts, and their greedy continuations without a cache."""
    config = tiny("gpt-oss-tiny", num_layers=2, windows=(WINDOW, None), max_length=128)
    model = Decoder(config, params=drawn_params(config))
    rows = [drawn_ids(config, 1, length, seed=length)[0].tolist() for length in LENGTHS]
    prompts, params = [list(row) for row in rows], model.params

    @quick_jit
    def next_tokens(params, ids, lengths):
        hidden = decode(params, ids, config, EINSUM).hidden
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
        return logits(params, last, config)[:, 0].argmax(-1)

    for _ in range(NEW):
        padded = np.asarray([row + [0] * (max(LENGTHS) + NEW - len(row)) for row in rows], np.int32)
        for row, token in zip(rows, next_tokens(params, padded, np.asarray(list(map(len, rows))))):
            row.append(int(token))
    return model, prompts, [row[len(prompt) :] for row, prompt in zip(rows, prompts)]


@pytest.mark.parametrize("chunk", [WINDOW, pytest.param(generation.CHUNK, marks=pytest.mark.ci)])
def test_prompts_shorter_and_longer_than_window_and_chunk_are_continued_as_without_a_cache(
    windowed, chunk, monkeypatch
):
    """In chunks of 8, the longest prompt ends in the middle of a chunk, and others have ended where one begins."""
    model, prompts, expected = windowed
    monkeypatch.setattr(generation, "CHUNK", chunk)
    monkeypatch.setattr(generation, "BUCKET", min(generation.BUCKET, chunk))
    assert reads_experts_in_place(model.config, model.execution.moe, model.params["embedding"])
    assert [list(tokens) for tokens in zip(*generate(model, prompts, max_new_tokens=NEW))] == expected


@pytest.mark.parametrize(
    ("pieces", "is_stacked"),
    [((1,) * 11, True), ((1,) * 11, False), ((3, 1, 7), False), ((WINDOW, WINDOW + 1), True)],
)
def test_a_query_sees_the_last_window_of_a_ring_and_no_more(pieces, is_stacked):
    """Each position is a key of its own number; every second piece is padded, in front for one sequence."""
    first = np.asarray([0, 5])  # one sequence has something in its ring already, but its first keys are gone
    ring = np.zeros((2, WINDOW, 1))
    ring[1, :5, 0] = np.arange(5)
    memory = {"key": jnp.asarray(ring[None] if is_stacked else ring, jnp.float32)}
    update = quick_jit(update_cache, static_argnums=4)
    for number, piece in enumerate(pieces):
        slots = first[:, None] + np.arange(piece)
        padding = number % 2 and piece > 1
        if padding:
            slots = np.asarray([[-1, *slots[0]], [*slots[1], -1]])
        new = {"key": jnp.asarray(slots[..., None], jnp.float32)}
        memory, visible = update(memory, jnp.int32(0), new, jnp.asarray(slots, jnp.int32), WINDOW)
        keys, positions = np.asarray(visible.memory["key"]), np.asarray(visible.positions)
        for row, query in np.ndindex(slots.shape):
            last = positions[row, query]
            if slots[row, query] < 0:
                assert last < 0
                continue
            earliest = 0 if visible.window is None else max(0, last - visible.window + 1)
            position = slots[row, query]
            expected = range(max(0, position - WINDOW + 1), position + 1)
            assert sorted(keys[row, earliest : last + 1, 0].tolist()) == list(expected)
        first += piece


def test_a_layer_with_a_window_keeps_the_window_only():
    config = tiny("gpt-oss-tiny", num_layers=4, windows=(WINDOW, None))
    cache = empty_cache(config, 3, 100)
    sizes = {name: array.shape[:3] for name, array in cache.memory.items() if name.endswith("key")}
    assert sizes == {"stacks.0.0.key": (2, 3, WINDOW), "stacks.0.1.key": (2, 3, 100)}
    assert cache.size == 100
    assert empty_cache(config, 3, 5).memory["stacks.0.0.key"].shape[2] == 5


@pytest.fixture(scope="module")
def small():
    config = tiny("mixtral-tiny", num_layers=1)
    return Decoder(config, params=drawn_params(config), execution=EINSUM)


@pytest.fixture
def calls(monkeypatch):
    """How many tokens each call after the first token was asked for; none is too slow for larger ones."""
    counts, make = [], generation._next_tokens

    def recorded(params, tokens, cache, run, settings):
        counts.append(int(run.count))
        return make(params, tokens, cache, run, settings)

    monkeypatch.setattr(generation, "_next_tokens", recorded)
    monkeypatch.setattr(generation, "PATIENCE", math.inf)
    return counts


def test_the_first_token_comes_alone_and_the_next_ones_in_larger_and_larger_calls(small, calls):
    tokens = generate(small, [[1, 2, 3]], max_new_tokens=19)
    next(tokens)
    assert calls == []
    next(tokens)
    assert calls == [1]
    assert len(list(tokens)) == 17
    assert calls == [1, 2, 4, 8, 3]


def test_samples_do_not_depend_on_how_many_tokens_a_call_makes(small, calls, monkeypatch):
    def texts():
        return list(generate(small, [[1, 2, 3], [4]], max_new_tokens=12, sampling=Sampling(temperature=1.0), seed=3))

    together = texts()
    assert max(calls) > 1
    calls.clear()
    monkeypatch.setattr(generation, "PATIENCE", -1)
    assert texts() == together
    assert set(calls) == {1}


def test_texts_that_end_in_the_middle_of_a_call_end_there_and_no_call_follows(small, calls):
    sampling, prompts = Sampling(temperature=1.0), [[1, 2, 3], [4]]
    texts = list(zip(*generate(small, prompts, max_new_tokens=12, sampling=sampling, seed=3)))
    stop = (texts[0][2], texts[1][5])
    expected = []
    for text in texts:
        end = next(number for number, token in enumerate(text) if token in stop)
        expected.append([*text[: end + 1], *[None] * 12][: max(3, 6)])
    rows = max(sum(token is not None for token in text) for text in expected)
    calls.clear()
    found = list(zip(*generate(small, prompts, max_new_tokens=12, sampling=sampling, seed=3, stop=stop)))
    assert [list(text) for text in found] == [text[:rows] for text in expected]
    assert sum(calls[:-1]) + 1 < rows <= sum(calls) + 1


def test_long_prompts_are_read_in_few_shapes(small, monkeypatch):
    shapes = []

    def read(params, ids, left, hidden, cache, key, settings, is_first):
        shapes.append((ids.shape[1], is_first, int(left.max())))
        return jnp.zeros(1, jnp.int32), hidden, cache

    monkeypatch.setattr(generation, "_prompt_chunk", read)
    config = dataclasses.replace(small.config, max_length=2048)
    model = Decoder(config, params=small.params, execution=EINSUM)
    found = {}
    for length in (1, 64, 65, 512, 513, 1300):
        shapes.clear()
        next(generate(model, [[1] * length], max_new_tokens=1))
        found[length] = [size for size, _, _ in shapes]
        assert [first for _, first, _ in shapes] == [True] + [False] * (len(shapes) - 1)
    assert found == {1: [64], 64: [64], 65: [128], 512: [512], 513: [512, 64], 1300: [512, 512, 512]}


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_copies_neither_dense_weights_nor_caches(dtype):
    config = tiny("mixtral-tiny", num_layers=2)
    moe = dataclasses.replace(config.moe, model_dim=512, expert_dim=8)
    attention = dataclasses.replace(config.attention, num_heads=8, num_kv_heads=8, head_dim=64)
    kinds = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
    config = dataclasses.replace(config, model_dim=512, moe=moe, attention=attention, **kinds)

    def arrays(shapes):
        return jax.eval_shape(lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), shapes))

    params = jax.eval_shape(unstack_params, arrays(param_specs(config)))
    cache = unstack_cache(empty_cache(config, 1, 512))
    run = generation._Run(
        first=np.int32(1),
        count=np.int32(4),
        ended=np.zeros(1, bool),
        stops=np.zeros(1, np.int32),
        key=jax.random.key(0),
    )
    settings = generation._Settings(config=config, execution=ModelExecution(), mesh=ONE_DEVICE, sampling=Sampling())
    lowered = generation._next_tokens.lower(params, jnp.zeros(1, jnp.int32), cache, run, settings)
    used = lowered.compile().memory_analysis().temp_size_in_bytes
    # The scores take one layer's keys and values in another order, in float32. More would be a copy.
    numbers = 512 * attention.num_kv_heads * attention.head_dim
    limit = 2.5 * numbers * 4
    if dtype == "bfloat16" and compat.SLICES_BF16_BY_WIDENING_ALL and takes(dtype):
        # There a cache is kept as bits, and the kernel in C++ reads a copy of each layer's keys and values.
        limit = 2.5 * config.num_layers * numbers * 4
    assert used < limit, used
