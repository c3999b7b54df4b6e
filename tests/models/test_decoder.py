"""What must not change a decoder's result: remat, the attention kernel, packing, padding, a cache. And learning."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from raggedmoe import Decoder, interop
from raggedmoe.kernels.native.library import why_absent
from raggedmoe.models import generate as generate_module
from raggedmoe.models.cache import empty_cache
from raggedmoe.models.decoder import DEFAULT_EXECUTION, LayerContext, _rematerialize, decode, logits
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.generate import generate
from raggedmoe.models.mtp import mtp_forward
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.sharding.axes import logical_mesh
from raggedmoe.sharding.plan import Plan
from tests.models.drawn import EINSUM, GOLDEN, drawn_ids, drawn_params, quick_jit, tiny

EPS = float(jnp.finfo(jnp.float32).eps)


def loss_of(config, ids, execution=DEFAULT_EXECUTION, **options):
    """Mean cross-entropy, every loss of the routers, and that of multi-token prediction."""

    def loss(params):
        out = decode(params, ids, config, execution, **options)
        scores = logits(params, out.hidden, config)[:, :-1]
        total = optax.softmax_cross_entropy_with_integer_labels(scores, ids[:, 1:]).mean()
        reports = [out.experts]
        if config.mtp_layers:
            further, more = mtp_forward(params, out.hidden, ids, config, execution, mesh=options.get("mesh"))
            for m, hidden in enumerate(further):
                scores = logits(params, hidden, config)[:, : -2 - m]
                total += optax.softmax_cross_entropy_with_integer_labels(scores, ids[:, 2 + m :]).mean()
            reports += more
        return total + sum((report.aux_loss.sum() + report.z_loss.sum() for report in reports), jnp.zeros(()))

    return loss


def assert_same_gradients(found, expected, roundings):
    """Each gradient within so many roundings of its largest element."""
    assert found.keys() == expected.keys()
    found, expected = jax.device_get((found, expected))
    for name, gradient in expected.items():
        bound = roundings * EPS * float(np.abs(gradient).max())
        difference = float(np.abs(found[name] - gradient).max())
        assert difference <= bound, (name, difference, bound)


SOME_NAMES = ("moe_up", "attn_out")


@pytest.fixture(scope="module")
def by_remat():
    """Compiled value and gradients of one model for each choice of what is kept for the backward pass."""
    config = tiny("mixtral-tiny", num_layers=4)
    params, ids = drawn_params(config), drawn_ids(config, 2, 128)

    def compiled(remat):
        execution = dataclasses.replace(EINSUM, attention_implementation="dot_product", remat=remat)
        loss = loss_of(config, ids, execution)
        return quick_jit(jax.value_and_grad(loss)).lower(params).compile()

    return params, {remat: compiled(remat) for remat in ("none", SOME_NAMES, "full")}


@pytest.mark.ci
@pytest.mark.parametrize("remat", [SOME_NAMES, "full"])
def test_gradients_do_not_depend_on_what_is_kept_for_the_backward_pass(by_remat, remat):
    params, compiled = by_remat
    value, gradients = compiled[remat](params)
    plain_value, plain_gradients = compiled["none"](params)
    np.testing.assert_allclose(value, plain_value, rtol=4 * EPS)
    assert_same_gradients(gradients, plain_gradients, 64)


@pytest.mark.parametrize(("remat", "on_mesh", "is_plain"), [("none", 0, True), ("none", 1, False), ("full", 0, False)])
def test_only_a_model_on_one_device_that_keeps_all_runs_its_layers_as_they_are(remat, on_mesh, is_plain):
    """On a mesh, gathered weights are not kept even then."""

    def body(carry, step):
        return carry, step

    others = dict.fromkeys(("slots", "segments", "mask"))
    ids, none = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, 8))
    run = LayerContext(
        config=tiny("mixtral-tiny"),
        execution=ModelExecution(remat=remat),
        ids=ids,
        cos_sin=(none, none),
        attends_to_cache=False,
        mesh=logical_mesh(Plan().mesh() if on_mesh else None),
        **others,
    )
    assert (_rematerialize(body, run) is body) == is_plain


@pytest.mark.ci
def test_keeping_less_takes_less_memory(by_remat):
    """The policy is really applied: otherwise the three compiled programs would be alike."""
    sizes = {remat: program.memory_analysis().temp_size_in_bytes for remat, program in by_remat[1].items()}
    assert sizes["full"] < sizes[SOME_NAMES] < sizes["none"], sizes


# Everything recomputed is the simpler of the two, and the model above has it.
@pytest.mark.slow
@pytest.mark.parametrize(
    "remat", [("attn_proj_out", "kv_a", "moe_up", "moe_down"), pytest.param("full", marks=pytest.mark.slow)]
)
def test_gradients_of_latent_attention_and_further_predictions_are_the_same_recomputed_layer_by_layer(remat):
    config = tiny("deepseek-v3-tiny", num_layers=2)
    params, ids = drawn_params(config), drawn_ids(config, 2, 24)
    kept = dataclasses.replace(EINSUM, remat=remat, scan_layers=False)
    plain_value, plain_gradients = quick_jit(jax.value_and_grad(loss_of(config, ids, EINSUM)))(params)
    value, gradients = quick_jit(jax.value_and_grad(loss_of(config, ids, kept)))(params)
    np.testing.assert_allclose(value, plain_value, rtol=4 * EPS)
    assert_same_gradients(gradients, plain_gradients, 64)


@pytest.mark.slow
def test_gradients_through_the_ragged_kernels_are_the_same_when_recomputed():
    config, kept = tiny("mixtral-tiny"), ModelExecution(remat=("moe_up",))
    params, ids = drawn_params(config), drawn_ids(config, 2, 24)
    recomputed, plain = (quick_jit(jax.grad(loss_of(config, ids, execution)))(params) for execution in (kept, EINSUM))
    assert_same_gradients(recomputed, plain, 64)


@pytest.mark.ci
def test_keeping_what_attention_returns_saves_its_scores_from_being_computed_again():
    config = tiny("mixtral-tiny")
    params, ids = jax.eval_shape(lambda: drawn_params(config)), jnp.zeros((1, 16), jnp.int32)

    def num_exponentials(remat):
        kept = dataclasses.replace(EINSUM, attention_implementation="dot_product", remat=remat)
        text = str(jax.make_jaxpr(jax.grad(loss_of(config, ids, kept)))(params))
        return text.count(" exp ")

    # The weights are made of the scores once more in the backward pass; the forward pass's own are not.
    assert num_exponentials(("query", "key", "value", "attn_out")) < num_exponentials(("query", "key", "value"))


@pytest.mark.skipif(why_absent() is not None, reason="the C++ kernels are not built here")
def test_what_a_fused_kernel_keeps_saves_it_from_running_again():
    """The kernel keeps its sums as "moe_up", and the layer its result as "moe_down"; either alone needs both again."""
    config, moe = tiny("mixtral-tiny"), MoEExecution(moe_backend="cpu_native")
    params, ids = jax.eval_shape(lambda: drawn_params(config)), jnp.zeros((1, 16), jnp.int32)

    def num_forward_calls(remat):
        execution = ModelExecution(moe=moe, attention_implementation="dot_product", remat=remat)
        text = str(jax.make_jaxpr(jax.grad(loss_of(config, ids, execution)))(params))
        return len(re.findall(r"raggedmoe_expert_ffn\b", text))

    assert num_forward_calls("none") == num_forward_calls(("moe_up", "moe_down")) == 1
    assert num_forward_calls("full") == num_forward_calls(("moe_up",)) == 2


def test_multi_token_prediction_counts_only_positions_that_know_the_next_token():
    config = tiny("deepseek-v3-tiny")
    params, ids = drawn_params(config), drawn_ids(config, 2, 12)
    mask = jnp.asarray([[True] * 12, [True] * 8 + [False] * 4])
    segments = jnp.asarray([[0] * 5 + [1] * 7, [0] * 12], jnp.int32)

    @quick_jit
    def load(params):
        hidden = decode(params, ids, config, EINSUM, mask=mask, segments=segments).hidden
        _, (report,) = mtp_forward(params, hidden, ids, config, EINSUM, mask=mask, segments=segments)
        return report.load

    assert int(load(params).sum()) == (4 + 6 + 7) * config.moe.experts_per_token


def test_hash_routing_gets_the_tokens_ids():
    moe = tiny("qwen3-tiny").moe
    config = tiny("qwen3-tiny", moe=dataclasses.replace(moe, router=dataclasses.replace(moe.router, selection="hash")))
    params = drawn_params(config)
    load = quick_jit(decode, static_argnums=(2, 3))(params, jnp.full((1, 8), 3, jnp.int32), config).experts.load
    assert sorted(load[0].tolist()) == [0] * 12 + [8] * 4  # one token's experts, and no others


@pytest.mark.slow
def test_the_attention_kernel_changes_neither_value_nor_gradient():
    config = tiny("gpt-oss-tiny", num_layers=2)
    params, ids = drawn_params(config), drawn_ids(config, 2, 40)
    results = {}
    for implementation in ("dot_product", "chunked"):
        chosen = dataclasses.replace(EINSUM, attention_implementation=implementation)
        results[implementation] = quick_jit(jax.value_and_grad(loss_of(config, ids, chosen)))(params)
    (value, gradients), (other_value, other_gradients) = results.values()
    np.testing.assert_allclose(value, other_value, rtol=8 * EPS)
    assert_same_gradients(gradients, other_gradients, 128)


def test_packed_documents_do_not_see_each_other():
    config = tiny("deepseek-v2-tiny", num_layers=2)
    params = drawn_params(config)
    first, second = drawn_ids(config, 1, 9, seed=1), drawn_ids(config, 1, 15, seed=2)
    packed = jnp.concatenate([first, second], axis=1)
    segments = jnp.asarray([[1] * 9 + [2] * 15], jnp.int32)
    positions = jnp.asarray([[*range(9), *range(15)]], jnp.int32)
    run = quick_jit(decode, static_argnums=(2, 3))
    # As the trainer calls it: every token of a document counts.
    together = run(params, packed, config, EINSUM, segments=segments, mask=segments > 0, positions=positions).hidden
    # Two rows of a batch; what fills the shorter one up comes after it and is not seen.
    apart = run(params, jnp.stack([jnp.pad(first[0], (0, 6)), second[0]]), config, EINSUM).hidden
    np.testing.assert_allclose(together[0, :9], apart[0, :9], atol=2e-5)
    np.testing.assert_allclose(together[0, 9:], apart[1], atol=2e-5)


def test_packed_documents_have_the_gradients_of_separate_ones():
    config = tiny("qwen3-tiny")
    params = drawn_params(config)
    first, second = drawn_ids(config, 1, 9, seed=1), drawn_ids(config, 1, 9, seed=2)
    weights = jnp.asarray(np.random.default_rng(3).standard_normal((1, 18, config.model_dim)), jnp.float32)
    segments = jnp.asarray([[1] * 9 + [2] * 9], jnp.int32)
    positions = jnp.asarray([[*range(9)] * 2], jnp.int32)

    def together(params):
        packed = jnp.concatenate([first, second], axis=1)
        out = decode(params, packed, config, EINSUM, segments=segments, mask=segments > 0, positions=positions)
        return (out.hidden * weights).sum()

    def apart(params):
        rows = decode(params, jnp.concatenate([first, second]), config, EINSUM).hidden
        return (rows.reshape(weights.shape) * weights).sum()

    assert_same_gradients(quick_jit(jax.grad(together))(params), quick_jit(jax.grad(apart))(params), 256)


@pytest.mark.ci
def test_padding_in_front_is_seen_by_no_token_that_counts():
    config = tiny("gpt-oss-tiny", num_layers=2)
    params, ids = drawn_params(config), drawn_ids(config, 1, 12)
    run = quick_jit(decode, static_argnums=(2, 3))
    padded = jnp.concatenate([drawn_ids(config, 1, 4, seed=9), ids], axis=1)
    mask = jnp.arange(16)[None] >= 4
    np.testing.assert_allclose(
        run(params, padded, config, EINSUM, mask=mask).hidden[:, 4:], run(params, ids, config, EINSUM).hidden, atol=3e-5
    )


def test_tokens_past_the_end_of_a_cache_are_nan_under_jit():
    config = tiny("mixtral-tiny")
    params, ids = drawn_params(config), drawn_ids(config, 2, 6)
    run = quick_jit(decode, static_argnums=(2, 3))
    cache = run(params, ids, config, EINSUM, cache=empty_cache(config, 2, 8)).cache
    hidden = run(params, ids, config, EINSUM, cache=cache).hidden
    assert np.isfinite(hidden[:, :2]).all()
    assert np.isnan(hidden[:, 2:]).all()


@pytest.mark.ci
def test_tokens_that_do_not_count_change_nothing_before_them():
    config = tiny("qwen3-tiny")
    params, ids = drawn_params(config), drawn_ids(config, 2, 16)
    mask = jnp.asarray([[True] * 10 + [False] * 6, [True] * 16])
    run = quick_jit(decode, static_argnums=(2, 3))
    padded = run(params, ids, config, mask=mask)
    whole = run(params, ids, config)
    np.testing.assert_allclose(padded.hidden[0, :10], whole.hidden[0, :10], atol=2e-5)
    assert int(padded.experts.load.sum()) == 26 * config.moe.experts_per_token * len(config.moe_layers)


@pytest.mark.parametrize("name", ["deepseek-v3-tiny", pytest.param("gpt-oss-tiny", marks=pytest.mark.slow)])
def test_a_cache_filled_in_parts_gives_the_whole_sequences_states(name):
    """In chunks of 7, 7 and 1 tokens: what a chunk sees of the earlier ones comes from the cache alone."""
    config = tiny(name, num_layers=2)
    params, ids = drawn_params(config), drawn_ids(config, 2, 15)
    run = quick_jit(decode, static_argnums=(2, 3))
    whole = run(params, ids, config, EINSUM).hidden
    cache, parts = empty_cache(config, 2, 20), []
    for start, stop in ((0, 7), (7, 14), (14, 15)):
        out = run(params, ids[:, start:stop], config, EINSUM, cache=cache)
        parts.append(out.hidden)
        cache = out.cache
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=3e-5)
    assert cache.lengths.tolist() == [15, 15]


def test_a_cache_has_room_for_the_tokens_that_count():
    config = tiny("mixtral-tiny")
    mask = jnp.arange(9)[None] < 7
    out = decode(
        drawn_params(config), drawn_ids(config, 1, 9), config, EINSUM, mask=mask, cache=empty_cache(config, 1, 8)
    )
    assert out.cache.lengths.tolist() == [7]


@pytest.mark.parametrize("name", ["deepseek-v3-tiny", "deepseek-v2-tiny"])
def test_latent_attention_caches_the_latent_only(name):
    config = tiny(name)
    cache = empty_cache(config, 2, 20)
    width = config.attention.kv_lora_rank + config.attention.rope_dim
    assert {key.rpartition(".")[2] for key in cache.memory} == {"latent"}
    assert all(value.shape[1:] == (2, 20, width) for value in cache.memory.values())


@pytest.mark.ci
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny("deepseek-v2-tiny", num_layers=2), id="latent"),
        pytest.param(tiny("gpt-oss-tiny", num_layers=2), id="sinks", marks=pytest.mark.slow),
    ],
)
def test_a_batch_in_bfloat16_is_generated_as_its_prompts_alone(config):
    config = dataclasses.replace(config, dtype=jnp.dtype("bfloat16"), param_dtype=jnp.dtype("bfloat16"))
    model = Decoder(config, params=drawn_params(config))
    prompts = [[1, 2, 3], [4]]
    (first, _), (second, _) = generate(model, prompts, max_new_tokens=2)
    assert [first, second] == [row[0] for row in generate(model, prompts[:1], max_new_tokens=2)]


@pytest.mark.parametrize(
    ("ids", "cache_rows", "options", "message"),
    [
        ((2, 4), 3, {}, "expected ids of the cache's 3 sequences, got 2"),
        ((2, 9), 2, {}, "expected room for 9 tokens in the cache, got 8 slots"),
        ((2, 4), 2, {"segments": jnp.zeros((2, 4), jnp.int32)}, "segments without a cache"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(ids, cache_rows, options, message):
    config = tiny("mixtral-tiny")
    with pytest.raises(ValueError, match=message):
        decode(
            drawn_params(config), jnp.zeros(ids, jnp.int32), config, cache=empty_cache(config, cache_rows, 8), **options
        )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (jnp.full((1, 3), 256, jnp.int32), "expected ids from 0 to 255.*got 256 to 256; is this the model's tokenizer"),
        (jnp.full((1, 3), -1, jnp.int32), "got -1 to -1"),
    ],
)
def test_ids_that_are_none_are_refused(ids, message):
    config = tiny("mixtral-tiny")
    model = Decoder(config, params=drawn_params(config))
    with pytest.raises(ValueError, match=message):
        model(ids)


def test_parameters_of_another_model_are_refused_by_name():
    config = tiny("mixtral-tiny")
    params = drawn_params(config)
    with pytest.raises(ValueError, match=r"missing \['final_norm'\], unknown \['norm'\]"):
        Decoder(config, params={**{k: v for k, v in params.items() if k != "final_norm"}, "norm": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"expected head \(vocab, model_dim\) = \(256, 64\), got \(64, 256\)"):
        Decoder(config, params={**params, "head": params["head"].T})


@pytest.mark.ci
def test_random_routing_differs_between_layers_and_repeats_with_its_key():
    moe = tiny("qwen3-tiny").moe
    random = dataclasses.replace(moe, router=dataclasses.replace(moe.router, selection="random"))
    config = tiny("qwen3-tiny", moe=random)
    params, ids = drawn_params(config), drawn_ids(config, 2, 16)
    run = quick_jit(decode, static_argnums=(2, 3))
    loads = [run(params, ids, config, key=jax.random.key(seed)).experts.load for seed in (0, 0, 1)]
    assert (loads[0] == loads[1]).all()
    assert (loads[0] != loads[2]).any()
    assert (loads[0][0] != loads[0][1]).any()


@pytest.mark.ci
def test_bfloat16_stays_near_float32():
    """Two decimal digits less: the same weights, rounded, give logits within the roundings of the layers' sums."""
    model = interop.load(GOLDEN / "mixtral")
    ids = jnp.asarray(np.load(GOLDEN / "mixtral" / "expected.npz")["ids"])
    narrow = interop.load(GOLDEN / "mixtral", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert narrow.params["stacks.0.0.attention.wq"].dtype == jnp.bfloat16
    run = quick_jit(lambda m, i: m(i))
    wide_logits, narrow_logits = run(model, ids), run(narrow, ids)
    assert narrow_logits.dtype == jnp.float32
    error = jnp.abs(wide_logits - narrow_logits)
    # Most tokens: where rounding changes who is chosen, a token may move far.
    assert float(jnp.median(error)) < 16 * float(jnp.finfo(jnp.bfloat16).eps)


@pytest.mark.ci
def test_ids_and_segments_of_few_bits_mean_their_values_and_an_eager_decoder_is_compiled_once(compilations):
    config = tiny("mixtral-tiny", num_layers=2)
    assert config.vocab_size > 255
    params, ids = drawn_params(config), jnp.minimum(drawn_ids(config, 1, 8), 100)
    segments, mask = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 1]]), jnp.arange(8)[None] < 7
    expected = decode(params, ids, config, EINSUM, segments=segments, mask=mask).hidden
    gradient = jax.grad(lambda params, ids: decode(params, ids, config, EINSUM).hidden.sum())
    slopes = gradient(params, ids)
    compilations.clear()
    decode(params, ids, config, EINSUM, segments=segments, mask=mask)
    gradient(params, ids)
    assert compilations == []
    for dtype in ("uint8", "int8"):
        few = decode(params, ids.astype(dtype), config, EINSUM, segments=segments.astype(dtype), mask=mask)
        assert (few.hidden == expected)[mask].all()
        found = gradient(params, ids.astype(dtype))["embedding"]
        assert (found == slopes["embedding"]).all()


@pytest.mark.parametrize(("lengths", "new"), [((3, 70), 1), ((3, generate_module.BUCKET - 1), 5), ((3, 5), 300)])
def test_a_cache_has_room_for_the_longest_prompt_and_all_new_tokens(monkeypatch, lengths, new):
    class Made(Exception):
        pass

    def empty_cache(config, num_texts, length):
        raise Made(length)

    monkeypatch.setattr(generate_module, "empty_cache", empty_cache)
    config = tiny("mixtral-tiny", max_length=512)
    model = Decoder(config, params=drawn_params(config))
    with pytest.raises(Made) as made:
        next(generate(model, [[1] * length for length in lengths], max_new_tokens=new))
    assert made.value.args[0] >= max(lengths) + new
