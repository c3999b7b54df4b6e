"""The families by the model_type of their config.json."""

from pathlib import Path
from typing import Any

from raggedmoe.interop.families import deepseek_v2, deepseek_v3, gpt_oss, mixtral, olmoe, qwen3_moe
from raggedmoe.interop.table import Family
from raggedmoe.names import unknown

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (deepseek_v3, deepseek_v2, mixtral, qwen3_moe, olmoe, gpt_oss)
}
SPELLED_DIFFERENTLY = {"kimi_k2": "deepseek_v3"}  # the same architecture under a name of its own


def family_named(model_type: Any, where: Path | str) -> Family:
    """The family of a checkpoint."""
    if not isinstance(model_type, str):
        raise ValueError(f"{where}: expected model_type to be a name, got {model_type!r}")
    model_type = SPELLED_DIFFERENTLY.get(model_type, model_type)
    if model_type not in FAMILIES:
        raise unknown(f"{where}: model_type", model_type, (*FAMILIES, *SPELLED_DIFFERENTLY))
    return FAMILIES[model_type]
