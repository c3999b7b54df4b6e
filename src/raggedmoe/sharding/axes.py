"""The logical axes of a mesh: the four roles that its axes play here, whatever they are called."""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from raggedmoe.params import check_divides

DATA, FSDP, EXPERT, TENSOR = "data", "fsdp", "expert", "tensor"
AXES = (DATA, FSDP, EXPERT, TENSOR)
TOKEN_AXES = (DATA, FSDP, EXPERT)  # tokens are split over all of these; tensor ranks see the same tokens
# What the tensor axis splits of routed experts: F, or D. Each is a logical axis too, the tensor axis if it splits that.
SPLITS = HIDDEN_TENSOR, WIDTH_TENSOR = "expert_dim", "model_dim"

MeshAxes = Mapping[str, str | tuple[str, ...]]  # logical axis -> the axis of the mesh, or several, major first


def axes_of(*entries: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes of some dimensions of a `PartitionSpec`, major first."""
    return tuple(axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry or ()))


@dataclass(frozen=True)
class LogicalMesh:
    """A mesh, and which of its axes are our logical ones. All that it holds is the same along its other axes."""

    mesh: Mesh | AbstractMesh | None = None  # None: all is on one device, wherever JAX puts it.
    mesh_axes: tuple[tuple[str, tuple[str, ...]], ...] = tuple((axis, (axis,)) for axis in AXES)
    tensor_split: str = HIDDEN_TENSOR  # What the tensor axis splits of routed experts.

    def axes(self, *logical: str) -> tuple[str, ...]:
        """Return the axes of the mesh that these logical axes are, major first; none on one device."""
        if self.mesh is None:
            return ()
        named = dict(self.mesh_axes)
        named |= {HIDDEN_TENSOR: (), WIDTH_TENSOR: (), self.tensor_split: named[TENSOR]}
        return tuple(name for axis in logical for name in named[axis])

    def size(self, *logical: str) -> int:
        """Count the devices along these logical axes together."""
        return math.prod(self.mesh.shape[name] for name in self.axes(*logical)) if self.mesh is not None else 1

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Translate a partition over logical axes to one over the mesh's own."""
        return PartitionSpec(*(self.axes(*axes_of(entry)) for entry in spec))

    def sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        """Return the sharding of an array that is split over logical axes; on one device there is none."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.spec(spec))

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Have XLA split an array over logical axes."""
        sharding = self.sharding(spec)
        return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)

    def run(self, stage: Any, *args: Any, **static: Any) -> Any:
        """Run a stage on every device's part of the arguments. All devices have the static arguments.

        On a mesh each stage is in a `shard_map` of its own, on one device it is a plain call.
        """
        with jax.named_scope(stage.__name__):
            if self.mesh is None:
                return stage(*args, **static)
            in_specs, out_specs = jax.tree.map(self.spec, stage.partitions)
            options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": stage.checked}
            return jax.shard_map(functools.partial(stage, **static), mesh=self.mesh, **options)(*args)


AnyMesh = Mesh | AbstractMesh | LogicalMesh
ONE_DEVICE = LogicalMesh()


def split_over(mesh: LogicalMesh, num: int, what: str) -> int:
    """Count the tokens or sequences that each device gets of so many, which must divide evenly."""
    shards = mesh.size(*TOKEN_AXES)
    check_divides(what, num, " × ".join(f"{axis}_parallelism" for axis in TOKEN_AXES), shards)
    return num // shards


def even_parts(size: int, num_parts: int) -> list[slice]:
    """Cut a size into so many parts that differ by one at most, or into fewer where some would be empty."""
    bounds = sorted({size * i // num_parts for i in range(num_parts + 1)})
    return [slice(start, end) for start, end in itertools.pairwise(bounds)] or [slice(0, 0)]


def logical_mesh(mesh: AnyMesh | None, mesh_axes: MeshAxes | None = None) -> LogicalMesh:
    """Describe a mesh, None for one device, by its logical axes. Without ``mesh_axes`` its axes have our names."""
    if mesh is None or isinstance(mesh, LogicalMesh):
        if mesh_axes is not None:
            raise ValueError(f"expected mesh_axes with a jax.sharding.Mesh, got {mesh_axes} with {mesh}; leave it out")
        return mesh or ONE_DEVICE
    names = tuple(mesh.axis_names)
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        kinds = ", ".join(f"{name} {kind.name}" for name, kind in zip(names, mesh.axis_types))
        raise ValueError(
            f"expected a mesh whose axes are of AxisType.Auto, got {kinds}; make it with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(names)}"
        )
    roles = {axis: axes_of(axis if mesh_axes is None else mesh_axes.get(axis)) for axis in AXES}
    used = axes_of(*roles.values())
    fits = names == AXES if mesh_axes is None else set(mesh_axes) <= set(AXES)
    if not fits or len(set(used) & set(names)) < len(used):
        raise ValueError(
            f"expected a mesh with the axes {AXES}, as raggedmoe.Plan(...).mesh() makes one, or mesh_axes that say "
            f"which of its axes these are, each once; got axes {names} and mesh_axes={mesh_axes}"
        )
    return LogicalMesh(mesh, tuple(roles.items()))
