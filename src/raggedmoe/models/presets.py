"""All models by name."""

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.families import deepseek_v2, deepseek_v3, gpt_oss, mixtral, olmoe, qwen3_moe
from raggedmoe.names import unknown

PRESETS: dict[str, ModelConfig] = {
    name: config
    for family in (deepseek_v3, deepseek_v2, mixtral, qwen3_moe, olmoe, gpt_oss)
    for name, config in family.PRESETS.items()
}
ALIASES = {"deepseek2-16b": "deepseek-v2-lite", "deepseek3-671b": "deepseek-v3"}  # as MaxText's users type them


def model_preset(name: str) -> ModelConfig:
    """The configuration of a public model, or of a tiny one of its family."""
    name = ALIASES.get(name, name)
    if name not in PRESETS:
        raise unknown("model", name, (*PRESETS, *ALIASES))
    return PRESETS[name]
