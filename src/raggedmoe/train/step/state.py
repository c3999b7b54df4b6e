"""The training state: what a checkpoint holds beside the position in the data."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.parameters import is_trained, param_specs
from raggedmoe.params import Params, init_params
from raggedmoe.train.step.optimizer import widen_to_float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The parameters, the optimizer's state, the random key and the counters of a run at one step.

    The fields are not typed as arrays, as the template of a checkpoint has shapes in their place.
    """

    step: Any  # number of steps done
    params: Params  # the master copy, by the names of `param_specs`
    optimizer: Any  # optax's state
    key: Any  # each step folds its number into this key
    skipped: Any  # number of steps whose loss or gradient was not finite
    skipped_in_a_row: Any


def init_state(config: ModelConfig, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Initialise the state of a run with new parameters."""
    params_key, run_key = jax.random.split(key)
    return state_from_params(init_params(param_specs(config), params_key), optimizer, run_key)


def state_from_params(params: Params, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Make the state of a run that starts from these parameters."""
    trained = {name: widen_to_float32(value) for name, value in params.items() if is_trained(name)}
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero, params=params, optimizer=optimizer.init(trained), key=key, skipped=zero, skipped_in_a_row=zero
    )
