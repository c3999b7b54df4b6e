"""A stage of a layer on a mesh: a plain function, and a line that says where its arguments and its result lie.

Between stages every array is a global one. What each device has for itself (its rows, its copy of gathered weights) is
a `PerDevice`: arrays with one entry for each device in front. So nothing is communicated between two stages, and the
devices' gradients are not summed there either: that happens where a stage says so, and nowhere else.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from raggedmoe.hardware import Hardware, hardware_of_device, target_hardware
from raggedmoe.mesh import AXES, TENSOR, TOKEN_AXES


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How an argument or a result of a stage lies on the mesh."""

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

Lies = Placement | BySplit


@dataclass(frozen=True)
class Stage:
    """What one device does, which is what calling it does, and where all that lies on a mesh, which `OnMesh` reads."""

    function: Callable[..., Any]
    arguments: tuple[Lies, ...]
    result: Lies | tuple[Lies, ...]
    checked: bool

    def __call__(self, *args: Any, **static: Any) -> Any:
        return self.function(*args, **static)


def stage(
    *, result: Lies | tuple[Lies, ...], checked: bool = True, **arguments: Lies
) -> Callable[[Callable[..., Any]], Stage]:
    """Declare the placements of a stage's positional arguments, by name and in order, and of its result.

    ``checked`` has JAX prove that what is said to be the same on several devices is: not for stages without
    communication that call kernels of others, which do not say what their results vary over.
    """

    def declare(function: Callable[..., Any]) -> Stage:
        names = [name for name, entry in inspect.signature(function).parameters.items() if entry.kind in _POSITIONAL]
        assert names == list(arguments), f"{function.__name__}: placements of {list(arguments)} for {names}"
        return Stage(function, tuple(arguments.values()), result, checked)

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
class OnMesh:
    """Runs stages: on a mesh with the axes of `raggedmoe.mesh`, each in a `shard_map` of its own, or on one device."""

    mesh: Mesh | AbstractMesh | None = None
    tensor_split: str = "expert_dim"

    def __post_init__(self) -> None:
        if self.mesh is not None and tuple(self.mesh.axis_names) != AXES:
            raise ValueError(
                f"expected a mesh with the axes {AXES}, got {tuple(self.mesh.axis_names)}; "
                "raggedmoe.parallel.plan.Plan(degrees=...).mesh() makes one"
            )

    def __call__(self, stage: Stage, *args: Any, **static: Any) -> Any:
        """The stage on every device's part of the arguments."""
        with jax.named_scope(stage.function.__name__):
            return self.run(
                lambda *parts: stage.function(*parts, **static),
                *args,
                arguments=stage.arguments,
                result=stage.result,
                checked=stage.checked,
            )

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        arguments: tuple[Lies, ...],
        result: Lies | tuple[Lies, ...],
        checked: bool = True,
    ) -> Any:
        """Like calling the object, for a function whose placements are known only now."""
        if self.mesh is None:
            return function(*args)
        places = [self.placement(lies) for lies in arguments]
        results = [self.placement(lies) for lies in (result if isinstance(result, tuple) else (result,))]
        given = [_grouped(arg, place) for arg, place in zip(args, places, strict=True)]
        structures: list[_Structure] = []  # of the results, known when the function has been traced

        def on_device(*parts: _Groups) -> list[_Groups]:
            whole = (_ungrouped(part, structure) for part, (_, structure) in zip(parts, given, strict=True))
            out = function(*(_opened(arg) if place.per_device else arg for arg, place in zip(whole, places)))
            outs = out if isinstance(result, tuple) else (out,)
            found = [
                _grouped(_closed(each) if p.per_device else each, p) for each, p in zip(outs, results, strict=True)
            ]
            structures[:] = [structure for _, structure in found]
            return [groups for groups, _ in found]

        found = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(place.specs for place in places),
            out_specs=[place.specs for place in results],
            check_vma=checked,
        )(*(groups for groups, _ in given))
        values = tuple(_ungrouped(groups, structure) for groups, structure in zip(found, structures, strict=True))
        return values if isinstance(result, tuple) else values[0]

    def placement(self, lies: Lies) -> Placement:
        """Where something lies with this split."""
        return lies if isinstance(lies, Placement) else getattr(lies, self.tensor_split)

    def size(self, *axes: str) -> int:
        """Devices along these axes together."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    def hardware(self, name: str | None) -> Hardware:
        """The chip that a layer is for: the one that the caller named, or the mesh's."""
        device = None if self.mesh is None or name is not None else self.mesh.abstract_mesh.abstract_device
        return target_hardware(name) if device is None else hardware_of_device(device.platform, device.device_kind)

    def constrain(self, array: jax.Array, place: Placement) -> jax.Array:
        """Have the compiler lay the array out so."""
        if self.mesh is None:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, place.spec))

    @property
    def num_token_shards(self) -> int:
        """Parts that the tokens are split into."""
        return self.size(*TOKEN_AXES)

    @property
    def token_axes(self) -> tuple[str, ...] | None:
        """The axes to sum over all tokens in a stage; None: they are all here."""
        return None if self.mesh is None else TOKEN_AXES

    @property
    def tensor_axis(self) -> str | None:
        """The axis of the tensor ranks in a stage; None: there is one."""
        return None if self.mesh is None else TENSOR

    @property
    def adds_over(self) -> str | None:
        """The axis whose ranks' results of the down projection are summed, where each has its part of F."""
        return self.tensor_axis if self.tensor_split == "expert_dim" else None


_Groups = tuple[list[Any], ...]  # the leaves of a tree, those of one partition spec together
_Structure = tuple[Any, list[int]]  # the tree, and the group of each of its leaves


def _grouped(tree: Any, place: Placement) -> tuple[_Groups, _Structure]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    order = [place.specs.index(place.fields.get(field_name(path), place.spec)) for path, _ in leaves]
    groups = tuple([leaf for (_, leaf), i in zip(leaves, order) if i == group] for group in range(len(place.specs)))
    return groups, (structure, order)


def _ungrouped(groups: _Groups, structure: _Structure) -> Any:
    tree, order = structure
    leaves = [iter(group) for group in groups]
    return jax.tree.unflatten(tree, [next(leaves[i]) for i in order])


def _closed(tree: Any) -> PerDevice:
    leaves, structure = jax.tree.flatten(tree)
    return PerDevice([leaf[None] for leaf in leaves], structure)


def _opened(parts: PerDevice) -> Any:
    return jax.tree.unflatten(parts.structure, [leaf[0] for leaf in parts.leaves])


def field_name(path: tuple[Any, ...]) -> str:
    """The name of the dataclass's field or the dict's key that a path begins with; empty: it begins with neither."""
    return getattr(path[0], "name", getattr(path[0], "key", "")) if path else ""
