"""What a training step is on a machine, which `train/step/step.py` computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raggedmoe.kernels.qarray import QuantizedForm
from raggedmoe.models.config import ModelConfig, check_execution
from raggedmoe.models.execution import ModelExecution
from raggedmoe.train.settings.sections import OptimizerConfig, StepSettings


@dataclass(frozen=True, kw_only=True)
class ResolvedStep:
    """The configuration of a training step: the model, how it runs, the optimizer and the losses."""

    model: ModelConfig
    execution: ModelExecution = field(default_factory=ModelExecution)
    optimizer: OptimizerConfig
    losses: StepSettings = field(default_factory=StepSettings)
    rerun_on_overflow: bool = False  # a step that drops rows changes nothing: it will be run again with more room
    # The frozen matrices, by their names, that stay quantised as the folder of the adapters' base stores them.
    kept: Mapping[str, QuantizedForm] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_execution(self.model, self.execution)

    @property
    def micro_batches(self) -> int:
        """The parts of the batch, which are computed one after the other: their gradients are added up."""
        return self.losses.gradient_accumulation_steps

    @property
    def mtp_layers(self) -> int:
        """Multi-token-prediction modules that are trained."""
        return self.model.mtp_layers if self.losses.mtp_loss_weight else 0
