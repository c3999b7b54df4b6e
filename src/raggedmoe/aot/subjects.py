"""The programs that can be compiled by name: an operation's call, a model's MoE layer, a model's training step.

Each function here makes a `Program` from arguments that JSON can hold, so that a worker can make it.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raggedmoe.aot.case import Program
from raggedmoe.aot.shapes import example_of_shape
from raggedmoe.aot.topology import find_topology
from raggedmoe.hardware import target_hardware
from raggedmoe.kernels import registry
from raggedmoe.kernels.catalog import operation as operation_named
from raggedmoe.kernels.example import Example
from raggedmoe.kernels.registry import BACKWARD, FORWARD
from raggedmoe.mesh import TOKEN_AXES
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.decoder import decode, logits
from raggedmoe.models.presets import ALIASES, model_preset
from raggedmoe.models.presets import PRESETS as MODELS
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.moe.presets import PRESETS as LAYERS
from raggedmoe.moe.records import MoEParams
from raggedmoe.names import unknown
from raggedmoe.sharding.stage import OnMesh


def example_named(operation: str, call: str, dtype: str) -> Example:
    """One of the operation's example calls by its name, or one made from sizes."""
    if "=" in call:
        return example_of_shape(operation, call, dtype)
    specs = {spec.name: spec for spec in operation_named(operation).specs}
    if call not in specs:
        raise unknown(f"example call of {operation},", call, specs)
    return specs[call].example(dtype)


def operation_call(
    operation: str,
    *,
    call: str,
    dtype: str = "bfloat16",
    implementation: str = "auto",
    direction: str = FORWARD,
    gradient: str | None = None,
    without_guard: bool = False,
) -> Program:
    """One direction of an operation on an example call; or, backward, the gradient of one argument alone.

    ``without_guard`` has the implementation tried although its `why_not` says no: to see whether that is so.
    """
    if without_guard:
        _lift_guard(operation, implementation)
    example = example_named(operation, call, dtype)
    return example_program(operation_named(operation).function, example, implementation, direction, gradient)


def _lift_guard(operation: str, name: str) -> None:
    """Forget why an implementation cannot run, in this process, until its implementations are looked up anew."""
    known = registry.implementations(operation)
    known[name] = replace(known[name], why_not=lambda call, hardware: None)


def example_program(
    function: Any, example: Example, implementation: str, direction: str, gradient: str | None = None
) -> Program:
    """A call's value, or its gradients alone, or that of one argument."""
    call = functools.partial(function, **example.options, implementation=implementation)
    arrays = with_integers(dict(example.arrays))
    if direction == FORWARD:
        return Program(function=lambda arrays: call(**arrays), args=(arrays,))
    if direction != BACKWARD:
        raise unknown("direction", direction, (FORWARD, BACKWARD))
    wanted = functools.partial(gradients, call, of=gradient)
    return Program(function=wanted, args=(arrays, with_integers(example.cotangent)))


def differentiable(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The floating ones among a call's arguments."""
    return {name: array for name, array in arrays.items() if array is not None and _is_floating(array)}


def gradients(function: Any, arrays: Mapping[str, Any], cotangent: Any, of: str | None = None) -> Any:
    """The gradients of every floating argument, or of one.

    Neither the value nor the other gradients are asked for, so the compiler leaves out what only they need.
    """
    floating = {name: array for name, array in differentiable(arrays).items() if of in (None, name)}
    rest = {name: array for name, array in arrays.items() if name not in floating}
    value, vjp = jax.vjp(lambda floating: function(**floating, **rest), floating)
    return vjp(cotangent.astype(value.dtype))[0]


def _is_floating(array: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(array))


def with_integers(tree: Any) -> Any:
    """A tree with shapes for floating arrays, and with values for integers, which steer kernels."""

    def plain(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return np.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(plain, tree)


def layer_config(preset: str) -> MoEConfig:
    """The MoE layer of a model."""
    if preset in LAYERS:  # among them some of which there is a layer only
        return LAYERS[preset]
    if preset not in MODELS and preset not in ALIASES:
        raise unknown("model", preset, {**LAYERS, **MODELS, **ALIASES})
    return model_preset(preset).moe


def moe_layer(
    preset: str, *, tokens: int, dtype: str = "bfloat16", moe_backend: str = "auto", forward: bool = False
) -> Program:
    """A model's MoE layer on so many tokens: its value, and the gradients of its input and of all its parameters.

    ``forward``: its value alone.
    """
    config = replace(
        layer_config(preset), moe_backend=moe_backend, strategy=None, kernels=None, param_dtype=jnp.dtype(dtype)
    )
    params = {name: jax.ShapeDtypeStruct(s.shape, s.dtype) for name, s in config.param_specs().items()}
    x = jax.ShapeDtypeStruct((tokens, config.model_dim), jnp.dtype(dtype))
    return _layer_program(config, x, params, forward=forward)


def moe_layer_on_mesh(
    words: Sequence[str], *, tokens: int, topology: str | None, dtype: str = "bfloat16", forward: bool = False
) -> Program:
    """Like `moe_layer`, on a topology's devices, on so many tokens of each, with the settings of `raggedmoe train`.

    ``topology``: None: one device of this machine.
    """
    devices = jax.devices()[:1] if topology is None else find_topology(topology).devices
    return layer_on_devices(words, devices, tokens=tokens, dtype=dtype, forward=forward)


def layer_on_devices(
    words: Sequence[str], devices: Sequence[Any], *, tokens: int, dtype: str = "bfloat16", forward: bool = False
) -> Program:
    """The MoE layer of `raggedmoe train WORDS` on these devices, on a sequence of so many tokens of each."""
    from raggedmoe.train.config import make_config
    from raggedmoe.train.settings import parse_settings

    made = make_config(parse_settings(words), target_hardware(), len(devices))
    config, plan = replace(made.step.model.moe, param_dtype=jnp.dtype(dtype)), made.plan
    mesh = plan.mesh(devices)
    places = plan.shardings(mesh, config.param_specs())
    params = {
        name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=places[name]) for name, s in config.param_specs().items()
    }
    shape = (tokens * plan.degrees.num_token_shards, config.model_dim)
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec(TOKEN_AXES)))
    return _layer_program(config, x, params, mesh, forward=forward)


def _layer_program(config: MoEConfig, x: Any, params: Any, mesh: Mesh | None = None, *, forward: bool) -> Program:
    num_sequences = OnMesh(mesh=mesh).num_token_shards

    def layer(x: Any, params: Any) -> Any:
        weights = MoEParams.from_flat(params)
        return moe_route_and_compute(x, weights, config, mesh=mesh, num_sequences=num_sequences).output

    def value_and_gradients(x: Any, params: Any, cotangent: Any) -> Any:
        value, vjp = jax.vjp(layer, x, params)
        return value, vjp(cotangent)

    if forward:
        return Program(function=layer, args=(x, params), mesh=mesh)
    return Program(function=value_and_gradients, args=(x, params, x), mesh=mesh)


def training_step(words: Sequence[str], *, num_layers: int | None = None, topology: str | None = None) -> Program:
    """The whole step that `raggedmoe train WORDS` would run, forward, backward and optimizer.

    ``num_layers``: so many layers, one of them dense if the model has dense ones and there is room for both kinds.
    ``topology``: whose devices the degrees of parallelism split; None: one device.
    """
    planned = _planned(words, num_layers, topology)
    from raggedmoe.train.programs import places_of
    from raggedmoe.train.step import train_step

    step, layout, template = planned.step, planned.layout, planned.template

    def stepped(state: Any, batch: Any) -> Any:
        state, report = train_step(state, batch, step, layout.mesh)
        if layout.mesh is not None:  # where the old one was, whose memory it takes
            state = jax.tree.map(jax.lax.with_sharding_constraint, state, places_of(template))
        return state, report

    args = (template, layout.batch(planned.batch, step.micro_batches))
    return Program(function=stepped, args=args, donate=(0,), mesh=layout.mesh)


def model_forward(words: Sequence[str], *, num_layers: int | None = None, topology: str | None = None) -> Program:
    """The forward pass alone of the model that `raggedmoe train WORDS` would train: from a batch's tokens to logits."""
    planned = _planned(words, num_layers, topology)
    model, layout = planned.step.model, planned.layout

    def forward(params: Any, ids: Any) -> Any:
        key = jax.random.key(0) if model.moe.router.selection == "random" else None
        return logits(params, decode(params, ids, model, key=key, mesh=layout.mesh).hidden, model)

    args = (planned.template.params, layout.batch(planned.batch).ids)
    return Program(function=forward, args=args, mesh=layout.mesh)


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A run as its settings describe it: its step, where it lies, and the shapes of its state and of a batch."""

    step: Any
    layout: Any
    template: Any
    batch: Any


def _planned(words: Sequence[str], num_layers: int | None, topology: str | None) -> _Planned:
    try:
        from raggedmoe.train.config import make_config
        from raggedmoe.train.layout import make_layout
        from raggedmoe.train.programs import state_template
        from raggedmoe.train.rows import Batch
        from raggedmoe.train.settings import parse_settings
    except ImportError as error:
        raise ValueError(f"a whole model needs more packages ({error}): pip install 'raggedmoe[train]'") from None
    devices = None if topology is None else find_topology(topology).devices
    config = make_config(parse_settings(words), target_hardware(), 1 if devices is None else len(devices))
    layout, step = make_layout(config.plan, devices), config.step
    if num_layers is not None:
        step = replace(step, model=with_layers(step.model, num_layers))
    shape = (config.data.batch_size, config.data.sequence_length)
    tokens, weights = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = Batch(ids=tokens, targets=tokens, segments=tokens, positions=tokens, weights=weights)
    return _Planned(step=step, layout=layout, template=state_template(step, layout), batch=batch)


def with_layers(model: ModelConfig, num_layers: int) -> ModelConfig:
    """So many layers of a model, one of them dense if it has dense ones and there is room for both kinds."""
    return replace(model, num_layers=num_layers, dense_layers=(0,) if model.dense_layers and num_layers > 1 else ())
