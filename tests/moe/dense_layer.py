"""The oracle of the gradients: the layer with a given routing, in plain jnp over all experts, for autodiff in float64.

No kernel, strategy or router of raggedmoe is used here. `test_stages.py` checks its gradients against finite
differences of `numpy_layer.py`.
"""

import jax
import jax.numpy as jnp

SCORES = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
    "logits": lambda logits: logits,
}
ACTIVATIONS = {
    "silu": lambda gate: gate * jax.nn.sigmoid(gate),
    "gelu": lambda gate: 0.5 * gate * (1 + jax.lax.erf(gate / 2**0.5)),
    "gelu_tanh": lambda gate: 0.5 * gate * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
    "relu2": lambda gate: jnp.maximum(gate, 0) ** 2,
}


def activate(name, gate, up):
    if name == "clamped_swiglu":
        gate = jnp.minimum(gate, 7.0)
        hidden = gate * jax.nn.sigmoid(1.702 * gate)
        return hidden if up is None else hidden * (jnp.clip(up, -7.0, 7.0) + 1)
    hidden = ACTIVATIONS[name](gate)
    return hidden if up is None else hidden * up


def dense_layer(x, params, config, experts, *, mask, kept=None, added=None):
    """Output, balance loss over the batch and z loss, for experts [T K] (masked tokens' are never used).

    `added` is what rounding adds to each token on its way to routed experts: a constant, so straight-through.
    """
    router, activation, num_experts = config.router, config.experts.activation, config.num_experts
    x = jnp.where(mask[:, None], x, 0.0)
    here = mask.astype(x.dtype)
    num_present = jnp.maximum(here.sum(), 1.0)
    slots = (experts[:, :, None] == jnp.arange(num_experts)[None, None, :]) * here[:, None, None]  # [T K E]
    logits = x @ params["router_kernel"].T
    if "router_logit_bias" in params:
        logits = logits + params["router_logit_bias"][None, :]
    scores = SCORES[router.score](logits)

    weights = (slots * scores[:, None, :]).sum(-1)
    if router.normalize == "sum":
        weights = weights / (weights.sum(-1, keepdims=True) + router.normalize_epsilon)
    elif router.normalize == "softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    if "router_expert_scale" in params:
        weights = weights * (slots * params["router_expert_scale"][None, None, :]).sum(-1)
    used = slots if kept is None else slots * kept[:, :, None]
    combine = router.scale * (used * weights[:, :, None]).sum(1)  # [T E]
    chosen = used.sum(1)

    rows = (x if added is None else x + added)[:, None, :] * (combine if router.weigh == "input" else chosen)[
        :, :, None
    ]  # [T E D]
    gate = jnp.einsum("ted,efd->tef", rows, params["wi_0"])
    up = jnp.einsum("ted,efd->tef", rows, params["wi_1"]) if "wi_1" in params else None
    if "bias_wo" in params:
        gate = gate + params["bias_wi_0"][None]
        up = None if up is None else up + params["bias_wi_1"][None]
    outputs = jnp.einsum("tef,efd->ted", activate(activation, gate, up), params["wo"])
    if "bias_wo" in params:
        outputs = outputs + params["bias_wo"][None]
    output = ((chosen if router.weigh == "input" else combine)[:, :, None] * outputs).sum(1)
    if "shared_wo" in params:
        up = x @ params["shared_wi_1"].T if "shared_wi_1" in params else None
        shared = activate(activation, x @ params["shared_wi_0"].T, up) @ params["shared_wo"]
        if "shared_gate" in params:
            shared = shared * jax.nn.sigmoid(x @ params["shared_gate"])[:, None]
        output = output + here[:, None] * shared

    if router.aux_loss_probabilities == "softmax":
        probabilities = jax.nn.softmax(scores + params.get("router_selection_bias", 0), axis=-1)
    elif router.score in ("softmax", "logits"):
        probabilities = jax.nn.softmax(logits, axis=-1)
    else:
        probabilities = scores / (scores.sum(-1, keepdims=True) + router.normalize_epsilon)
    share = slots.sum((0, 1)) / (num_present * experts.shape[1])
    aux_loss = num_experts * (share * (here[:, None] * probabilities).sum(0) / num_present).sum()
    z_loss = (here * jax.nn.logsumexp(logits, axis=-1) ** 2).sum() / num_present
    return output, router.aux_loss_weight * aux_loss, router.z_loss_weight * z_loss
