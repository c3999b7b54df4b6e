"""The subjects of `raggedmoe compile`: an operation's call, a model's MoE layer, its training step or forward pass.

Each is a `Subject`: a small record that says what to compile, and whose `program` makes it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from raggedmoe.aot.case import JitProgram
from raggedmoe.aot.shapes import example_of_shape
from raggedmoe.aot.topology import find_topology
from raggedmoe.hardware import target_hardware
from raggedmoe.interop.named_model import is_folder, named_model
from raggedmoe.kernels import registry
from raggedmoe.kernels.catalog import operation as operation_named
from raggedmoe.kernels.example import Example
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.registry import BACKWARD, FORWARD
from raggedmoe.kernels.value_and_gradients import gradients, value_and_pullback
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.decoder import decode, logits
from raggedmoe.models.families.llama4 import LAYERS
from raggedmoe.models.presets import ALIASES
from raggedmoe.models.presets import PRESETS as MODELS
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.names import check_known, unknown
from raggedmoe.sharding.axes import TOKEN_AXES, LogicalMesh
from raggedmoe.sharding.stage import TOKENS
from raggedmoe.sharding.training import batch_shapes
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.step import ResolvedStep

if TYPE_CHECKING:
    from raggedmoe.train.data.rows import Batch
    from raggedmoe.train.step.state import TrainState


def find_example(operation: str, call: str, dtype: str) -> Example:
    """Look up one of the operation's example calls by its name, or make one from sizes."""
    if "=" in call:
        return example_of_shape(operation, call, dtype)
    specs = {spec.name: spec for spec in operation_named(operation).all_specs}
    check_known(f"example call of {operation},", call, specs)
    return specs[call].example(dtype)


@dataclass(frozen=True, kw_only=True)
class OperationCall:
    """One direction of an operation on an example call; or, backward, the gradient of one argument alone."""

    operation: str
    call: str  # the name of an example call, or sizes
    dtype: str = "bfloat16"
    implementation: str = "auto"
    direction: str = FORWARD
    gradient: str | None = None
    without_guard: bool = False  # try the implementation although its `why_not` says no: to see whether that is so

    @property
    def contender(self) -> str:
        """What computes the call, as a table of several names it."""
        return self.implementation

    def program(self) -> JitProgram:
        """Make the program of that direction."""
        if self.without_guard:
            _lift_guard(self.operation, self.implementation)
        function = functools.partial(operation_named(self.operation).function, implementation=self.implementation)
        example = find_example(self.operation, self.call, self.dtype)
        arrays, cotangent = with_integers(dict(example.arrays)), with_integers(example.cotangent)
        call = functools.partial(function, **example.options)
        return call_program(call, arrays, cotangent, self.direction, self.gradient)


def _lift_guard(operation: str, name: str) -> None:
    """Forget why an implementation cannot run, in this process, until its implementations are looked up anew."""
    known = registry.implementations(operation)
    known[name] = replace(known[name], why_not=lambda call, hardware: None)


def call_program(
    function: Callable[..., Any], arrays: dict[str, Any], cotangent: Any, direction: str, gradient: str | None = None
) -> JitProgram:
    """Make the program of a call's value, or, backward, of its gradients alone, or of that of one argument."""
    if direction == FORWARD:
        return JitProgram(function=lambda arrays: function(**arrays), args=(arrays,))
    if direction != BACKWARD:
        raise unknown("direction", direction, (FORWARD, BACKWARD))
    return JitProgram(function=functools.partial(gradients, function, of=gradient), args=(arrays, cotangent))


def with_integers(tree: Any) -> Any:
    """Make a tree with shapes for floating and quantised arrays, and with values for integers, which steer kernels."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, QArray):
            return jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), leaf)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return np.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(plain, tree, is_leaf=lambda leaf: isinstance(leaf, QArray))


def layer_config(preset: str) -> MoEConfig:
    """Look up the MoE layer of a model, by its preset's name or its folder, or one of which there is a layer only."""
    if preset in LAYERS:
        return LAYERS[preset]
    if preset not in MODELS and preset not in ALIASES and not is_folder(preset):
        raise unknown("model", preset, {**LAYERS, **MODELS, **ALIASES})
    return named_model(preset).moe


@dataclass(frozen=True, kw_only=True)
class MoELayer:
    """A model's MoE layer on one device: its value, and the gradients of its input and of all its parameters."""

    preset: str
    tokens: int
    dtype: str = "bfloat16"
    moe_backend: str = "auto"
    forward: bool = False  # its value alone

    def program(self) -> JitProgram:
        """Make the layer's program."""
        dtype = jnp.dtype(self.dtype)
        config = replace(layer_config(self.preset), param_dtype=dtype)
        execution = MoEExecution(moe_backend=self.moe_backend)
        params = {name: jax.ShapeDtypeStruct(s.shape, s.dtype) for name, s in config.param_specs().items()}
        x = jax.ShapeDtypeStruct((self.tokens, config.model_dim), dtype)
        return _layer_program(config, execution, x, params, forward=self.forward)


@dataclass(frozen=True, kw_only=True)
class MoELayerOnMesh:
    """A `MoELayer` on a topology's devices, with the settings of `raggedmoe train`."""

    config: TrainConfig
    tokens: int  # of each device
    topology: str | None  # None: one device of this machine
    dtype: str = "bfloat16"
    forward: bool = False

    def program(self) -> JitProgram:
        """Make the layer's program on the topology's devices."""
        devices = jax.devices()[:1] if self.topology is None else _devices(self.config, self.topology)
        return layer_on_devices(self.config, devices, tokens=self.tokens, dtype=self.dtype, forward=self.forward)


def _devices(config: TrainConfig, topology: str) -> tuple[Any, ...]:
    """Look up the devices of a topology, of as many slices as the degrees say."""
    return find_topology(topology, config.mesh.plan.least.slices).devices


def layer_on_devices(
    config: TrainConfig, devices: Sequence[Any], *, tokens: int, dtype: str = "bfloat16", forward: bool = False
) -> JitProgram:
    """Make the program of a run's MoE layer, on a sequence of so many tokens of each device."""
    made = resolve(config, target_hardware(), len(devices))
    layer, plan = replace(made.step.model.moe, param_dtype=jnp.dtype(dtype)), made.plan
    mesh = plan.mesh(devices)
    shardings = plan.shardings(mesh, layer.param_specs())
    params = {
        name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=shardings[name])
        for name, s in layer.param_specs().items()
    }
    shape = (tokens * plan.num_token_shards, layer.model_dim)
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, TOKENS))
    return _layer_program(layer, made.step.execution.moe, x, params, mesh, forward=forward)


def _layer_program(
    config: MoEConfig, execution: MoEExecution, x: Any, params: Any, mesh: Mesh | None = None, *, forward: bool
) -> JitProgram:
    num_sequences = LogicalMesh(mesh).size(*TOKEN_AXES)

    def layer(x: Any, params: Any) -> Any:
        return moe_route_and_compute(x, params, config, execution, mesh=mesh, num_sequences=num_sequences).output

    def value_and_gradients(x: Any, params: Any, cotangent: Any) -> Any:
        return value_and_pullback(layer, (x, params), cotangent)

    if forward:
        return JitProgram(function=layer, args=(x, params), mesh=mesh)
    return JitProgram(function=value_and_gradients, args=(x, params, x), mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The whole step of a run: forward, backward and optimizer."""

    config: TrainConfig
    num_layers: int | None = None  # so many, as `with_layers` cuts the model; None: all
    topology: str | None = None  # whose devices the degrees of parallelism split; None: one device

    def program(self) -> JitProgram:
        """Make the step's program."""
        run = _describe_run(self.config, self.num_layers, self.topology)
        from raggedmoe.train.step.programs import places_of
        from raggedmoe.train.step.step import train_step

        step, mesh, template = run.step, run.mesh.mesh, run.template

        def run_step(state: Any, batch: Any) -> Any:
            state, report = train_step(state, batch, step, run.mesh)
            if mesh is not None:  # where the old one was, whose memory it takes
                state = jax.tree.map(jax.lax.with_sharding_constraint, state, places_of(template))
            return state, report

        args = (template, batch_shapes(run.mesh, run.batch, step.micro_batches))
        return JitProgram(function=run_step, args=args, donate=(0,), mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class ModelForward:
    """The forward pass alone of the model that a run would train: from a batch's tokens to logits."""

    config: TrainConfig
    num_layers: int | None = None
    topology: str | None = None

    def program(self) -> JitProgram:
        """Make the forward pass's program."""
        run = _describe_run(self.config, self.num_layers, self.topology)
        model, execution = run.step.model, run.step.execution

        def forward(params: Any, ids: Any) -> Any:
            key = jax.random.key(0) if model.moe.router.selection == "random" else None
            out = decode(params, ids, model, execution, key=key, mesh=run.mesh)
            return logits(params, out.hidden, model)

        args = (run.template.model_params, batch_shapes(run.mesh, run.batch).ids)
        return JitProgram(function=forward, args=args, mesh=run.mesh.mesh)


SplitOverDevices = MoELayerOnMesh | TrainingStep | ModelForward  # by the run's degrees of parallelism


@dataclass(frozen=True, kw_only=True)
class _RunDescription:
    """A run as its settings describe it: its step, its mesh, and the shapes of its state and of a batch."""

    step: ResolvedStep
    mesh: LogicalMesh
    template: "TrainState"
    batch: "Batch"


def _describe_run(config: TrainConfig, num_layers: int | None, topology: str | None) -> _RunDescription:
    try:
        from raggedmoe.train.data.rows import Batch
        from raggedmoe.train.step.programs import state_template
    except ImportError as error:
        raise ValueError(f"a whole model needs more packages ({error}): pip install 'raggedmoe[train]'") from None
    devices = None if topology is None else _devices(config, topology)
    made = resolve(config, target_hardware(), 1 if devices is None else len(devices))
    mesh, step = made.plan.logical_mesh(devices), made.step
    if num_layers is not None:
        step = replace(step, model=with_layers(step.model, num_layers))
    shape = (made.batch_size, made.data.sequence_length)
    tokens, weights = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = Batch(ids=tokens, targets=tokens, segments=tokens, positions=tokens, weights=weights)
    return _RunDescription(step=step, mesh=mesh, template=state_template(step, mesh), batch=batch)


def with_layers(model: ModelConfig, num_layers: int) -> ModelConfig:
    """Cut a model to so many layers, one of them dense if it has dense ones and there is room for both kinds."""
    return replace(model, num_layers=num_layers, dense_layers=(0,) if model.dense_layers and num_layers > 1 else ())
