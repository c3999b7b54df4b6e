"""The plan: degrees turned into a mesh, and the place of every parameter on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from raggedmoe.mesh import AXES, TOKEN_AXES
from raggedmoe.names import unknown
from raggedmoe.parallel.degrees import Degrees
from raggedmoe.params import ParamSpec, Specs
from raggedmoe.partition import SPLITS, num_parts, partition


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who holds what."""

    degrees: Degrees
    tensor_split: str = "expert_dim"  # what the tensor axis splits of routed experts

    def __post_init__(self) -> None:
        if self.tensor_split not in SPLITS:
            raise unknown("tensor_split", self.tensor_split, SPLITS)

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh, of these devices or of the first of all that there are."""
        found = list(jax.devices() if devices is None else devices)[: self.degrees.num_devices]
        if len(found) < self.degrees.num_devices:
            raise ValueError(f"the plan needs {self.degrees.num_devices} devices, found {len(found)}")
        sizes = self.degrees.sizes
        return Mesh(np.array(found).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def spec(self, name: str, spec: ParamSpec) -> PartitionSpec:
        """How a parameter is split."""
        return partition(name, spec, self.degrees.sizes, self.tensor_split)

    def shardings(self, mesh: Mesh, specs: Specs) -> dict[str, NamedSharding]:
        """The place of every parameter."""
        return {name: NamedSharding(mesh, self.spec(name, spec)) for name, spec in specs.items()}

    def tokens(self, mesh: Mesh) -> NamedSharding:
        """The place of a batch: its first dimension is split over all axes that split tokens."""
        return NamedSharding(mesh, PartitionSpec(TOKEN_AXES))

    def device_bytes(self, specs: Mapping[str, ParamSpec]) -> dict[str, int]:
        """Bytes of each parameter on one device."""
        return {
            name: spec.num_elements
            * np.dtype(spec.dtype).itemsize
            // num_parts(self.spec(name, spec), self.degrees.sizes)
            for name, spec in specs.items()
        }
