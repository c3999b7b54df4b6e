"""Text, token by token: greedy or sampled, with a cache."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from raggedmoe.models.cache import Cache, empty_cache
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.decoder import Params, decode, logits
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.module import Decoder
from raggedmoe.sharding.axes import LogicalMesh

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


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What the compiled steps of generation depend on beside the arrays."""

    config: ModelConfig
    execution: ModelExecution
    mesh: LogicalMesh | None
    sampling: Sampling


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
    settings = _Settings(config=config, execution=model.execution, mesh=model.mesh, sampling=sampling)
    _check(prompts, config, max_new_tokens)
    params = model.params
    lengths = [len(prompt) for prompt in prompts]
    padded = np.zeros((len(prompts), _round_up(max(lengths))), np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    cache = empty_cache(config, len(prompts), _round_up(max(max(lengths) + max_new_tokens, padded.shape[1])))
    key = jax.random.key(seed)
    tokens, cache = _first_token(params, jnp.asarray(padded), jnp.asarray(lengths), cache, key, settings)
    ended = np.zeros(len(prompts), bool)
    for number in range(max_new_tokens):
        if number:
            tokens, cache = _next_token(params, tokens, cache, jax.random.fold_in(key, number), settings)
        values = np.asarray(tokens)
        yield [None if over else int(token) for token, over in zip(values, ended)]
        ended |= np.isin(values, list(stop))
        if ended.all():
            return


def _round_up(length: int) -> int:
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


@functools.partial(jax.jit, static_argnames=("settings",), donate_argnames=("cache",))
def _first_token(
    params: Params,
    ids: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    cache: Cache,
    key: jax.Array,
    settings: _Settings,
) -> tuple[Int[Array, " B"], Cache]:
    mask = jnp.arange(ids.shape[1])[None] < lengths[:, None]
    last = (lengths - 1)[:, None, None]
    return _decode_and_sample(params, ids, cache, key, settings, last, mask=mask, cache_is_empty=True)


@functools.partial(jax.jit, static_argnames=("settings",), donate_argnames=("cache",))
def _next_token(
    params: Params, tokens: Int[Array, " B"], cache: Cache, key: jax.Array, settings: _Settings
) -> tuple[Int[Array, " B"], Cache]:
    return _decode_and_sample(params, tokens[:, None], cache, key, settings)


def _decode_and_sample(
    params: Params,
    ids: Int[Array, "B S"],
    cache: Cache,
    key: jax.Array,
    settings: _Settings,
    last: Int[Array, "B 1 1"] | None = None,
    **options: Any,
) -> tuple[Int[Array, " B"], Cache]:
    """The token after each sequence's ``last`` one, if they have several, and the cache with all of these."""
    config, routing_key = settings.config, _routing_key(key, settings.config)
    out = decode(params, ids, config, settings.execution, cache=cache, key=routing_key, mesh=settings.mesh, **options)
    hidden = out.hidden if last is None else jnp.take_along_axis(out.hidden, last, axis=1)
    assert out.cache is not None
    return sample_tokens(logits(params, hidden, config)[:, 0], key, settings.sampling), out.cache


def _routing_key(key: jax.Array, config: ModelConfig) -> jax.Array | None:
    """For routers that draw their experts. Others get none: jitter is for training."""
    return jax.random.fold_in(key, 1) if config.moe.router.selection == "random" else None


def sample_tokens(scores: Float[Array, "B V"], key: jax.Array, sampling: Sampling) -> Int[Array, " B"]:
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
