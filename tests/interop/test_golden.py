"""Our decoder against `transformers`, by what that computed beforehand: no torch is needed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.models.cache import empty_cache
from raggedmoe.models.config import LatentConfig
from raggedmoe.models.decoder import decode, logits
from raggedmoe.models.generate import generate
from tests.interop.folders import FIXTURES, GOLDEN, assert_same_params, expected_of

pytestmark = pytest.mark.both_ends

TOLERANCE = 2e-4
PROMPT, NEW = 8, 32
LENGTH = PROMPT + NEW
VARIANTS = ("deepseek_v2_lite", "qwen3_moe_tied")  # of families that another fixture has too


class Case:
    """A fixture's model and what was computed with it, each compiled once for all tests."""

    def __init__(self, model, expected):
        self.model = model
        self.expected = expected

    def logits(self, ids):
        """Compare two rows, filled up to a fixed length: what comes after a token changes nothing."""
        padded = np.zeros((2, LENGTH), np.int32)
        padded[:, : ids.shape[1]] = ids
        return np.asarray(scores(self.model.params, jnp.asarray(padded), self.model.config))[:, : ids.shape[1]]

    @functools.cached_property
    def generated(self):
        """The new tokens of both sequences, by the cache."""
        prompts = self.expected["ids"][:, :PROMPT].tolist()
        return np.asarray(list(generate(self.model, prompts, max_new_tokens=NEW))).T


@functools.partial(jax.jit, static_argnames="config")
def scores(params, ids, config):
    return logits(params, decode(params, ids, config).hidden, config)


@pytest.fixture(scope="module")
def case(request, golden_model):
    return Case(golden_model(request.param), expected_of(request.param))


every_fixture = pytest.mark.parametrize("case", FIXTURES, indirect=True, scope="module")
# Generation compiles two functions more. The short suite has each kind of cache: the latent's, one with windows and
# sinks, and that of plain keys and values, with normalised queries.
EACH_KIND_OF_CACHE = ("deepseek_v3", "gpt_oss", "qwen3_moe")
every_family = pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if name in EACH_KIND_OF_CACHE else [pytest.mark.slow])
        for name in FIXTURES
        if name not in VARIANTS
    ],
    indirect=True,
    scope="module",
)


@every_fixture
def test_logits_agree_with_transformers(case):
    found = case.logits(case.expected["ids"])
    assert found.shape == case.expected["logits"].shape
    assert found.shape[1] >= 24
    np.testing.assert_allclose(found, case.expected["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.product
@every_family
def test_greedy_generation_agrees_with_transformers(case):
    np.testing.assert_array_equal(case.generated[:1], case.expected["greedy"])


@every_family
def test_greedy_generation_with_a_cache_equals_that_without(case):
    rows = case.expected["ids"][:, :PROMPT]
    for _ in range(NEW):
        rows = np.concatenate([rows, case.logits(rows)[:, -1:].argmax(-1)], axis=1)
    np.testing.assert_array_equal(case.generated, rows[:, PROMPT:])


@pytest.mark.parametrize("name", [name for name in FIXTURES if name.startswith("deepseek")])
def test_the_cache_of_latent_attention_holds_the_latent_only(name, golden_model):
    config = golden_model(name).config
    assert isinstance(config.attention, LatentConfig)
    cache = empty_cache(config, 3, 64)
    width = config.attention.kv_lora_rank + config.attention.rope_dim
    expected = {f"stacks.{s}.0.latent": (stack.repeats, 3, 64, width) for s, stack in enumerate(config.stacks)}
    assert {what: array.shape for what, array in cache.memory.items()} == expected
    assert sum(shape[0] for shape in expected.values()) == config.num_layers


def test_both_layouts_of_the_experts_give_the_same_parameters(golden_model):
    assert_same_params(golden_model("qwen3_moe_fused"), golden_model("qwen3_moe_tied"))


@pytest.mark.parametrize("name", FIXTURES)
def test_transformers_own_files_are_read_without_a_warning(name, caplog):
    interop.load(GOLDEN / name)
    assert caplog.records == []
