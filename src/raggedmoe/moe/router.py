"""`route`: who goes where. A composition of score → (bias) → (group limit) → top-k → normalise → scale.

NaN in the logits is neither hidden nor spread: the token's experts are still K different ones in range, its weights
(hence its output, and the losses) are NaN, and every other token's result is what it would be without it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from raggedmoe.kernels.arrays import accumulator, int32
from raggedmoe.moe import balance
from raggedmoe.moe.config import RouterConfig
from raggedmoe.moe.records import RouteOutput, StageSettings
from raggedmoe.params import Params
from raggedmoe.sharding.axes import TOKEN_AXES
from raggedmoe.sharding.stage import REPLICATED, TOKENS, stage


@stage(
    x=TOKENS, params=TOKENS, mask=TOKENS, key=REPLICATED, token_ids=TOKENS, replay=TOKENS, result=(TOKENS, REPLICATED)
)
def route(
    x: Float[Array, "T D"],
    params: Params,
    mask: Bool[Array, " T"] | None = None,
    key: jax.Array | None = None,
    token_ids: Integer[Array, " T"] | None = None,
    replay: Integer[Array, "T K"] | None = None,
    *,
    settings: StageSettings,
) -> tuple[RouteOutput, dict[str, jax.Array]]:
    """Choose experts and weights for every token, or for those of one device.

    The losses and statistics, by their names in a `MoEOutput`, are those of all tokens on all devices. What is drawn or
    counted for a token does not depend on how they are split.

    Args:
      x: the tokens.
      params: the layer's parameters, of which the router's are read.
      mask: True for tokens that count; the others go nowhere and enter no loss or statistic.
      key: for random selection, and for jitter, which is left out without one (evaluation).
      token_ids: for hash selection.
      replay: experts recorded earlier, used instead of choosing; the weights are computed, with their gradients. An
        entry that is no expert's number, or names a token's expert again, is nowhere, as a masked token's are; where
        values can be looked at, outside jit, it is refused.
      settings: of which the router's configuration is read, and the number of sequences by the sequence-wise loss.
    """
    config, experts_per_token = settings.config.router, settings.config.experts_per_token
    axes = settings.on_mesh.axes(*TOKEN_AXES)
    mask = jnp.ones(x.shape[0], bool) if mask is None else mask
    logits = router_logits(x, params, config, key, axes)
    scores, num_experts = SCORES[config.score](logits), logits.shape[1]
    bias = params.get("router_selection_bias")
    ranking = scores if bias is None else scores + bias.astype(scores.dtype)[None, :]
    experts, tokens, aux_loss = None, None, jnp.zeros((), scores.dtype)
    if config.selection == "expert_choice":
        if replay is not None:
            raise ValueError("replay gives experts for each token, expert choice picks tokens; use another selection")
        capacity = settings.config.capacity(x.shape[0])
        tokens, weights, counts = choose_tokens(scores, params, config, mask, capacity)
    else:
        if replay is not None:
            experts = check_replay(replay, x.shape[0], experts_per_token, num_experts)
        else:
            experts = select_experts(ranking, config, experts_per_token, mask, key, token_ids, axes)
        weights = combine_weights(scores, experts, params, config)
        routed = mask[:, None] & (experts >= 0) & (experts < num_experts)
        if replay is not None:  # what is chosen here is never named again
            earlier = np.tri(experts_per_token, k=-1, dtype=bool)[None]
            routed &= ~((experts[:, :, None] == experts[:, None, :]) & earlier).any(-1)
        experts, weights = jnp.where(routed, experts, num_experts), jnp.where(routed, weights, 0)
        probabilities = balance_probabilities(logits, scores, ranking, config)
        parts = settings.num_sequences if config.aux_loss == "sequence" else None
        aux_loss = balance.load_balance_loss(probabilities, experts, mask, num_sequences=parts, axes=axes)
        counts = balance.expert_counts(experts, num_experts)
    load = lax.psum(counts, axes)
    return RouteOutput(experts=experts, tokens=tokens, mask=mask, weights=weights), {
        "aux_loss": config.aux_loss_weight * aux_loss,
        "z_loss": config.z_loss_weight * balance.router_z_loss(logits, mask, axes),
        "load": load,
        "entropy": balance.load_entropy(load),
        "max_violation": balance.max_violation(load),
    }


def router_logits(
    x: Float[Array, "T D"], params: Params, config: RouterConfig, key: jax.Array | None, axes: tuple[str, ...]
) -> Float[Array, "T E"]:
    """Compute a logit for each token and expert, in float32 at least."""
    wide = accumulator(x.dtype)
    x = x.astype(wide)
    if config.jitter and key is not None:
        noise = uniform_of_tokens(jax.random.fold_in(key, 1), axes, x.shape[0], x.shape[1], wide)
        x = x * (1 - config.jitter + 2 * config.jitter * noise)
    logits = jnp.matmul(x, params["router_kernel"].astype(wide).T, precision=lax.Precision.HIGHEST)
    bias = params.get("router_logit_bias")
    return logits if bias is None else logits + bias.astype(wide)[None, :]


def uniform_of_tokens(
    key: jax.Array, axes: tuple[str, ...], num_tokens: int, num: int, dtype: Any = jnp.float32
) -> Float[Array, "T N"]:
    """Draw numbers in [0, 1) for each token by a key of its own, so that it does not matter how tokens are split."""
    tokens = lax.axis_index(axes) * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
    return jax.vmap(lambda token: jax.random.uniform(jax.random.fold_in(key, token), (num,), dtype))(tokens)


def _sqrt_softplus(logits: jax.Array) -> jax.Array:
    # exp(log(softplus) / 2): far below zero softplus(x) is exp(x) and would underflow under the root's infinite slope.
    far = logits < -15
    near = jax.nn.softplus(jnp.where(far, 0, logits))
    return jnp.exp(0.5 * jnp.where(far, logits, jnp.log(near)))


SCORES = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": _sqrt_softplus,
    "logits": lambda logits: logits,
}


def balance_probabilities(
    logits: Float[Array, "T E"], scores: Float[Array, "T E"], ranking: Float[Array, "T E"], config: RouterConfig
) -> Float[Array, "T E"]:
    """Return what the balance loss takes for probabilities: numbers that sum to 1 over the experts."""
    if config.aux_loss_probabilities == "softmax":
        return jax.nn.softmax(ranking, axis=-1)
    if config.score == "softmax":
        return scores
    if config.score == "logits":
        return jax.nn.softmax(logits, axis=-1)
    return normalize_sum(scores, config.normalize_epsilon)


def normalize_sum(scores: Float[Array, "T N"], epsilon: float) -> Float[Array, "T N"]:
    """Return ``scores / (sum + epsilon)``, scaled first: the gradient has its square, and 1e-40 is 0 in float32."""
    size = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), epsilon))
    scaled = scores / size
    return scaled / (scaled.sum(-1, keepdims=True) + epsilon / size)


def select_experts(
    ranking: Float[Array, "T E"],
    config: RouterConfig,
    experts_per_token: int,
    mask: Bool[Array, " T"],
    key: jax.Array | None,
    token_ids: Integer[Array, " T"] | None,
    axes: tuple[str, ...],
) -> Int[Array, "T K"]:
    """Choose K different experts for every token. No gradient flows through who is chosen."""
    num_tokens, num_experts = ranking.shape
    if config.selection == "random":
        if key is None:
            raise ValueError("selection='random' needs a key, got None; pass key=jax.random.key(seed)")
        # The K largest of E independent numbers: a uniform draw without replacement.
        ranking = uniform_of_tokens(jax.random.fold_in(key, 0), axes, num_tokens, num_experts)
    if config.selection in ("learned", "random"):
        return lax.top_k(limit_to_groups(lax.stop_gradient(ranking), config), experts_per_token)[1]
    if config.selection == "hash":
        if token_ids is None:
            raise ValueError("selection='hash' needs the token ids, got None; pass token_ids [T]")
        # Fibonacci hashing; neighbours of the first choice are the others, so that they differ.
        first = ((token_ids.astype(jnp.uint32) * jnp.uint32(2654435769)) >> 7) % jnp.uint32(num_experts)
        first = first.astype(jnp.int32)
    else:  # balanced: a round robin over the tokens that count, those of the devices before this one first
        counts = lax.all_gather(mask.sum(dtype=jnp.int32, keepdims=True), axes, tiled=True)
        before = jnp.where(jnp.arange(counts.shape[0]) < lax.axis_index(axes), counts, 0).sum(dtype=jnp.int32)
        first = (before + jnp.cumsum(mask, dtype=jnp.int32) - 1) * experts_per_token
    return (first[:, None] + jnp.arange(experts_per_token, dtype=jnp.int32)[None, :]) % num_experts


def limit_to_groups(ranking: Float[Array, "T E"], config: RouterConfig) -> Float[Array, "T E"]:
    """Set the ranking of experts outside the token's best groups to -inf."""
    if config.num_groups == 1:
        return ranking
    groups = ranking.reshape(ranking.shape[0], config.num_groups, -1)
    group_scores = groups.max(-1) if config.group_score == "max" else lax.top_k(groups, 2)[0].sum(-1)
    best = lax.top_k(group_scores, config.groups_per_token)[1]
    allowed = (jnp.arange(config.num_groups)[None, None, :] == best[:, :, None]).any(1)
    return jnp.where(allowed[:, :, None], groups, -jnp.inf).reshape(ranking.shape)


def combine_weights(
    scores: Float[Array, "T E"], experts: Int[Array, "T K"], params: Params, config: RouterConfig
) -> Float[Array, "T K"]:
    """Compute the weights of the chosen experts from the unbiased scores."""
    weights = jnp.take_along_axis(scores, experts, axis=1, mode="clip")
    if config.normalize == "sum":
        weights = normalize_sum(weights, config.normalize_epsilon)
    elif config.normalize == "softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    scale = params.get("router_expert_scale")
    if scale is not None:
        weights = weights * jnp.take(scale, experts, mode="clip").astype(weights.dtype)
    return weights * config.scale


def check_replay(replay: jax.Array, num_tokens: int, experts_per_token: int, num_experts: int) -> jax.Array:
    """Return recorded experts as int32; refuse what is wrong by its shape, or by its values where they can be seen."""
    expected = (num_tokens, experts_per_token)
    if replay.shape != expected or not jnp.issubdtype(replay.dtype, jnp.integer):
        raise ValueError(
            f"expected replay [T K] = {list(expected)} of an integer type, got {replay.dtype}{list(replay.shape)}; "
            "give MoEOutput.experts of the recorded call"
        )
    if not isinstance(replay, jax.core.Tracer) and getattr(replay, "is_fully_addressable", True):
        values = np.sort(np.asarray(replay), axis=1)
        if values.size and (values.min() < 0 or values.max() > num_experts):
            raise ValueError(
                f"expected replay between 0 and num_experts={num_experts} (which is nowhere, as for a masked token), "
                f"got {values.min()} to {values.max()}; give MoEOutput.experts of the recorded call"
            )
        if ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] < num_experts)).any():
            raise ValueError("expected replay with different experts for each token, got one twice in a row")
    return int32(replay)


def choose_tokens(
    scores: Float[Array, "T E"], params: Params, config: RouterConfig, mask: Bool[Array, " T"], capacity: int
) -> tuple[Int[Array, "E C"], Float[Array, "E C"], Int[Array, " E"]]:
    """Give each expert the tokens that score highest with it; return them, their weights, and how many there are.

    This is balanced by construction, so there is no balance loss.
    """
    # A token whose scores are NaN comes last: it does not take other tokens' places.
    ranking = lax.stop_gradient(jnp.where(mask[:, None] & ~jnp.isnan(scores), scores, -jnp.inf))
    tokens = lax.top_k(ranking.T, capacity)[1]
    taken = jnp.take(mask, tokens)
    weights = jnp.take_along_axis(scores.T, tokens, axis=1) * config.scale
    scale = params.get("router_expert_scale")
    if scale is not None:
        weights = weights * scale[:, None].astype(weights.dtype)
    tokens, weights = jnp.where(taken, tokens, scores.shape[0]), jnp.where(taken, weights, 0)
    return tokens, weights, taken.sum(1, dtype=jnp.int32)
