"""A stage of a layer on a mesh: a plain function, and a line that says where its arguments and its result lie.

Between stages every array is a global one. What each device has for itself (its rows, its copy of gathered weights) is
a `PerDevice`: arrays with one entry for each device in front. So nothing is communicated between two stages, and the
devices' gradients are not summed there either: that happens where a stage says so, and nowhere else.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from raggedmoe.hardware import Hardware, hardware_of_device, target_hardware
from raggedmoe.sharding.axes import AXES, EXPERT, TENSOR, TOKEN_AXES, LogicalMesh


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How an argument or a result of a stage lies on the mesh, by its logical axes."""

    spec: PartitionSpec
    per_device: bool = False  # every device along these axes has its own
    fields: Mapping[str, PartitionSpec] = field(default_factory=dict)  # of a dataclass or dict, what lies otherwise

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """All that occur, each once."""
        return tuple(dict.fromkeys((self.spec, *self.fields.values())))


REPLICATED = Placement(spec=PartitionSpec())
TOKENS = Placement(spec=PartitionSpec(TOKEN_AXES))  # split by tokens, the same on all tensor ranks
COLUMNS = Placement(spec=PartitionSpec(TOKEN_AXES, TENSOR))  # the tokens, their width split over the tensor ranks
PER_SHARD = Placement(spec=PartitionSpec(TOKEN_AXES), per_device=True)  # one for each part of the tokens
PER_DEVICE = Placement(spec=PartitionSpec(AXES), per_device=True)


@dataclass(frozen=True, kw_only=True)
class BySplit:
    """A placement that depends on what the tensor axis splits of the experts."""

    expert_dim: Placement
    model_dim: Placement


ACTIVATIONS = BySplit(expert_dim=TOKENS, model_dim=COLUMNS)  # the tokens before dispatch and after unpermute
# Between the projections each tensor rank has its part of F, or all of them have the same sums over D.
BETWEEN_PROJECTIONS = BySplit(expert_dim=PER_DEVICE, model_dim=PER_SHARD)


Result = Placement | BySplit | tuple[Placement | BySplit, ...]


@dataclass(eq=False)
class Stage:
    """What one device does, which is what calling it does, and where all that lies on a mesh, which `OnMesh` reads."""

    function: Callable[..., Any]
    arguments: tuple[Placement | BySplit, ...]
    result: Result
    checked: bool

    def __call__(self, *args: Any, **static: Any) -> Any:
        return self.function(*args, **static)

    @property
    def results(self) -> tuple[Placement | BySplit, ...]:
        """The placements of its results, also of a single one."""
        return self.result if isinstance(self.result, tuple) else (self.result,)


def stage(
    *, result: Result, checked: bool = True, **arguments: Placement | BySplit
) -> Callable[[Callable[..., Any]], Stage]:
    """Declare the placements of a stage's positional arguments, by name and in order, and of its result.

    ``checked`` has JAX prove that what is said to be the same on several devices is: not for stages without
    communication that call kernels of others, which do not say what their results vary over.
    """

    def declare(function: Callable[..., Any]) -> Stage:
        names = [name for name, entry in inspect.signature(function).parameters.items() if entry.kind in _POSITIONAL]
        assert names == list(arguments), f"{function.__name__}: placements of {list(arguments)} for {names}"
        declared = Stage(function, tuple(arguments.values()), result, checked)
        functools.update_wrapper(declared, function)
        return declared

    return declare


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@jax.tree_util.register_pytree_node_class
class PerDevice:
    """What every device has for itself. Only a stage can look inside."""

    def __init__(self, leaves: Iterable[Any], structure: Any) -> None:
        self.leaves, self.structure = tuple(leaves), structure

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Iterable[Any]) -> "PerDevice":
        return cls(leaves, structure)


@dataclass(frozen=True, kw_only=True)
class StageAxes:
    """The mesh axes that the collectives of stages go over. On one device they are empty, and nothing is sent."""

    tokens: tuple[str, ...] = ()  # that tokens are split over
    expert: tuple[str, ...] = ()  # that experts are split over
    tensor: tuple[str, ...] = ()  # of the tensor ranks
    partial_sums: tuple[str, ...] = ()  # whose ranks each have their part of F, so that their results are summed


@dataclass(frozen=True, kw_only=True)
class OnMesh:
    """Runs stages: on a mesh, each in a `shard_map` of its own, or on one device as plain calls."""

    mesh: LogicalMesh | None = None
    tensor_split: str = "expert_dim"

    def __call__(self, stage: Stage, *args: Any, **static: Any) -> Any:
        """The stage on every device's part of the arguments. All devices have the static arguments."""
        if self.mesh is None:
            with jax.named_scope(stage.function.__name__):
                return stage.function(*args, **static)
        places, results = (tuple(map(self.placement, places)) for places in (stage.arguments, stage.results))
        leaves = [_group_leaves(arg, place) for arg, place in zip(args, places, strict=True)]
        structures: list[_Structure] = []  # of the results, known when the function has been traced

        def on_device(*parts: _Groups) -> list[_Groups]:
            trees = (_ungroup_leaves(part, structure) for part, (_, structure) in zip(parts, leaves, strict=True))
            out = stage.function(*(_open(t) if p.per_device else t for t, p in zip(trees, places)), **static)
            outs = out if isinstance(stage.result, tuple) else (out,)
            groups = [_group_leaves(_close(o) if p.per_device else o, p) for o, p in zip(outs, results, strict=True)]
            structures[:] = [structure for _, structure in groups]
            return [group for group, _ in groups]

        with jax.named_scope(stage.function.__name__):
            groups = jax.shard_map(
                on_device,
                mesh=self.mesh.mesh,
                in_specs=tuple(tuple(map(self.mesh.spec, place.specs)) for place in places),
                out_specs=[tuple(map(self.mesh.spec, place.specs)) for place in results],
                check_vma=stage.checked,
            )(*(group for group, _ in leaves))
        values = tuple(map(_ungroup_leaves, groups, structures))
        return values if isinstance(stage.result, tuple) else values[0]

    def placement(self, place: Placement | BySplit) -> Placement:
        """Where something lies with this split."""
        return place if isinstance(place, Placement) else getattr(place, self.tensor_split)

    def size(self, *logical: str) -> int:
        """Devices along these logical axes together."""
        return 1 if self.mesh is None else self.mesh.size(*logical)

    def hardware(self, name: str | None) -> Hardware:
        """The chip that a layer is for: the one that the caller named, or the mesh's."""
        device = None if self.mesh is None or name is not None else self.mesh.mesh.abstract_mesh.abstract_device
        return target_hardware(name) if device is None else hardware_of_device(device.platform, device.device_kind)

    def constrain(self, array: jax.Array, place: Placement) -> jax.Array:
        """Have the compiler lay the array out so."""
        if self.mesh is None:
            return array
        return jax.lax.with_sharding_constraint(array, self.mesh.sharding(place.spec))

    @property
    def axes(self) -> StageAxes:
        """The axes that collectives inside of stages go over."""
        if self.mesh is None:
            return StageAxes()
        tensor = self.mesh.axes(TENSOR)
        return StageAxes(
            tokens=self.mesh.axes(*TOKEN_AXES),
            expert=self.mesh.axes(EXPERT),
            tensor=tensor,
            partial_sums=tensor if self.tensor_split == "expert_dim" else (),
        )


_Groups = tuple[list[Any], ...]  # the leaves of a tree, those of one partition spec together
_Structure = tuple[Any, list[int]]  # the tree, and the group of each of its leaves


def _group_leaves(tree: Any, place: Placement) -> tuple[_Groups, _Structure]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    order = [place.specs.index(place.fields.get(field_name(path), place.spec)) for path, _ in leaves]
    groups = tuple([leaf for (_, leaf), i in zip(leaves, order) if i == group] for group in range(len(place.specs)))
    return groups, (structure, order)


def _ungroup_leaves(groups: _Groups, structure: _Structure) -> Any:
    tree, order = structure
    leaves = [iter(group) for group in groups]
    return jax.tree.unflatten(tree, [next(leaves[i]) for i in order])


def _close(tree: Any) -> PerDevice:
    leaves, structure = jax.tree.flatten(tree)
    return PerDevice([leaf[None] for leaf in leaves], structure)


def _open(parts: PerDevice) -> Any:
    return jax.tree.unflatten(parts.structure, [leaf[0] for leaf in parts.leaves])


def field_name(path: tuple[Any, ...]) -> str:
    """The name of the dataclass's field or the dict's key that a path begins with; empty: it begins with neither."""
    return getattr(path[0], "name", getattr(path[0], "key", "")) if path else ""
