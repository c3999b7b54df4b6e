"""All that a run is at one step: what a checkpoint holds beside the data's position."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.decoder import Params
from raggedmoe.models.specs import is_trained, param_specs
from raggedmoe.params import init_params
from raggedmoe.train.optimizer import wide


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The parameters, what the optimizer remembers, and every random state.

    Without types of arrays, as a checkpoint's template has shapes in their place.
    """

    step: Any  # steps done
    params: Params  # the master copy, by the names of `param_specs`
    optimizer: Any  # optax's state
    key: Any  # from which every step's randomness comes, with its number
    skipped: Any  # steps of the run whose loss or gradient was not finite
    skipped_in_a_row: Any


def new_state(config: ModelConfig, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The start of a run."""
    params_key, run_key = jax.random.split(key)
    return state_of(init_params(param_specs(config), params_key), optimizer, run_key)


def state_of(params: Params, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The start of a run from given parameters."""
    trained = {name: wide(value) for name, value in params.items() if is_trained(name)}
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero, params=params, optimizer=optimizer.init(trained), key=key, skipped=zero, skipped_in_a_row=zero
    )
