"""The training state: what a checkpoint holds beside the position in the data."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import Params, Specs, init_params
from raggedmoe.train.step.optimizer import widen_to_float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The parameters, the optimizer's state, the random key and the counters of a run at one step.

    The fields are not typed as arrays, as the template of a checkpoint has shapes in their place.
    """

    step: Any  # number of steps done
    params: Params  # the master copy, by the names of `param_specs`, of all that a step moves
    optimizer: Any  # optax's state
    key: Any  # each step folds its number into this key
    skipped: Any  # number of steps whose loss or gradient was not finite
    skipped_in_a_row: Any
    frozen: Params = field(default_factory=dict)  # the other parameters, beside which adapters learn: in no checkpoint
    # Of delayed scales: the operands' largest absolute values in the last steps, by names as those of parameters.
    amax_history: Params = field(default_factory=dict)

    @property
    def model_params(self) -> Params:
        """All parameters of the model."""
        return {**self.params, **self.frozen}

    @property
    def layer_inputs(self) -> Params:
        """All parameters, and the histories by which the experts' matmuls are scaled in training and evaluation."""
        return {**self.model_params, **self.amax_history}


def init_state(config: ModelConfig, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Initialise the state of a run with new parameters."""
    params_key, run_key = jax.random.split(key)
    specs = param_specs(config)
    return state_from_params(init_params(specs, params_key), specs, optimizer, run_key)


def state_from_params(
    params: Params, specs: Specs, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    """Make the state of a run that starts from these parameters."""
    trained = {name: widen_to_float32(value) for name, value in params.items() if specs[name].trained}
    frozen = {name: value for name, value in params.items() if specs[name].updated_by is None}
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        params={name: value for name, value in params.items() if name not in frozen},
        optimizer=optimizer.init(trained),
        key=key,
        skipped=zero,
        skipped_in_a_row=zero,
        frozen=frozen,
    )
