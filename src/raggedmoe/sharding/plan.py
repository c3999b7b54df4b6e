"""The plan: how many devices along each axis of a mesh, and from that the mesh and the sharding of every parameter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from raggedmoe.names import unknown
from raggedmoe.params import ParamSpec, Specs, divisors
from raggedmoe.sharding.axes import AXES, SPLITS, TOKEN_AXES, LogicalMesh, axes_of
from raggedmoe.sharding.rules import param_shardings, partition


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who holds what: devices along each axis, and what the tensor axis splits of the experts.

    >>> from raggedmoe import Plan
    >>> plan = Plan(fsdp=-1, expert=4).resolve(num_devices=8)
    >>> plan.sizes
    {'data': 1, 'fsdp': 2, 'expert': 4, 'tensor': 1}
    """

    data: int = 1  # Degrees of parallelism; -1, for one of them, takes the devices that are left.
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    tensor_split: str = "expert_dim"  # What the tensor axis splits of routed experts: F, or D ("model_dim").

    def __post_init__(self) -> None:
        if self.tensor_split not in SPLITS:
            raise unknown("tensor_split", self.tensor_split, SPLITS)
        for name, size in self.sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"expected {name}_parallelism >= 1, or -1 for the devices that are left, got {size}")
        if len(self.open) > 1:
            names = " and ".join(f"{name}_parallelism" for name in self.open)
            raise ValueError(f"expected one degree of -1 at most, got {names}; give all but one a number")

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis, in the mesh's order."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def open(self) -> tuple[str, ...]:
        """The axis that takes the devices that are left, if there is one."""
        return tuple(name for name, size in self.sizes.items() if size == -1)

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh; all degrees must be known."""
        assert not self.open, f"{self.open} are open"
        return math.prod(self.sizes.values())

    @property
    def num_token_shards(self) -> int:
        """Parts that the tokens of a batch are split into."""
        return math.prod(self.sizes[name] for name in TOKEN_AXES)

    def resolve(self, num_devices: int) -> "Plan":
        """The plan with -1 filled in, required to use so many devices at most."""
        known = {name: size for name, size in self.sizes.items() if size != -1}
        used = math.prod(known.values())
        text = " × ".join(f"{name}_parallelism={size}" for name, size in known.items() if size > 1) or "all degrees 1"
        if self.open:
            if num_devices % used:
                raise ValueError(
                    f"{num_devices} devices cannot be divided by {text} = {used}, so {self.open[0]}_parallelism=-1 has "
                    f"no whole number; use degrees whose product is one of {divisors(num_devices)}"
                )
            return replace(self, **{self.open[0]: num_devices // used})  # type: ignore[arg-type]
        if used > num_devices:
            raise ValueError(
                f"{text} = {used} devices, but there are {num_devices}; use degrees whose product is at most "
                f"{num_devices}"
            )
        return self

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh, of these devices or of the first of all that there are."""
        devices = list(jax.devices() if devices is None else devices)[: self.num_devices]
        if len(devices) < self.num_devices:
            raise ValueError(f"the plan needs {self.num_devices} devices, found {len(devices)}")
        grid = np.array(devices).reshape(tuple(self.sizes.values()))
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def spec(self, name: str, spec: ParamSpec) -> PartitionSpec:
        """The partition of a parameter over the logical axes."""
        mesh = AbstractMesh(tuple(self.sizes.values()), AXES)
        return partition(name, spec, LogicalMesh(mesh, tensor_split=self.tensor_split))

    def shardings(self, mesh: Mesh, specs: Specs) -> dict[str, NamedSharding]:
        """The sharding of every parameter on the mesh that this plan made."""
        return param_shardings(LogicalMesh(mesh, tensor_split=self.tensor_split), specs)

    def device_elements(self, name: str, spec: ParamSpec) -> int:
        """Elements of a parameter on one device."""
        axes = [axis for entry in self.spec(name, spec) for axis in axes_of(entry)]
        return spec.num_elements // math.prod(self.sizes[axis] for axis in axes)
