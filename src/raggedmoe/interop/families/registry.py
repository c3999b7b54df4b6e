"""The table of model families, by the model_type of their config.json."""

from typing import Any

from raggedmoe.interop.families import deepseek_v2, deepseek_v3, gpt_oss, mixtral, olmoe, qwen3_moe
from raggedmoe.interop.table import Family
from raggedmoe.names import unknown
from raggedmoe.storage import AnyPath

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (deepseek_v3, deepseek_v2, mixtral, qwen3_moe, olmoe, gpt_oss)
}
MODEL_TYPE_ALIASES = {"kimi_k2": "deepseek_v3"}  # models with the architecture of another family


def family_by_model_type(model_type: Any, where: AnyPath | str) -> Family:
    """Look up the family of a checkpoint; ``where`` names it in errors."""
    if not isinstance(model_type, str):
        raise ValueError(f"{where}: expected model_type to be a name, got {model_type!r}")
    model_type = MODEL_TYPE_ALIASES.get(model_type, model_type)
    if model_type not in FAMILIES:
        raise unknown(f"{where}: model_type", model_type, (*FAMILIES, *MODEL_TYPE_ALIASES))
    return FAMILIES[model_type]
