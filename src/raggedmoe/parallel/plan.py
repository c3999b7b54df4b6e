"""The plan: degrees turned into a mesh, and the place of every parameter on it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from raggedmoe.mesh import AXES, EXPERT, FSDP, TENSOR, TOKEN_AXES
from raggedmoe.moe.config import is_routed
from raggedmoe.parallel.degrees import Degrees
from raggedmoe.params import ParamSpec, Specs

# Of a parameter that all tokens use, the first width that it has is split over axes that otherwise split tokens only,
# and the first of the other dimensions over the tensor axis.
WIDTH_AXES = (FSDP, EXPERT)
WIDTH_DIMS = ("model_dim", "q_latent", "kv_latent")
TENSOR_DIMS = ("head", "kv_head", "mlp_dim", "shared_dim", "vocab")
SPLITS = ("expert_dim", "model_dim")  # what the tensor axis splits of routed experts: F or D


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who holds what."""

    degrees: Degrees
    tensor_split: str = "expert_dim"  # of routed experts

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh, of these devices or of the first of all that there are."""
        found = list(jax.devices() if devices is None else devices)[: self.degrees.num_devices]
        if len(found) < self.degrees.num_devices:
            raise ValueError(f"the plan needs {self.degrees.num_devices} devices, found {len(found)}")
        sizes = self.degrees.sizes
        return Mesh(np.array(found).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def spec(self, name: str, spec: ParamSpec) -> PartitionSpec:
        """How a parameter is split. What does not divide stays whole, but for routed experts, where it is an error."""
        if is_routed(name, spec):
            return self._routed(name, spec)
        if len([axis for axis in spec.axes if axis != "layer"]) < 2:
            return PartitionSpec()  # norms and biases: small, and whole everywhere
        first = {dims: [dim for dim in dims if dim in spec.axes][:1] for dims in (WIDTH_DIMS, TENSOR_DIMS)}
        entries = {**dict.fromkeys(first[WIDTH_DIMS], WIDTH_AXES), **dict.fromkeys(first[TENSOR_DIMS], (TENSOR,))}
        return PartitionSpec(*(self._fitting(entries.get(dim, ()), size) for dim, size in zip(spec.axes, spec.shape)))

    def _routed(self, name: str, spec: ParamSpec) -> PartitionSpec:
        entries = {"expert": (EXPERT,), self.tensor_split: (TENSOR,)}
        if len(spec.axes) > 2 and "expert_dim" in spec.axes:  # not the biases, which are small
            entries["model_dim"] = (*entries.get("model_dim", ()), FSDP)
        for dim, size in zip(spec.axes, spec.shape):
            degree = self._degree(entries.get(dim, ()))
            if size % degree:
                axes = " × ".join(f"{axis}_parallelism={self.degrees.sizes[axis]}" for axis in entries[dim])
                raise ValueError(
                    f"{name}: its {dim}={size} is not divisible by {axes}; use a degree out of "
                    f"{[n for n in range(1, min(size, 512) + 1) if size % n == 0]}"
                )
        return PartitionSpec(*(self._entry(entries.get(dim, ())) for dim in spec.axes))

    def _degree(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.degrees.sizes[axis] for axis in axes)

    def _entry(self, axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
        return None if not axes else axes[0] if len(axes) == 1 else axes

    def _fitting(self, axes: tuple[str, ...], size: int) -> str | tuple[str, ...] | None:
        """As many of the axes, from the first, as divide the size."""
        while size % self._degree(axes):
            axes = axes[:-1]
        return self._entry(axes)

    def shardings(self, mesh: Mesh, specs: Specs) -> dict[str, NamedSharding]:
        """The place of every parameter."""
        return {name: NamedSharding(mesh, self.spec(name, spec)) for name, spec in specs.items()}

    def tokens(self, mesh: Mesh) -> NamedSharding:
        """The place of a batch: its first dimension is split over all axes that split tokens."""
        return NamedSharding(mesh, PartitionSpec(TOKEN_AXES))


def device_bytes(plan: Plan, specs: Mapping[str, ParamSpec]) -> dict[str, int]:
    """Bytes of each parameter on one device."""
    found = {}
    for name, spec in specs.items():
        parts = (entry if isinstance(entry, tuple) else (entry,) for entry in plan.spec(name, spec) if entry)
        degree = math.prod(plan.degrees.sizes[axis] for part in parts for axis in part)
        found[name] = spec.num_elements * np.dtype(spec.dtype).itemsize // degree
    return found
