"""All models by name."""

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.families import deepseek_v2, deepseek_v3, gpt_oss, mixtral, olmoe, qwen3_moe
from raggedmoe.names import unknown

PRESETS: dict[str, ModelConfig] = {
    name: config
    for family in (deepseek_v3, deepseek_v2, mixtral, qwen3_moe, olmoe, gpt_oss)
    for name, config in family.PRESETS.items()
}
# As MaxText's users type them, and a family by itself.
ALIASES = {
    "deepseek2-16b": "deepseek-v2-lite",
    "deepseek2-236b": "deepseek-v2",
    "deepseek3-671b": "deepseek-v3",
    "deepseek3-671b-2dfsdp": "deepseek-v3",
    "kimi-k2-1t": "kimi-k2",
    "mixtral": "mixtral-8x7b",
    "qwen3-moe": "qwen3-30b-a3b",
    "olmoe": "olmoe-1b-7b",
    "gpt-oss": "gpt-oss-20b",
}


def model_preset(name: str) -> ModelConfig:
    """Return the configuration of a public model, or of a tiny one of its family."""
    name = ALIASES.get(name, name)
    if name not in PRESETS:
        raise unknown("model", name, (*PRESETS, *ALIASES))
    return PRESETS[name]
