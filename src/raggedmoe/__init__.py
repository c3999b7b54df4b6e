"""Mixture-of-Experts for JAX: the fastest kernel that is proven correct on your hardware, and why."""

import importlib
from typing import TYPE_CHECKING

from raggedmoe.kernels.attention.api import attention as attention
from raggedmoe.kernels.expert_ffn.api import ExpertBiases as ExpertBiases
from raggedmoe.kernels.expert_ffn.api import expert_ffn as expert_ffn
from raggedmoe.kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from raggedmoe.kernels.qarray import QArray as QArray
from raggedmoe.kernels.quant_config import QuantConfig as QuantConfig
from raggedmoe.kernels.ragged_gather.api import ragged_gather as ragged_gather
from raggedmoe.kernels.ragged_gather_reduce.api import ragged_gather_reduce as ragged_gather_reduce
from raggedmoe.kernels.registry import Directions as Directions
from raggedmoe.kernels.registry import KernelChoice as KernelChoice
from raggedmoe.lora import LoraConfig as LoraConfig
from raggedmoe.models.config import ModelConfig as ModelConfig
from raggedmoe.models.execution import ModelExecution as ModelExecution
from raggedmoe.models.merge import merge_lora as merge_lora
from raggedmoe.models.module import Decoder as Decoder
from raggedmoe.models.presets import model_preset as model_preset
from raggedmoe.moe.balance import update_selection_bias as update_selection_bias
from raggedmoe.moe.config import ExpertConfig as ExpertConfig
from raggedmoe.moe.config import MoEConfig as MoEConfig
from raggedmoe.moe.config import RouterConfig as RouterConfig
from raggedmoe.moe.execution import MoEExecution as MoEExecution
from raggedmoe.moe.module import MoE as MoE
from raggedmoe.moe.records import MoEOutput as MoEOutput
from raggedmoe.sharding.plan import Plan as Plan
from raggedmoe.version import __version__ as __version__

if TYPE_CHECKING:
    from raggedmoe import interop as interop
    from raggedmoe.launch.processes import join_processes as join_processes
    from raggedmoe.train.loop.loop import RunOutcome as RunOutcome
    from raggedmoe.train.loop.loop import train as train
    from raggedmoe.train.settings.config import TrainConfig as TrainConfig
    from raggedmoe.train.settings.sections import CheckpointConfig as CheckpointConfig
    from raggedmoe.train.settings.sections import DataConfig as DataConfig
    from raggedmoe.train.settings.sections import ExecutionSettings as ExecutionSettings
    from raggedmoe.train.settings.sections import MeshSettings as MeshSettings
    from raggedmoe.train.settings.sections import ModelOverrides as ModelOverrides
    from raggedmoe.train.settings.sections import OptimizerConfig as OptimizerConfig
    from raggedmoe.train.settings.sections import RunConfig as RunConfig
    from raggedmoe.train.settings.sections import StepSettings as StepSettings

# Parts that take long to import, or need the packages of an extra, and the modules that have them.
_SECTIONS = "raggedmoe.train.settings.sections"
_LAZY = {
    "join_processes": "raggedmoe.launch.processes",
    "RunOutcome": "raggedmoe.train.loop.loop",
    "TrainConfig": "raggedmoe.train.settings.config",
    "CheckpointConfig": _SECTIONS,
    "DataConfig": _SECTIONS,
    "ExecutionSettings": _SECTIONS,
    "MeshSettings": _SECTIONS,
    "ModelOverrides": _SECTIONS,
    "OptimizerConfig": _SECTIONS,
    "RunConfig": _SECTIONS,
    "StepSettings": _SECTIONS,
}
_LAZY_PACKAGES = ("interop", "train")  # the second can be called


def __getattr__(name: str) -> object:
    """Import a part when it is first used."""
    if name in _LAZY_PACKAGES:
        return importlib.import_module(f"raggedmoe.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'raggedmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the parts that are not imported yet, too."""
    return sorted({*globals(), *_LAZY, *_LAZY_PACKAGES})
