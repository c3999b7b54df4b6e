"""A stage of a layer on a mesh: a plain function, and a line that says where its arguments and its result lie.

Between stages every array is a global one. What each device has for itself (its rows, its copy of gathered weights) has
one entry for each device in front there. So nothing is communicated between two stages, and the devices' gradients are
not summed there either: that happens where a stage says so, and nowhere else.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from raggedmoe.sharding.axes import AXES, TENSOR, TOKEN_AXES, LogicalMesh

Function = TypeVar("Function", bound=Callable[..., Any])
Record = TypeVar("Record")


@dataclass(frozen=True)
class Placement:
    """How an argument or a result of a stage lies on the mesh, by its logical axes."""

    specs: Any  # A PartitionSpec, or a tree of them for what consists of several arrays.
    per_device: bool = False  # Whether every device along these axes has its own.
    width_split: "Placement | None" = None  # Where it lies instead if the tensor axis splits the model width.


REPLICATED = Placement(PartitionSpec())
COLUMNS = Placement(PartitionSpec(TOKEN_AXES, TENSOR))  # the tokens, their width split over the tensor ranks
TOKENS = Placement(PartitionSpec(TOKEN_AXES))  # split by tokens, the same on all tensor ranks
PER_SHARD = Placement(PartitionSpec(TOKEN_AXES), per_device=True)  # one for each part of the tokens
PER_DEVICE = Placement(PartitionSpec(AXES), per_device=True)
# The tokens before dispatch and after unpermute.
ACTIVATIONS = Placement(PartitionSpec(TOKEN_AXES), width_split=COLUMNS)
# Between the projections each tensor rank has its part of F, or all of them have the same sums over D.
BETWEEN_PROJECTIONS = Placement(PartitionSpec(AXES), per_device=True, width_split=PER_SHARD)


def stage(*, result: Any, checked: bool = True, **arguments: Placement) -> Callable[[Function], Function]:
    """Declare the placements of a stage's positional arguments, by name and in order, and of its result or results.

    ``checked`` has JAX prove that what is said to be the same on several devices is: not for stages without
    communication that call kernels of others, which do not say what their results vary over.
    """

    def declare(function: Function) -> Function:
        parameters = inspect.signature(function).parameters.values()
        names = [entry.name for entry in parameters if entry.kind != inspect.Parameter.KEYWORD_ONLY]
        assert names == list(arguments), f"{function.__name__}: placements of {list(arguments)} for {names}"
        function.__dict__.update(placements=(tuple(arguments.values()), result), checked=checked)
        return function

    return declare


def register_record(cls: type[Record]) -> type[Record]:
    """Make a dataclass a pytree whose fields may hold other things than arrays, such as their partition specs."""
    names = tuple(entry.name for entry in fields(cls))  # type: ignore[arg-type]
    keys = tuple(map(jax.tree_util.GetAttrKey, names))
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda record: (tuple(zip(keys, vars(record).values())), None),
        lambda _, values: make_record(cls, dict(zip(names, values))),
        lambda record: (tuple(vars(record).values()), None),
    )
    return cls


def make_record(cls: type[Record], values: Mapping[str, Any]) -> Record:
    """An instance with these fields, in their order, whose types nobody checks."""
    made = object.__new__(cls)
    made.__dict__.update(values)
    return made


@dataclass(frozen=True, kw_only=True)
class OnMesh:
    """Runs stages: on a mesh, each in a `shard_map` of its own, or on one device as plain calls."""

    mesh: LogicalMesh | None = None
    tensor_split: str = "expert_dim"

    def __call__(self, stage: Any, *args: Any, **static: Any) -> Any:
        """The stage on every device's part of the arguments. All devices have the static arguments."""
        with jax.named_scope(stage.__name__):
            if self.mesh is None:
                return stage(*args, **static)
            arguments, result = placements = jax.tree.map(self.placement, stage.placements)
            in_specs, out_specs = jax.tree.map(self.mesh.spec, jax.tree.map(lambda place: place.specs, placements))

            def on_device(*parts: Any) -> Any:
                out = stage(*map(_drop_device_dim, arguments, parts), **static)
                return jax.tree.map(_add_device_dim, result, out)

            options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": stage.checked}
            return jax.shard_map(on_device, mesh=self.mesh.mesh, **options)(*args)

    @property
    def splits_width(self) -> bool:
        """Whether the tensor axis splits the model width D, rather than the experts' F."""
        return self.tensor_split == "model_dim"

    def placement(self, place: Placement) -> Placement:
        """The placement that holds here: the other one if the tensor axis splits the model width."""
        return place.width_split if place.width_split and self.splits_width else place

    def size(self, *logical: str) -> int:
        """Devices along these logical axes together."""
        return 1 if self.mesh is None else self.mesh.size(*logical)

    def axes(self, *logical: str) -> tuple[str, ...]:
        """The axes of the mesh that a stage's collectives go over; none on one device, where nothing is sent."""
        return () if self.mesh is None else self.mesh.axes(*logical)


def _add_device_dim(place: Placement, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], tree) if place.per_device else tree


def _drop_device_dim(place: Placement, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree) if place.per_device else tree
