"""The oracle of the whole layer: NumPy float64 and plain loops. Short, slow and independent: do not speed it up.

It imports neither JAX nor raggedmoe; a configuration is read by the names of its fields. Parameters are a dictionary
with the names of `MoEConfig.param_specs`.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the layer should return, and what it should have decided on the way."""

    output: np.ndarray
    aux_loss: float
    z_loss: float
    load: np.ndarray
    entropy: float
    max_violation: float
    dropped: int
    experts: np.ndarray | None  # [T K]; E: a masked token
    tokens: list[list[int]] | None  # of each expert, for expert choice
    weights: list[dict[int, float]]  # of each token: expert -> weight, dropped slots included


def sigmoid(value):
    return 1 / (1 + np.exp(-value))


def softmax(values):
    exponentials = np.exp(values - np.max(values))
    return exponentials / exponentials.sum()


SCORES = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrt_softplus": lambda logits: np.sqrt(np.log1p(np.exp(logits))),
    "logits": lambda logits: logits,
}


def activate(name, gate, up):
    if name == "clamped_swiglu":
        gate = np.minimum(gate, 7.0)
        hidden = gate * sigmoid(1.702 * gate)
        return hidden if up is None else hidden * (np.clip(up, -7.0, 7.0) + 1)
    if name == "silu":
        hidden = gate * sigmoid(gate)
    elif name == "gelu":
        hidden = np.array([0.5 * g * (1 + math.erf(g / math.sqrt(2))) for g in gate])
    elif name == "gelu_tanh":
        hidden = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    elif name == "relu2":
        hidden = np.maximum(gate, 0) ** 2
    else:
        # Only for error bounds: a polynomial above every activation, its slope and its curvature, on absolute values.
        assert name == "majorant"
        hidden = 1.2 * gate + gate**2
        return hidden if up is None else hidden * (up + 1)
    return hidden if up is None else hidden * up


def expert(row, params, e, activation):
    """Expert e on one row."""
    gate = params["wi_0"][e] @ row
    up = params["wi_1"][e] @ row if "wi_1" in params else None
    if "bias_wo" in params:
        gate = gate + params["bias_wi_0"][e]
        up = None if up is None else up + params["bias_wi_1"][e]
    out = activate(activation, gate, up) @ params["wo"][e]
    return out + params["bias_wo"][e] if "bias_wo" in params else out


def shared_expert(row, params, activation):
    """The MLP of all tokens, on one row."""
    gate = params["shared_wi_0"] @ row
    up = params["shared_wi_1"] @ row if "shared_wi_1" in params else None
    out = activate(activation, gate, up) @ params["shared_wo"]
    return out * sigmoid(params["shared_gate"] @ row) if "shared_gate" in params else out


def best(values, count):
    """Indices of the largest values, the first of equals first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def learned_experts(scores, params, router, per_token):
    """The experts of one token by its scores."""
    ranking = scores + params.get("router_selection_bias", 0)
    size = len(scores) // router.num_groups
    if router.num_groups > 1:
        groups = [ranking[g * size : (g + 1) * size] for g in range(router.num_groups)]
        worth = [max(group) if router.group_score == "max" else sum(sorted(group)[-2:]) for group in groups]
        allowed = best(worth, router.groups_per_token)
        ranking = np.array([r if e // size in allowed else -np.inf for e, r in enumerate(ranking)])
    return best(ranking, per_token)


def slot_weights(scores, experts, params, router):
    """The weights of one token's experts: from the scores without any selection bias."""
    weights = np.array([scores[e] for e in experts])
    if router.normalize == "sum":
        weights = weights / (weights.sum() + router.normalize_epsilon)
    elif router.normalize == "softmax":
        weights = softmax(weights)
    if "router_expert_scale" in params:
        weights = weights * np.array([params["router_expert_scale"][e] for e in experts])
    return weights * router.scale


def hashed_experts(token_id, per_token, num_experts):
    first = ((int(token_id) * 2654435769 % 2**32) >> 7) % num_experts
    return [(first + k) % num_experts for k in range(per_token)]


def balance_loss(probabilities, experts, mask, num_sequences=1):
    """E · Σ f·P in each sequence, averaged over the sequences that have a token."""
    num_experts, per_token, losses = probabilities.shape[1], experts.shape[1], []
    for part in np.split(np.arange(len(mask)), num_sequences):
        present = [t for t in part if mask[t]]
        if not present:
            continue
        loss = 0.0
        for e in range(num_experts):
            share = sum(int(experts[t, k]) == e for t in present for k in range(per_token)) / len(present) / per_token
            loss += num_experts * share * sum(probabilities[t, e] for t in present) / len(present)
        losses.append(loss)
    return sum(losses) / len(losses) if losses else 0.0


def z_loss(logits, mask):
    squares = [math.log(sum(math.exp(v) for v in logits[t])) ** 2 for t in range(len(mask)) if mask[t]]
    return sum(squares) / len(squares) if squares else 0.0


def entropy(load):
    return -sum(n / sum(load) * math.log(n / sum(load)) for n in load if n)


def max_violation(load):
    return max(load) * len(load) / sum(load) - 1 if sum(load) else 0.0


def kept_slots(experts, config, num_sequences):
    """Which slots fit: in each sequence, those of the first token in the order of its choices, then the next one's."""
    num_experts, kept = config.num_experts, np.zeros(experts.shape, bool)
    length = len(experts) // num_sequences
    capacity = math.floor(math.ceil(length * experts.shape[1] / num_experts) * config.capacity_factor)
    for b in range(num_sequences):
        filled = [0] * num_experts
        for t in range(b * length, (b + 1) * length):
            for k, e in enumerate(experts[t]):
                if e < num_experts and filled[e] < capacity:
                    filled[e] += 1
                    kept[t, k] = True
    return kept


def layer(x, params, config, *, mask=None, replay=None, token_ids=None, noise=None, num_sequences=1, sent=None):
    """The layer. `replay` gives the experts (random selection too); `noise` multiplies the router's input (jitter).

    `sent` is what routed experts are given for each token, where that is not the token itself.
    """
    router, num_experts, per_token = config.router, config.num_experts, config.experts_per_token
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    num_tokens = len(x)
    mask = np.ones(num_tokens, bool) if mask is None else np.asarray(mask)
    replay, token_ids = (None if given is None else np.asarray(given) for given in (replay, token_ids))
    x = np.array([row if here else np.zeros(len(row)) for row, here in zip(np.asarray(x, np.float64), mask)])
    routed = x if noise is None else x * noise
    logits = np.array([params["router_kernel"] @ row + params.get("router_logit_bias", 0) for row in routed])
    scores = np.array([SCORES[router.score](row) for row in logits])
    z = router.z_loss_weight * z_loss(logits, mask)
    if router.selection == "expert_choice":
        return _expert_choice(x, params, config, mask, scores, z)

    experts, counted = np.full((num_tokens, per_token), num_experts), 0
    for t in range(num_tokens):
        if not mask[t]:
            continue
        if replay is not None:
            experts[t] = replay[t]
        elif router.selection == "learned":
            experts[t] = learned_experts(scores[t], params, router, per_token)
        elif router.selection == "hash":
            experts[t] = hashed_experts(token_ids[t], per_token, num_experts)
        else:
            assert router.selection == "balanced"
            experts[t] = [(counted * per_token + k) % num_experts for k in range(per_token)]
        counted += 1
    kept = np.ones(experts.shape, bool)
    if config.capacity_factor is not None:
        kept = kept_slots(experts, config, num_sequences)

    output, weights_of = np.zeros(x.shape), [{} for _ in range(num_tokens)]
    for t in range(num_tokens):
        if not mask[t]:
            continue
        weights = slot_weights(scores[t], experts[t], params, router)
        for k in range(per_token):
            weights_of[t][int(experts[t, k])] = weights[k]
            if kept[t, k]:
                output[t] += weighed((x if sent is None else sent)[t], weights[k], params, int(experts[t, k]), config)
    output += shared(x, params, config, mask)

    if router.aux_loss_probabilities == "softmax":
        probabilities = np.array([softmax(row + params.get("router_selection_bias", 0)) for row in scores])
    elif router.score in ("softmax", "logits"):
        probabilities = np.array([softmax(row) for row in logits])
    else:
        probabilities = np.array([row / (row.sum() + router.normalize_epsilon) for row in scores])
    parts = num_sequences if router.aux_loss == "sequence" else 1
    load = np.array([(experts == e).sum() for e in range(num_experts)])
    return Result(
        output=output,
        aux_loss=router.aux_loss_weight * balance_loss(probabilities, experts, mask, parts),
        z_loss=z,
        load=load,
        entropy=entropy(load),
        max_violation=max_violation(load),
        dropped=int((~kept & (experts < num_experts)).sum()),
        experts=experts,
        tokens=None,
        weights=weights_of,
    )


def weighed(row, weight, params, e, config):
    """One slot's contribution, weighted on the way in or on the way out."""
    if config.router.weigh == "input":
        return expert(weight * row, params, e, config.experts.activation)
    return weight * expert(row, params, e, config.experts.activation)


def shared(x, params, config, mask):
    out = np.zeros(x.shape)
    if "shared_wo" in params:
        for t in range(len(x)):
            if mask[t]:
                out[t] = shared_expert(x[t], params, config.experts.activation)
    return out


def _expert_choice(x, params, config, mask, scores, z):
    num_tokens, num_experts = scores.shape
    present = [t for t in range(num_tokens) if mask[t]]
    share = config.capacity_factor * num_tokens * config.experts_per_token / num_experts
    capacity = min(max(math.ceil(share), 1), num_tokens)
    output, weights_of, tokens = np.zeros(x.shape), [{} for _ in range(num_tokens)], []
    for e in range(num_experts):
        tokens.append([present[i] for i in best([scores[t, e] for t in present], capacity)])
        for t in tokens[e]:
            weight = scores[t, e] * config.router.scale
            weight *= params["router_expert_scale"][e] if "router_expert_scale" in params else 1
            weights_of[t][e] = weight
            output[t] += weighed(x[t], weight, params, e, config)
    output += shared(x, params, config, mask)
    load = np.array([len(chosen) for chosen in tokens])
    return Result(
        output=output,
        aux_loss=0.0,
        z_loss=z,
        load=load,
        entropy=entropy(load),
        max_violation=max_violation(load),
        dropped=sum(not weights_of[t] for t in present),
        experts=None,
        tokens=tokens,
        weights=weights_of,
    )
