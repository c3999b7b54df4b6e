"""Useful floating-point operations of a model, by its shapes: what model FLOP utilisation is a share of.

Multiplications that the mathematics asks for, at two operations each: a token's own experts only, keys that it may see
only (causal, within the window), no recomputation, no norms or softmax.
"""

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.parameters import param_specs
from raggedmoe.sharding.rules import is_routed


def forward_flops(config: ModelConfig, sequence_length: int, *, mtp_layers: int = 0) -> float:
    """Count the FLOPs of one token in a sequence of that length, on average."""
    weights = _weight_flops(config, mtp_layers, frozen=False) + _weight_flops(config, mtp_layers, frozen=True)
    layers = [config.kind(layer) for layer in range(config.num_layers + mtp_layers)]
    seen = sum(mean_visible_keys(sequence_length, kind.window) for kind in layers)
    attention = config.attention
    value_dim = getattr(attention, "value_dim", attention.head_dim)
    return weights + 2 * seen * attention.num_heads * (attention.head_dim + value_dim)


def _weight_flops(config: ModelConfig, mtp_layers: int, *, frozen: bool) -> float:
    """Count the FLOPs of one token with the weights that learn, or with those that are frozen."""
    weights = 0.0
    for name, spec in param_specs(config).items():
        if (spec.updated_by is None) != frozen:
            continue
        module = name.split(".")[1] if name.startswith("mtp.") else None
        if spec.contracts is None or (module is not None and int(module) >= mtp_layers):
            continue
        if name == "embedding" and not config.tied_embeddings:
            continue  # looked up, not multiplied
        heads = 1 + mtp_layers if name in ("embedding", "head") else 1  # every module of prediction reads them again
        used = config.moe.experts_per_token / config.moe.num_experts if is_routed(name, spec) else 1
        weights += heads * spec.num_elements * used
    return 2 * weights


def train_flops(config: ModelConfig, sequence_length: int, *, mtp_layers: int = 0) -> float:
    """Count the FLOPs of one token, forward and backward: a product has two there, one if its weight is frozen."""
    frozen = _weight_flops(config, mtp_layers, frozen=True)
    return 3 * forward_flops(config, sequence_length, mtp_layers=mtp_layers) - frozen


def mean_visible_keys(sequence_length: int, window: int | None) -> float:
    """Count the keys that a query sees, itself included, averaged over the positions of a sequence."""
    if window is None or window >= sequence_length:
        return (sequence_length + 1) / 2
    return window - window * (window - 1) / (2 * sequence_length)
