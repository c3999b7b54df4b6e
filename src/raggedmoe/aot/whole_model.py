"""What a whole model needs, from the compilation of a few of its layers.

The state is known from its shapes, exactly. Temporaries grow by the same for every layer of a kind, as layers are
alike: by what one layer more made of them. Dense layers, which need less than those with experts, count as those.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raggedmoe.aot.case import CompileOutcome
from raggedmoe.aot.subjects import TrainingStep, with_layers
from raggedmoe.aot.topology import find_chip
from raggedmoe.models.config import ModelConfig
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.resolve import ResolvedConfig, resolve
from raggedmoe.train.step.fit import state_bytes


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """The bytes of one device that a whole model needs."""

    num_layers: int
    compiled_layers: int
    arguments: int  # of the whole model: its state, and the batch
    rest: int  # all else of what was compiled: temporaries, outputs, code
    rest_per_layer: int
    available: int

    @property
    def num_bytes(self) -> int:
        return self.arguments + self.rest + (self.num_layers - self.compiled_layers) * self.rest_per_layer


def resolve_on(config: TrainConfig, topology: str) -> ResolvedConfig:
    """Make what runs on a topology's devices, of as many slices as the degrees say, without its compiler."""
    chip = find_chip(topology)
    num_chips = math.prod(int(size) for size in topology.partition(":")[2].split("x"))
    return resolve(config, chip, config.mesh.plan.least.slices * num_chips * chip.devices_per_chip)


def can_extrapolate(model: ModelConfig, num_layers: int) -> bool:
    """Say whether so many layers and one fewer differ by one turn of a loop, as the whole model's do.

    A loop of one turn is none: with DeepSeek-V3 on 512 devices (JAX 0.12), two layers with experts take 5.90 GiB more
    than one, the weights that are gathered for the next turn, and three 0.13 GiB more than two.
    """
    if num_layers < 2:
        return False
    larger, smaller = (with_layers(model, number).stacks for number in (num_layers, num_layers - 1))
    alike = [stack.kinds for stack in larger] == [stack.kinds for stack in smaller]
    return alike and smaller[-1].repeats > 1


def whole_model(outcomes: Sequence[CompileOutcome]) -> WholeModel | None:
    """Infer a model's needs from the outcomes of some layers and of one fewer; None: these are something else."""
    steps = [outcome.case.subject for outcome in outcomes if isinstance(outcome.case.subject, TrainingStep)]
    layers = [step.num_layers or 0 for step in steps]
    if len(outcomes) != 2 or len(steps) != 2 or 0 in layers or layers[0] != layers[1] + 1:
        return None
    larger, smaller = (outcome.compiled for outcome in outcomes)
    if larger is None or smaller is None or outcomes[0].available is None:
        return None
    config = resolve_on(steps[0].config, outcomes[0].case.topology)
    whole, cut = (
        state_bytes(model, config.plan, config.step.optimizer, config.step.kept)
        for model in (config.step.model, with_layers(config.step.model, layers[0]))
    )
    state = whole.params + whole.moments - cut.params - cut.moments
    rests = [compiled.memory.total - compiled.memory.arguments for compiled in (larger, smaller)]
    return WholeModel(
        num_layers=config.step.model.num_layers,
        compiled_layers=layers[0],
        arguments=larger.memory.arguments + state,
        rest=rests[0],
        rest_per_layer=max(rests[0] - rests[1], 0),
        available=outcomes[0].available,
    )
