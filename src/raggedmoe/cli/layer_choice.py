"""The layer that `--model` or `--shape` describe."""

import re

from raggedmoe.aot.subjects import layer_config
from raggedmoe.moe.config import MoEConfig

DEFAULT_SHAPE = "T=2048,D=512,F=1024,E=16,K=2"


def parse_layer(model: str | None, shape: str | None) -> tuple[str, MoEConfig, int]:
    """Read --model or --shape: a title, the layer's configuration, and its number of tokens."""
    if model is not None and shape is not None:
        raise ValueError(f"give --model or --shape, not both; got {model!r} and {shape!r}")
    if model is not None:
        return model, layer_config(model), 4096
    sizes = parse_shape(shape or DEFAULT_SHAPE)
    config = MoEConfig(
        num_experts=sizes["E"], experts_per_token=sizes["K"], model_dim=sizes["D"], expert_dim=sizes["F"]
    )
    return shape or DEFAULT_SHAPE, config, sizes["T"]


def parse_shape(text: str) -> dict[str, int]:
    """Read the sizes in a text like ``T=2048,D=512,F=1024,E=16,K=2``, all five of them."""
    pairs = re.findall(r"([A-Za-z]+)\s*=\s*(\d+)", text)
    sizes = {letter: int(size) for letter, size in pairs}
    if sorted(sizes) != sorted("TDFEK") or re.sub(r"[A-Za-z]+\s*=\s*\d+", "", text).strip(" ,"):
        raise ValueError(f"expected a shape like {DEFAULT_SHAPE} with all of T, D, F, E and K, got {text!r}")
    return sizes
