"""Where a stage of the layer runs: on one device, or in a small `shard_map` of its own on a mesh.

Between stages every array is a global one. What each device has for itself (its rows, its copy of gathered weights) is
a `Spread`: arrays with one entry for each device in front. So nothing is communicated between two stages, and the
devices' gradients are not summed there either: that happens where a stage says so, and nowhere else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from raggedmoe.hardware import Hardware, hardware_of_device, target_hardware
from raggedmoe.mesh import AXES, TENSOR, TOKEN_AXES


@jax.tree_util.register_pytree_node_class
class Spread:
    """What every device has for itself. Only a stage can look inside."""

    def __init__(self, leaves: Sequence[Any], structure: Any) -> None:
        self.leaves, self.structure = tuple(leaves), structure

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Sequence[Any]) -> "Spread":
        return cls(leaves, structure)

    @classmethod
    def of_one(cls, tree: Any) -> "Spread":
        """This device's, in a stage."""
        leaves, structure = jax.tree.flatten(tree)
        return cls([leaf[None] for leaf in leaves], structure)

    def here(self) -> Any:
        """The same back again, in a stage."""
        return jax.tree.unflatten(self.structure, [leaf[0] for leaf in self.leaves])


@dataclass(frozen=True, kw_only=True)
class Place:
    """How an argument or a result of a stage lies on the mesh."""

    spec: Any  # PartitionSpec, or a tree of them
    spread: bool = False  # every device of these axes has its own


WHOLE = Place(spec=PartitionSpec())  # the same on every device
TOKENS = Place(spec=PartitionSpec(TOKEN_AXES))  # split by tokens, the same on all tensor ranks
COLUMNS = Place(spec=PartitionSpec(TOKEN_AXES, TENSOR))  # the tokens, their width split over the tensor ranks
EACH = Place(spec=PartitionSpec(TOKEN_AXES), spread=True)  # one for each part of the tokens
EACH_DEVICE = Place(spec=PartitionSpec(AXES), spread=True)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A mesh with the axes of `raggedmoe.mesh`, or None: one device."""

    mesh: Mesh | AbstractMesh | None = None

    def __post_init__(self) -> None:
        if self.mesh is not None and tuple(self.mesh.axis_names) != AXES:
            raise ValueError(
                f"expected a mesh with the axes {AXES}, got {tuple(self.mesh.axis_names)}; "
                "raggedmoe.parallel.plan.Plan(degrees=...).mesh() makes one"
            )

    def size(self, *axes: str) -> int:
        """Devices along these axes together."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    def hardware(self, given: str | None) -> Hardware:
        """The chip that a layer is for: what the caller gave, or the mesh's."""
        device = None if self.mesh is None or given is not None else self.mesh.abstract_mesh.abstract_device
        return target_hardware(given) if device is None else hardware_of_device(device.platform, device.device_kind)

    def constrained(self, array: jax.Array, place: Place) -> jax.Array:
        """The array laid out so, by the compiler's own means."""
        if self.mesh is None:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, place.spec))

    @property
    def num_token_shards(self) -> int:
        """Parts that the tokens are split into."""
        return self.size(*TOKEN_AXES)

    @property
    def token_axes(self) -> tuple[str, ...] | None:
        """To sum over all tokens in a stage; None: they are all here."""
        return None if self.mesh is None else TOKEN_AXES

    def run(
        self,
        stage: Callable[..., Any],
        *args: Any,
        places: tuple[Place, ...],
        result: Place | tuple[Place, ...],
        checked: bool = True,
    ) -> Any:
        """``stage(*args)`` on every device's part.

        ``checked`` has JAX prove that what is said to be the same on several devices is: not for stages without
        communication that call kernels of others, which do not say what their results vary over.
        """
        if self.mesh is None:
            return stage(*args)

        def on_part(*parts: Any) -> Any:
            out = stage(*(part.here() if place.spread else part for part, place in zip(parts, places, strict=True)))
            if isinstance(result, Place):
                return Spread.of_one(out) if result.spread else out
            return tuple(Spread.of_one(each) if to.spread else each for each, to in zip(out, result, strict=True))

        out_specs = result.spec if isinstance(result, Place) else tuple(place.spec for place in result)
        in_specs = tuple(place.spec for place in places)
        return jax.shard_map(on_part, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checked)(*args)
