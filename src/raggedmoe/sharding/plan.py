"""The plan: how many devices along each axis of a mesh, and from that the mesh and the sharding of every parameter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from raggedmoe.kernels.qarray import QuantizedForm
from raggedmoe.names import check_known, refuse_conflicts
from raggedmoe.params import ParamSpec, Specs, divisors
from raggedmoe.sharding.axes import AXES, DATA, SPLITS, TOKEN_AXES, LogicalMesh, MeshAxes, axes_of, logical_mesh
from raggedmoe.sharding.rules import Shardings, param_shardings, partition, stored_partition

SLICES = "dcn_data_parallelism"  # the setting: slices, which a data centre's network connects


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who holds what: devices along each axis, and what the tensor axis splits of the experts.

    >>> from raggedmoe import Plan
    >>> plan = Plan(fsdp=-1, expert=4).resolve(num_devices=8)
    >>> plan.sizes
    {'data': 1, 'fsdp': 2, 'expert': 4, 'tensor': 1}
    """

    slices: int = 1  # Slices, each with all that follows; the data axis crosses them. -1: all that there are.
    data: int = 1  # Degrees of parallelism; -1, for one of them, takes the devices that are left.
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    tensor_split: str = "expert_dim"  # What the tensor axis splits of routed experts: F, or D ("model_dim").

    def __post_init__(self) -> None:
        check_known("tensor_split", self.tensor_split, SPLITS)
        for name, size in self._degrees.items():
            if size < 1 and size != -1:
                left = "all slices" if name == SLICES else "the devices that are left"
                raise ValueError(f"expected {name} >= 1, or -1 for {left}, got {size}")
        if len(self.open) > 1:
            names = " and ".join(f"{name}_parallelism" for name in self.open)
            raise ValueError(f"expected one degree of -1 at most, got {names}; give all but one a number")

    @property
    def _degrees(self) -> dict[str, int]:
        """The degrees by their settings' names: slices, and devices along each axis in a slice."""
        return {SLICES: self.slices, **{f"{name}_parallelism": getattr(self, name) for name in AXES}}

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis, in the mesh's order; the data axis has those of all slices."""
        assert -1 not in self._degrees.values(), f"{self._degrees} are not all known"
        return {name: getattr(self, name) * (self.slices if name == DATA else 1) for name in AXES}

    @property
    def open(self) -> tuple[str, ...]:
        """The axis that takes the devices that are left, if there is one."""
        return tuple(name for name in AXES if getattr(self, name) == -1)

    @property
    def least(self) -> "Plan":
        """The plan with 1 for the degrees, and the number of slices, that are not known."""
        return replace(self, slices=max(self.slices, 1), **dict.fromkeys(self.open, 1))  # type: ignore[arg-type]

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh; all degrees must be known."""
        return math.prod(self.sizes.values())

    @property
    def num_token_shards(self) -> int:
        """Parts that the tokens of a batch are split into."""
        return self._logical_mesh.size(*TOKEN_AXES)

    def resolve(self, num_devices: int, num_slices: int | None = None) -> "Plan":
        """Fill in -1, and require that the plan uses so many devices at most.

        ``num_slices`` that the devices are of, if they say so: a host's devices may stand for any number of slices.
        """
        slices = (num_slices or 1) if self.slices == -1 else self.slices
        what = f"devices of {num_slices} slices"
        refuse_conflicts({SLICES: slices}, [(num_slices not in (None, slices), SLICES, what, "-1 takes them all")])
        plan = replace(self, slices=slices)
        used, shown = plan.least.num_devices, {name: size for name, size in plan._degrees.items() if size > 1}
        text = " × ".join(f"{name}={size}" for name, size in shown.items()) or "all degrees 1"
        if plan.open:
            fits, fitting = num_devices % used == 0, f"one of {divisors(num_devices)}"
        elif num_slices is not None and num_slices > 1:
            fits, fitting = used == num_devices, f"{num_devices}, as a mesh of several slices has all their devices"
        else:
            fits, fitting = used <= num_devices, f"at most {num_devices}"
        if not fits:
            raise ValueError(
                f"{text} = {used} devices, but there are {num_devices}; use degrees whose product is {fitting}"
            )
        return replace(plan, **dict.fromkeys(plan.open, num_devices // used))  # type: ignore[arg-type]

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Make the mesh of these devices or of the first of all that there are. Only its data axis crosses slices."""
        devices = list(jax.devices() if devices is None else devices)
        num_slices = count_slices(devices)
        plan = self.resolve(len(devices), num_slices)
        if (num_slices or 1) == 1:
            grid = np.array(devices[: plan.num_devices]).reshape(tuple(plan.sizes.values()))
        else:
            in_slice, slices = [getattr(plan, name) for name in AXES], [plan.slices, 1, 1, 1]
            grid = mesh_utils.create_hybrid_device_mesh(in_slice, slices, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def logical_mesh(self, devices: Sequence[jax.Device] | None = None) -> LogicalMesh:
        """Say where a run of this plan is: on the mesh of these devices or of the first that there are, or on one."""
        return LogicalMesh(None if self.num_devices == 1 else self.mesh(devices), tensor_split=self.tensor_split)

    def spec(self, name: str, spec: ParamSpec) -> PartitionSpec:
        """Return the partition of a parameter over the logical axes."""
        return partition(name, spec, self._logical_mesh)

    @property
    def _logical_mesh(self) -> LogicalMesh:
        """The mesh without its devices."""
        return LogicalMesh(AbstractMesh(tuple(self.sizes.values()), AXES), tensor_split=self.tensor_split)

    def shardings(self, mesh: Mesh | LogicalMesh, specs: Specs, mesh_axes: MeshAxes | None = None) -> Shardings:
        """Return the sharding of every parameter on the mesh that this plan made.

        On a mesh of your own, ``mesh_axes`` says which of its axes are ours; the degrees are then that mesh's.
        """
        return param_shardings(replace(logical_mesh(mesh, mesh_axes), tensor_split=self.tensor_split), specs)

    def device_elements(self, name: str, spec: ParamSpec) -> int:
        """Count the elements of a parameter on one device."""
        return spec.num_elements // self._logical_mesh.size(*axes_of(*self.spec(name, spec)))

    def device_bytes(self, name: str, spec: ParamSpec, form: QuantizedForm | None = None) -> int:
        """Count the bytes of a parameter on one device: of an array of its type, or as it is stored quantised."""
        return sum(num // self._logical_mesh.size(*axes) for num, axes in self.stored_parts(name, spec, form))

    def stored_parts(self, name: str, spec: ParamSpec, form: QuantizedForm | None) -> list[tuple[int, tuple[str, ...]]]:
        """Return the bytes of a parameter, or of a quantised one's values and scales, and the axes that split each."""
        stored = jax.ShapeDtypeStruct(spec.shape, spec.dtype) if form is None else form.struct(spec.shape)
        places = jax.tree.leaves(stored_partition(name, spec, stored, self._logical_mesh))
        arrays = jax.tree.leaves(stored)
        return [(array.size * array.dtype.itemsize, axes_of(*place)) for array, place in zip(arrays, places)]


def count_slices(devices: Sequence[jax.Device]) -> int | None:
    """Count the TPU slices that devices are of; None: they are no TPUs."""
    if any(device.platform != "tpu" for device in devices):
        return None
    return len({getattr(device, "slice_index", 0) for device in devices})  # one described slice has no number
