"""Text, token by token: greedy or sampled, with a cache.

A prompt is read in chunks, by layers that are scanned over. Then one program makes several tokens at a time; on a CPU
its layers follow one another, each with dense weights and a cache of its own (`unstack_params`).
"""

import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from raggedmoe.kernels.dense_matmul import dense_matmuls_for
from raggedmoe.models.cache import Cache, empty_cache, unstack_cache
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.decoder import DecoderOutput, decode, logits, reads_experts_in_place, unstack_params
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.module import Decoder
from raggedmoe.params import Params
from raggedmoe.sharding.axes import LogicalMesh

CHUNK = 512  # the most tokens of a prompt that are read at once: the memory that they take is bounded by it
BUCKET = 64  # the fewest, and what the lengths of caches are rounded up to, so that few shapes are compiled
MOST_TOKENS = 8  # that one call makes: a call costs some 0.1 ms
PATIENCE = 0.05  # seconds: calls that took longer do not grow further, as text should come steadily


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
    mesh: LogicalMesh
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
    """Yield the next token of every prompt, again and again, as they come; None for one that has ended.

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
    lengths = [len(prompt) for prompt in prompts]
    cache = empty_cache(config, len(prompts), _round_up(max(lengths) + max_new_tokens))
    key = jax.random.key(seed)
    params = model.layer_inputs
    tokens, cache = _read_prompts(params, prompts, cache, key, settings)
    if model.mesh.mesh is None and reads_experts_in_place(config, model.execution.moe, params["embedding"]):
        params, cache = unstack_params(params), unstack_cache(cache)
    ended, stops = np.zeros(len(prompts), bool), np.asarray(stop, np.int32)
    made, num_made, at_once = np.asarray(tokens)[None], 0, 1
    while True:
        for values in made:
            yield [None if over else int(token) for token, over in zip(values, ended)]
            ended |= np.isin(values, stops)
            num_made += 1
        if num_made == max_new_tokens or ended.all():
            return
        start, count = time.perf_counter(), min(at_once, max_new_tokens - num_made)
        run = _Run(first=np.int32(num_made), count=np.int32(count), ended=ended, stops=stops, key=key)
        tokens, cache, several, num_several = _next_tokens(params, tokens, cache, run, settings)
        made = np.asarray(several)[: int(num_several)]
        if time.perf_counter() - start < PATIENCE:
            at_once = min(2 * at_once, MOST_TOKENS)


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


def _read_prompts(
    params: Params, prompts: Sequence[Sequence[int]], cache: Cache, key: jax.Array, settings: _Settings
) -> tuple[Int[Array, " B"], Cache]:
    """Read the prompts in chunks; return the token after each, and the cache with all of them."""
    lengths, longest = np.asarray([len(prompt) for prompt in prompts], np.int32), max(map(len, prompts))
    hidden = jnp.zeros((len(prompts), 1, settings.config.model_dim), settings.config.dtype)
    for start in range(0, longest, CHUNK):
        # Powers of two times BUCKET: few shapes are compiled.
        size = min(CHUNK, BUCKET << max(0, math.ceil(math.log2((longest - start) / BUCKET))))
        ids = np.zeros((len(prompts), size), np.int32)
        for row, prompt in zip(ids, prompts):
            part = prompt[start : start + size]
            row[: len(part)] = part
        left = lengths - np.int32(start)
        tokens, hidden, cache = _prompt_chunk(params, ids, left, hidden, cache, key, settings, is_first=start == 0)
    return tokens, cache


@functools.partial(jax.jit, static_argnames=("settings", "is_first"), donate_argnames=("hidden", "cache"))
def _prompt_chunk(
    params: Params,
    ids: Int[Array, "B S"],
    left: Int[Array, " B"],
    hidden: Float[Array, "B 1 D"],
    cache: Cache,
    key: jax.Array,
    settings: _Settings,
    is_first: bool,
) -> tuple[Int[Array, " B"], Float[Array, "B 1 D"], Cache]:
    """Read so many tokens of each prompt as are ``left`` and fit.

    Returns the tokens after them, their last hidden states, and the cache with them. A prompt that has ended before
    keeps its ``hidden`` state.
    """
    mask = jnp.arange(ids.shape[1])[None] < left[:, None]
    out = _decode(params, ids, cache, key, settings, mask=mask, cache_is_empty=is_first)
    last = jnp.clip(left - 1, 0, ids.shape[1] - 1)[:, None, None]
    states = jnp.take_along_axis(out.hidden, last, axis=1)
    hidden = states if is_first else jnp.where(left[:, None, None] > 0, states, hidden)
    tokens = sample_tokens(_scores(params, hidden, settings), key, settings.sampling)
    assert out.cache is not None
    return tokens, hidden, out.cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Run:
    """Which tokens of a text one call is to make."""

    first: Int[Any, ""]  # the number of the first of them
    count: Int[Any, ""]  # how many, at most `MOST_TOKENS`; fewer if all texts have ended
    ended: Bool[Any, " B"]  # texts that have ended before
    stops: Int[Any, " _"]  # tokens that end a text
    key: Any


@functools.partial(jax.jit, static_argnames=("settings",), donate_argnames=("cache",))
def _next_tokens(
    params: Params, tokens: Int[Array, " B"], cache: Cache, run: _Run, settings: _Settings
) -> tuple[Int[Array, " B"], Cache, Int[Array, "_ B"], Int[Array, ""]]:
    """Make tokens; return each text's last one, the cache, all new ones in an array's first rows, and how many."""

    def goes_on(state: tuple[Any, ...]) -> jax.Array:
        number, _, ended, *_ = state
        return (number < run.count) & ~ended.all()

    def one_token(state: tuple[Any, ...]) -> tuple[Any, ...]:
        number, tokens, ended, cache, made = state
        key = jax.random.fold_in(run.key, run.first + number)
        # Otherwise XLA's CPU backend widens bfloat16 weights before the loop, and keeps these float32 copies.
        weights, tokens = lax.optimization_barrier((params, tokens))
        out = _decode(weights, tokens[:, None], cache, key, settings)
        tokens = sample_tokens(_scores(weights, out.hidden, settings), key, settings.sampling)
        ended |= jnp.isin(tokens, run.stops)
        return number + 1, tokens, ended, out.cache, made.at[number].set(tokens)

    made = jnp.zeros((MOST_TOKENS, *tokens.shape), jnp.int32)
    start = (jnp.int32(0), tokens, run.ended, cache, made)
    number, tokens, _, cache, made = lax.while_loop(goes_on, one_token, start)
    return tokens, cache, made, number


def _decode(
    params: Params, ids: Int[Array, "B S"], cache: Cache, key: jax.Array, settings: _Settings, **options: Any
) -> DecoderOutput:
    routing_key = _routing_key(key, settings.config)
    options |= {"cache": cache, "key": routing_key, "mesh": settings.mesh}
    return decode(params, ids, settings.config, settings.execution, **options)


def _scores(params: Params, hidden: Float[Array, "B 1 D"], settings: _Settings) -> Float[Array, "B V"]:
    with dense_matmuls_for(settings.execution.moe.hardware, hidden, on_mesh=settings.mesh.mesh is not None):
        return logits(params, hidden, settings.config)[:, 0]


def _routing_key(key: jax.Array, config: ModelConfig) -> jax.Array | None:
    """Return a key for routers that draw their experts. Others get none: jitter is for training."""
    return jax.random.fold_in(key, 1) if config.moe.router.selection == "random" else None


def sample_tokens(scores: Float[Array, "B V"], key: jax.Array, sampling: Sampling) -> Int[Array, " B"]:
    """Pick a token for each row of logits."""
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
