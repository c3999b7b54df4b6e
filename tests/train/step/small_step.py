"""A step that compiles fast, of a small model that has every part that a step treats apart.

Dense layers between those with experts, a selection bias, all losses of the routers, and multi-token prediction. Its
experts are plain einsums.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import model_preset
from raggedmoe.moe.config import RouterConfig
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.train.data.rows import Batch
from raggedmoe.train.settings.sections import OptimizerConfig, StepSettings
from raggedmoe.train.settings.step import ResolvedStep
from raggedmoe.train.step.optimizer import make_optimizer
from raggedmoe.train.step.state import state_from_params
from raggedmoe.train.step.step import train_step

EPS = float(jnp.finfo(jnp.float32).eps)
LENGTH, RATE, MTP_WEIGHT = 16, 0.01, 0.3
# Documents of each row, by length; what is left is padding. Cut in four, one micro-batch has a row of padding only and
# another has nothing else. The first row ends inside a document: its last token has a target.
ROWS = ((17,), (5, 11), (3, 1, 7), (), (2, 2, 12), (9,), (), ())


def packed(rows, vocab_size, seed=0):
    """A batch of random tokens, by a loop over documents."""
    rng = np.random.default_rng(seed)
    shape = (len(rows), LENGTH)
    ids, targets, positions = (np.zeros(shape, np.int32) for _ in range(3))
    segments, weights = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for row, lengths in enumerate(rows):
        place = 0
        for document, length in enumerate(lengths):
            tokens = rng.integers(0, vocab_size, length)
            for i in range(min(length, LENGTH - place)):
                ids[row, place], segments[row, place], positions[row, place] = tokens[i], document, i
                if i + 1 < length:
                    targets[row, place], weights[row, place] = tokens[i + 1], 1
                place += 1
    return Batch(ids=ids, targets=targets, segments=segments, positions=positions, weights=weights)


def tiny(name, **changes):
    return dataclasses.replace(model_preset(name), **changes)


def small_model(**router):
    preset = model_preset("mixtral-tiny")
    router = RouterConfig(score="sigmoid", selection_bias=True, scale=2.5, **router)
    moe = dataclasses.replace(preset.moe, router=router)
    return dataclasses.replace(preset, vocab_size=61, mlp_dim=32, mtp_layers=1, moe=moe)


def whole_model():
    model = small_model(aux_loss="sequence", aux_loss_weight=0.1, z_loss_weight=0.03)
    return dataclasses.replace(model, num_layers=4, dense_layers=(0, 2))


EINSUM = ModelExecution(moe=MoEExecution(moe_backend="dense"))  # experts that compile fast
# Without a first moment and clipping the optimizer's state after a step holds the gradient as it was.
ADAM = OptimizerConfig(
    schedule_steps=40, learning_rate=0.01, warmup_steps=4, adam_b1=0.0, gradient_clipping_threshold=0.0
)
WHOLE = ResolvedStep(
    model=whole_model(),
    execution=EINSUM,
    optimizer=ADAM,
    losses=StepSettings(bias_update_rate=RATE, mtp_loss_weight=MTP_WEIGHT),
)
BATCH = packed(ROWS, WHOLE.model.vocab_size)


def with_losses(config, **changes):
    return dataclasses.replace(config, losses=dataclasses.replace(config.losses, **changes))


def drawn_params(model, seed=0):
    """Parameters that keep activations at about 1, norms and biases that are not their first values."""
    rng, params = np.random.default_rng(seed), {}
    for name, spec in param_specs(model).items():
        noise = rng.standard_normal(spec.shape, np.float32)
        params[name] = noise * 0.125 if spec.init == "normal" else (spec.init == "ones") + 0.1 * noise
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def sorted_out(params):
    """What learns by gradient, and the biases."""
    trained = {name: value for name, value in params.items() if not name.endswith("selection_bias")}
    return trained, {name: value for name, value in params.items() if name not in trained}


def first_state(config):
    specs = param_specs(config.model)
    optimizer = make_optimizer(config.optimizer, specs)
    return state_from_params(drawn_params(config.model), specs, optimizer, jax.random.key(0))


@functools.cache
def step_of(config):
    return jax.jit(functools.partial(train_step, config=config))


def gradients(state):
    return optax.tree_utils.tree_get(state.optimizer, "mu")


def assert_same_bits(found, expected):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
