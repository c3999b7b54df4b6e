"""Text, token by token: greedy or sampled, with a cache."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from raggedmoe.models.cache import Cache, empty_cache
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.decoder import Params, decode, logits
from raggedmoe.models.module import Decoder

BUCKET = 64  # lengths of prompts and caches are rounded up to this, so that few shapes are compiled


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is picked."""

    temperature: float = 0.0  # 0: the most likely token
    top_k: int | None = None  # only among this many most likely
    top_p: float | None = None  # only among the most likely that together reach this probability

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"expected a finite temperature >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"expected top_k >= 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"expected 0 < top_p <= 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_k or self.top_p):
            raise ValueError("top_k and top_p choose among samples; give a temperature > 0 with them, e.g. 0.8")


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    seed: int = 0,
) -> Iterator[list[int | None]]:
    """The next token of every prompt, again and again, as they come; None for one that has ended.

    Args:
      model: which predicts.
      prompts: token ids; of any lengths, none empty.
      max_new_tokens: at most this many; fewer if every prompt has reached a stop token.
      sampling: greedy by default.
      stop: tokens that end a text, such as the end-of-sequence token. They are returned.
      seed: of the samples.
    """
    config, sampling = model.config, sampling or Sampling()
    _check(prompts, config, max_new_tokens)
    params = model.params
    lengths = [len(prompt) for prompt in prompts]
    padded = np.zeros((len(prompts), _rounded(max(lengths))), np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    cache = empty_cache(config, len(prompts), _rounded(max(max(lengths) + max_new_tokens, padded.shape[1])))
    key = jax.random.key(seed)
    tokens, cache = _first_token(params, jnp.asarray(padded), jnp.asarray(lengths), cache, key, config, sampling)
    ended = np.zeros(len(prompts), bool)
    for number in range(max_new_tokens):
        if number:
            tokens, cache = _next_token(params, tokens, cache, jax.random.fold_in(key, number), config, sampling)
        values = np.asarray(tokens)
        yield [None if over else int(token) for token, over in zip(values, ended)]
        ended |= np.isin(values, list(stop))
        if ended.all():
            return


def _rounded(length: int) -> int:
    return -(-length // BUCKET) * BUCKET


def _check(prompts: Sequence[Sequence[int]], config: ModelConfig, max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"expected max_new_tokens >= 1, got {max_new_tokens}")
    if not len(prompts) or not all(len(prompt) for prompt in prompts):
        raise ValueError("expected at least one prompt, and at least one token in each; got an empty one")
    for prompt in prompts:
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise ValueError(
                f"expected token ids from 0 to {config.vocab_size - 1}, got {min(prompt)} to {max(prompt)}; "
                "is this the model's tokenizer?"
            )
    needed = max(map(len, prompts)) + max_new_tokens
    if needed > config.max_length:
        raise ValueError(
            f"a prompt of {needed - max_new_tokens} tokens and {max_new_tokens} new ones are more than the model's "
            f"{config.max_length} positions; shorten the prompt or lower max_new_tokens"
        )


@functools.partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames=("cache",))
def _first_token(
    params: Params,
    ids: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    cache: Cache,
    key: jax.Array,
    config: ModelConfig,
    sampling: Sampling,
) -> tuple[Int[Array, " B"], Cache]:
    mask = jnp.arange(ids.shape[1])[None] < lengths[:, None]
    out = decode(params, ids, config, mask=mask, cache=cache, cache_is_empty=True, key=_routing_key(key, config))
    last = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], axis=1)
    assert out.cache is not None
    return picked(logits(params, last, config)[:, 0], key, sampling), out.cache


@functools.partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames=("cache",))
def _next_token(
    params: Params, tokens: Int[Array, " B"], cache: Cache, key: jax.Array, config: ModelConfig, sampling: Sampling
) -> tuple[Int[Array, " B"], Cache]:
    out = decode(params, tokens[:, None], config, cache=cache, key=_routing_key(key, config))
    assert out.cache is not None
    return picked(logits(params, out.hidden, config)[:, 0], key, sampling), out.cache


def _routing_key(key: jax.Array, config: ModelConfig) -> jax.Array | None:
    """For routers that draw their experts. Others get none: jitter is for training."""
    return jax.random.fold_in(key, 1) if config.moe.router.selection == "random" else None


def picked(scores: Float[Array, "B V"], key: jax.Array, sampling: Sampling) -> Int[Array, " B"]:
    """One token for each row of logits."""
    if sampling.temperature == 0:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    scores = scores / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = jax.lax.top_k(scores, sampling.top_k)[0][:, -1:]
        scores = jnp.where(scores >= least, scores, -jnp.inf)
    if sampling.top_p is not None:
        ordered = jnp.sort(scores, axis=-1)[:, ::-1]
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares  # probability of all more likely tokens
        least = jnp.where(before < sampling.top_p, ordered, jnp.inf).min(-1, keepdims=True)
        scores = jnp.where(scores >= least, scores, -jnp.inf)
    return jax.random.categorical(key, scores, axis=-1).astype(jnp.int32)
