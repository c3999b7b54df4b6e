"""Rotary positions against complex numbers, and the published scales."""

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.models.config import RopeConfig, YarnConfig
from raggedmoe.models.presets import model_preset
from raggedmoe.models.rope import apply_rope, inverse_frequencies, rope_cos_sin


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_pair_is_turned_by_its_angle(interleaved):
    dim, positions = 8, [0, 1, 7, 300]
    x = np.random.default_rng(0).standard_normal((1, len(positions), 2, dim)).astype(np.float32)
    config = RopeConfig(theta=100.0, interleaved=interleaved)
    out = apply_rope(jnp.asarray(x), rope_cos_sin(config, dim, jnp.asarray([positions], jnp.int32)), interleaved)
    for s, position in enumerate(positions):
        for n in range(2):
            for pair in range(dim // 2):
                first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
                turned = complex(x[0, s, n, first], x[0, s, n, second]) * cmath.exp(
                    1j * position * 100.0 ** (-2 * pair / dim)
                )
                np.testing.assert_allclose(out[0, s, n, first], turned.real, atol=1e-4)
                np.testing.assert_allclose(out[0, s, n, second], turned.imag, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_of_a_turn_is_the_turn_back(interleaved):
    config = RopeConfig(theta=100.0, interleaved=interleaved)
    positions = jnp.asarray([[3, 5]], jnp.int32)
    rng = np.random.default_rng(0)
    x, cotangent = (jnp.asarray(rng.standard_normal((1, 2, 1, 8)), jnp.float32) for _ in range(2))
    forth, back = rope_cos_sin(config, 8, positions), rope_cos_sin(config, 8, -positions)
    (gradient,) = jax.vjp(lambda x: apply_rope(x, forth, interleaved), x)[1](cotangent)
    np.testing.assert_allclose(gradient, apply_rope(cotangent, back, interleaved), atol=1e-6)


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    dim, theta, factor, length = 64, 10_000.0, 40.0, 4096
    found = inverse_frequencies(RopeConfig(theta=theta, yarn=YarnConfig(factor=factor, original_length=length)), dim)
    for pair in range(dim // 2):
        plain = theta ** (-2 * pair / dim)
        turns_over_length = length * plain / (2 * math.pi)
        if turns_over_length > 40:
            np.testing.assert_allclose(found[pair], plain)
        elif turns_over_length < 0.8:
            np.testing.assert_allclose(found[pair], plain / factor)
        else:
            assert plain / factor * 0.999 <= found[pair] <= plain * 1.001


def test_yarn_without_truncation_blends_from_the_exact_pairs():
    """gpt-oss: the ends of the blend are not rounded, which moves every pair between them."""
    yarn = YarnConfig(factor=32.0, original_length=4096, truncate=False)
    found = inverse_frequencies(RopeConfig(theta=150_000.0, yarn=yarn), 64)

    def pair_of(turns_over_length):
        return 64 * math.log(4096 / (2 * math.pi * turns_over_length)) / (2 * math.log(150_000))

    low, high = pair_of(32), pair_of(1)
    pair = math.ceil(low)
    share = (pair - low) / (high - low)
    plain = 150_000.0 ** (-2 * pair / 64)
    np.testing.assert_allclose(found[pair], plain * (1 - share) + plain / 32 * share, rtol=1e-12)


@pytest.mark.parametrize(("name", "scale"), [("deepseek-v3", 0.13523), ("deepseek-v2-lite", 0.11472)])
def test_softmax_scale_is_the_published_one(name, scale):
    assert round(model_preset(name).attention.softmax_scale, 5) == scale


def test_gpt_oss_lengthens_queries_and_keys():
    rope = model_preset("gpt-oss-20b").attention.rope
    cos, _ = rope_cos_sin(rope, 64, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos[0, 0, 0], 0.1 * math.log(32) + 1, rtol=1e-6)


def test_deepseek_leaves_their_length_as_it_is():
    cos, _ = rope_cos_sin(model_preset("deepseek-v3").attention.rope, 64, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos[0, 0, 0], 1.0, rtol=1e-6)
