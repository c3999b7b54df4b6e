"""The compiled programs of a run, and which kernels are in them."""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax

from raggedmoe.kernels.chosen import describe_choices
from raggedmoe.kernels.registry import record_selections
from raggedmoe.lora import is_adapter
from raggedmoe.models.decoder import Params
from raggedmoe.models.parameters import empty_amax_histories, param_specs
from raggedmoe.params import init_params
from raggedmoe.sharding.axes import ONE_DEVICE, LogicalMesh
from raggedmoe.sharding.training import batch_shapes, in_micro_batches, put, state_shapes
from raggedmoe.train.data.rows import Batch
from raggedmoe.train.settings.step import ResolvedStep
from raggedmoe.train.step.optimizer import make_optimizer
from raggedmoe.train.step.state import TrainState, init_state, state_from_params
from raggedmoe.train.step.step import held_out_loss, train_step


@dataclass(frozen=True, kw_only=True)
class Programs:
    """What a run calls. Compiled before the first step, so that no step's time holds a compilation."""

    init: Callable[[jax.Array], TrainState]
    step: Callable[[TrainState, Batch], Any]
    held_out: Callable[[Any, Batch], Any] | None  # None: nothing is held out
    kernels: list[dict[str, Any]]  # what was chosen for each operation, and why not the others, for run.json
    bytes_needed: int | None  # at the fullest of a step or an evaluation; None: the compiler does not say


def state_template(config: ResolvedStep, mesh: LogicalMesh = ONE_DEVICE) -> TrainState:
    """Describe the shapes of a run's state, and where each part is."""
    template, specs = jax.eval_shape(_init(config), jax.random.key(0)), param_specs(config.model)
    kept = {name: form.struct(specs[name].shape) for name, form in config.kept.items() if name in specs}
    return state_shapes(mesh, replace(template, frozen={**template.frozen, **kept}), specs)


def make_init(config: ResolvedStep, mesh: LogicalMesh = ONE_DEVICE) -> Callable[[jax.Array], TrainState]:
    """Make the start of a run from its key, each part of it made where it belongs, and none whole on one device."""
    return jax.jit(_init(config), out_shardings=places_of(state_template(config, mesh)))


def _init(config: ResolvedStep) -> Callable[[jax.Array], TrainState]:
    optimizer = make_optimizer(config.optimizer, param_specs(config.model))
    return lambda key: replace(init_state(config.model, optimizer, key), amax_history=_empty_histories(config))


def _empty_histories(config: ResolvedStep) -> Params:
    quantization = config.execution.moe.quantization
    return empty_amax_histories(config.model, quantization, mtp_layers=config.mtp_layers)


def state_from_loaded(
    config: ResolvedStep, mesh: LogicalMesh = ONE_DEVICE
) -> Callable[[Params, jax.Array], TrainState]:
    """Make the start of a run from its key and parameters where they belong; nothing else is of an earlier run.

    Adapters that are not among the parameters are new. What is frozen is taken as it is, and not copied.
    """
    specs = param_specs(config.model)
    optimizer = make_optimizer(config.optimizer, specs)

    def start(params: Params, key: jax.Array) -> TrainState:
        params_key, run_key = jax.random.split(key)
        missing = {name: spec for name, spec in specs.items() if is_adapter(name) and name not in params}
        new = init_params(missing, params_key) if missing else {}
        state = state_from_params({**params, **new}, specs, optimizer, run_key)
        return replace(state, amax_history=_empty_histories(config))

    jitted = jax.jit(start, out_shardings=places_of(replace(state_template(config, mesh), frozen={})))

    def start_beside_frozen(params: Params, key: jax.Array) -> TrainState:
        frozen = {name: value for name, value in params.items() if specs[name].updated_by is None}
        moved = {name: value for name, value in params.items() if name not in frozen}
        return replace(jitted(moved, key), frozen=frozen)

    return start_beside_frozen


def places_of(template: TrainState) -> Any:
    """Return what `jax.jit` takes as out_shardings."""
    return jax.tree.map(lambda leaf: leaf.sharding, template)


def compile_programs(
    config: ResolvedStep, batch: Batch, held_out_batch: Batch | None, mesh: LogicalMesh = ONE_DEVICE
) -> Programs:
    """Trace and compile for batches like these; without one that is held out, nothing is evaluated.

    The step is given a batch, or of several processes' num_bytes its own rows of it, and puts it where it belongs.
    """
    parts = config.micro_batches
    template, shapes = state_template(config, mesh), batch_shapes(mesh, batch, parts)
    step = functools.partial(train_step, config=config, mesh=mesh)
    with record_selections() as selections:
        lowered = {
            "step": jax.jit(step, donate_argnums=0, out_shardings=(places_of(template), None)).lower(template, shapes)
        }
    if held_out_batch is not None:
        held_out_shapes = batch_shapes(mesh, held_out_batch)
        # The loss of the model, whatever room its training has.
        execution = replace(config.execution, moe=replace(config.execution.moe, ragged_buffer_factor=None))
        evaluate = functools.partial(held_out_loss, config=config.model, execution=execution, mesh=mesh)
        lowered["held_out"] = jax.jit(evaluate).lower(template.layer_inputs, held_out_shapes)
    with ThreadPoolExecutor() as threads:  # parts of a compilation use one core only
        compiled = dict(zip(lowered, threads.map(lambda program: program.compile(), lowered.values())))
    held_out, needed = None, [_bytes_needed(compiled["step"])]
    if "held_out" in compiled:
        held_out = lambda params, batch: compiled["held_out"](params, put(batch, held_out_shapes))  # noqa: E731
        # With room for all rows it can need more than a step; the rest of the state is there meanwhile.
        needed.append(_bytes_needed(compiled["held_out"], beside=_device_bytes(template.optimizer)))
    return Programs(
        init=make_init(config, mesh),
        step=lambda state, batch: compiled["step"](state, put(in_micro_batches(batch, parts), shapes)),
        held_out=held_out,
        kernels=describe_choices(selections),
        bytes_needed=max((num_bytes for num_bytes in needed if num_bytes is not None), default=None),
    )


def _device_bytes(template: Any) -> int:
    """Count the bytes of a tree of shapes that one device holds."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(template)
    )


def _bytes_needed(compiled: Any, beside: int = 0) -> int | None:
    """Count what a program holds at most, by the compiler, and what is there beside it; None: it does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    shared = memory.alias_size_in_bytes  # the new state lies where the old one was
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - shared + beside
