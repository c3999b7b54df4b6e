"""The chunked cross-entropy against a log-softmax of all logits at once, by NumPy in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from raggedmoe.sharding import stage
from raggedmoe.sharding.axes import TENSOR, logical_mesh
from raggedmoe.sharding.dense_layers import table_sharding
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.step import loss as loss_module
from raggedmoe.train.step.loss import chunk_tokens, cross_entropy_sum

D = 16
TOKENS, VOCAB = 6, 67  # of all tests for which they do not matter: each size of its own is a compilation


@pytest.fixture(autouse=True)
def _chunks_of_four_tokens(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 4 * VOCAB)


def oracle(hidden, head, targets, weights):
    """The value and both gradients."""
    hidden, head, weights = (np.asarray(a).astype(np.float64) for a in (hidden, head, weights))
    logits = hidden @ head.T
    shifted = logits - logits.max(1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    tokens = np.arange(len(targets))
    d_logits = np.exp(log_softmax)
    d_logits[tokens, targets] -= 1
    d_logits *= weights[:, None]
    return -(weights * log_softmax[tokens, targets]).sum(), d_logits @ head, d_logits.T @ hidden


@functools.cache
def _compiled(chunk_elements):
    """One program for each size of chunk, which is read when it is traced."""

    def scaled(hidden, head, targets, weights, scale):
        return scale * cross_entropy_sum(hidden, head, targets, weights)

    return jax.jit(jax.value_and_grad(scaled, (0, 1)))


def value_and_gradients(hidden, head, targets, weights, scale=1.0):
    """Return our value and gradients, as one flat tuple."""
    run = _compiled(loss_module.CHUNK_ELEMENTS)
    value, gradients = run(*map(jnp.asarray, (hidden, head, targets, weights)), scale)
    return value, *gradients


def bounds(hidden, head, weights):
    """How far rounding may take the value and the two gradients from the truth.

    Logits are off by δ, a rounding of what they sum, and so is every log-probability. A gradient is a sum over V or T
    of factors that are off by 2δ and by the rounding to the type of the hidden states.
    """
    eps, narrow = (float(jnp.finfo(t).eps) for t in (jnp.promote_types(hidden.dtype, jnp.float32), hidden.dtype))
    hidden, head, weights = (np.asarray(a).astype(np.float64) for a in (hidden, head, weights))
    tokens, vocab = len(hidden), len(head)
    delta = eps * (np.abs(hidden) @ np.abs(head).T).max()
    factor = 2 * delta + 2 * narrow
    return (
        weights.sum() * (2 * delta + 8 * eps * np.log(vocab)) + eps * tokens,
        2 * weights.max(initial=0) * np.abs(head).max() * (factor + eps * np.sqrt(vocab)),
        weights.sum() * np.abs(hidden).max() * (factor + eps * np.sqrt(tokens)) / 2,
    )


def drawn(num_tokens=TOKENS, vocab=VOCAB, dtype=np.float32, seed=0):
    """Logits of about ±4, targets that reach the last entry, weights of zero, one and between."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((num_tokens, D)).astype(dtype)
    head = rng.standard_normal((vocab, D)).astype(dtype)
    targets = rng.integers(0, vocab, num_tokens).astype(np.int32)
    targets[-1] = vocab - 1
    weights = rng.choice([0, 1, 0.25, 0.7], num_tokens).astype(np.float32)
    weights[-1] = 1
    return hidden, head, targets, weights


def assert_is_the_oracle(arguments):
    assert_are_the_oracles(arguments, value_and_gradients(*arguments))


def assert_are_the_oracles(arguments, found):
    for what, ours, expected, bound in zip(
        ("value", "d_hidden", "d_head"), found, oracle(*arguments), bounds(arguments[0], arguments[1], arguments[3])
    ):
        difference = np.abs(np.asarray(ours).astype(np.float64) - expected).max()
        assert difference <= bound, (what, difference, bound)


@pytest.mark.parametrize(
    ("num_tokens", "vocab", "tokens_in_chunk"),
    [(23, 31, 5), (24, 37, 1), (9, 256, 8), (7, 13, 100), (1, 101, 1), (10, 2, 5)],
    ids=["rest-of-3", "one-by-one", "two-uneven", "one-chunk", "one-token", "two-entries"],
)
def test_value_and_gradients_are_those_of_all_logits_at_once(monkeypatch, num_tokens, vocab, tokens_in_chunk):
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", tokens_in_chunk * vocab + vocab - 1)
    chunks = max(-(-num_tokens // tokens_in_chunk), -(-num_tokens // -(-num_tokens // 4)))
    assert chunk_tokens(num_tokens, vocab) == -(-num_tokens // chunks), "as few chunks as can be, as even as can be"
    assert_is_the_oracle(drawn(num_tokens, vocab))


def test_a_chunk_is_one_token_where_the_vocabulary_is_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 10)
    assert_is_the_oracle(drawn(3, 29))


@pytest.mark.parametrize("num_tokens", [1, TOKENS])
def test_bfloat16_sums_in_float32_and_rounds_only_the_factors(num_tokens):
    arguments = drawn(num_tokens, dtype=jnp.bfloat16)
    assert_is_the_oracle(arguments)
    value, d_hidden, d_head = value_and_gradients(*arguments)
    assert (value.dtype, d_hidden.dtype, d_head.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)


def test_a_float32_head_of_bfloat16_states_gets_a_float32_gradient():
    hidden, head, targets, weights = drawn(dtype=jnp.bfloat16)
    wide = value_and_gradients(hidden, head.astype(np.float32), targets, weights)
    assert wide[2].dtype == jnp.float32
    difference = np.abs(np.asarray(wide[2], np.float64) - oracle(hidden, head, targets, weights)[2]).max()
    assert difference <= bounds(hidden, head, weights)[2]


def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        arguments = drawn(dtype=np.float64)
        assert_is_the_oracle(arguments)
        assert value_and_gradients(*arguments)[0].dtype == np.float64


def test_the_last_entries_of_the_vocabulary_are_pulled_to_their_tokens():
    hidden, head, _, weights = drawn()
    targets = VOCAB - np.asarray([1, 2, 3, 4, 5, 1], np.int32)
    d_head = value_and_gradients(hidden, head, targets, np.ones_like(weights))[2]
    # A step against the gradient must raise each target's logit, most of all for a token that nothing else pulls.
    for token, target in enumerate(targets):
        own = hidden[targets == target].sum(0)
        assert float(own @ np.asarray(d_head[target])) < -0.1, (token, target)


def test_the_gradient_is_multiplied_by_the_cotangent():
    arguments = drawn()
    for plain, scaled in zip(value_and_gradients(*arguments), value_and_gradients(*arguments, scale=-0.25)):
        np.testing.assert_array_equal(np.asarray(scaled), -0.25 * np.asarray(plain))


def test_without_any_weight_all_is_zero():
    hidden, head, targets, weights = drawn()
    for found in value_and_gradients(hidden, head, targets, 0 * weights):
        assert not np.asarray(found).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_stands_at_a_token_of_weight_zero_reaches_nothing(poison):
    hidden, head, targets, weights = drawn()
    weights[[1, 4]] = 0
    clean = value_and_gradients(hidden, head, targets, weights)
    hidden[[1, 4]] = poison
    for found, expected in zip(value_and_gradients(hidden, head, targets, weights), clean):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    # Without a gradient it is another program.
    np.testing.assert_array_equal(cross_entropy_sum(*map(jnp.asarray, (hidden, head, targets, weights))), clean[0])


def test_a_nan_at_a_token_that_counts_is_not_hidden():
    hidden, head, targets, weights = drawn()
    hidden[-1] = np.nan
    value, d_hidden, d_head = value_and_gradients(hidden, head, targets, weights)
    assert np.isnan(value)
    assert np.isnan(np.asarray(d_hidden[-1])).all()
    assert np.isnan(np.asarray(d_head)).all()


def test_logits_of_ten_thousand_neither_overflow_nor_lose_the_loss():
    head = np.asarray([[1e4], [0.0], [-1e4], [9999.0]], np.float32)  # with a state of 1 these are the logits
    targets = np.arange(4, dtype=np.int32)
    arguments = (np.ones((4, 1), np.float32), head, targets, np.ones(4, np.float32))
    expected = oracle(*arguments)
    assert expected[0] > 3e4
    for found, exact in zip(value_and_gradients(*arguments), expected):
        # One rounding of numbers up to 2e4, each: the logits themselves are exact.
        np.testing.assert_allclose(np.asarray(found), exact, rtol=4e-7, atol=4e-3)


def largest_array(jaxpr):
    """Elements of the largest floating array that a program makes, inside its loops too."""
    largest = 0
    for equation in jaxpr.eqns:
        arrays = [v.aval for v in equation.outvars if jnp.issubdtype(getattr(v.aval, "dtype", int), jnp.floating)]
        largest = max([largest, *(array.size for array in arrays)])
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            largest = max(largest, largest_array(inner)) if hasattr(inner, "eqns") else largest
    return largest


@pytest.mark.parametrize(("chunks", "least", "largest"), [(1, 1, 24 * 71), (1, 4, 71 * D), (24, 4, 71 * D)])
def test_only_one_chunk_of_logits_exists_at_a_time(monkeypatch, chunks, least, largest):
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 24 * 71 // chunks)
    monkeypatch.setattr(loss_module, "LEAST_CHUNKS", least)  # 1: all at once, which this test must be able to see
    hidden, head, targets, weights = map(jnp.asarray, drawn(24, 71))
    gradient = jax.value_and_grad(lambda h, w: cross_entropy_sum(h, w, targets, weights), (0, 1))
    assert largest_array(jax.make_jaxpr(gradient)(hidden, head).jaxpr) == largest  # with chunks: the head's gradient


# The vocabulary split over two and four ranks, and one that does not divide: every rank has all of it. The width whole,
# in two and in four parts.
ON_MESHES = [
    (Plan(fsdp=2, expert=2, tensor=2), VOCAB - 1),
    (Plan(data=2, tensor=4), VOCAB + 1),
    (Plan(data=2, fsdp=2, tensor=2), VOCAB),
]


@pytest.mark.parametrize(("plan", "vocab"), ON_MESHES, ids=["fsdp-expert-tensor", "data-tensor", "whole-vocabulary"])
def test_on_a_mesh_it_is_the_same_and_no_token_or_logit_leaves_its_device(plan, vocab):
    mesh, arguments = plan.mesh(), drawn(32, vocab)
    on_mesh = logical_mesh(mesh)
    table = on_mesh.sharding(table_sharding(on_mesh, (vocab, D)).spec)
    tokens = NamedSharding(mesh, stage.TOKENS)
    places = (tokens, table, tokens, tokens)
    gradient = jax.value_and_grad(lambda *a: cross_entropy_sum(*a, mesh), (0, 1))
    compiled = jax.jit(gradient, in_shardings=places).lower(*arguments).compile()
    value, gradients = compiled(*jax.device_put(arguments, places))
    assert [g.sharding.is_equivalent_to(place, 2) for g, place in zip(gradients, places)] == [True, True]
    assert_are_the_oracles(arguments, (value, *gradients))
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
    entries = vocab // mesh.shape[TENSOR] if table.spec[0] else vocab
    assert set(gathered) <= {f"{entries},{D}"}, "only the head's parts are gathered"
    assert "all-to-all" not in compiled.as_text()
    assert "collective-permute" not in compiled.as_text()
