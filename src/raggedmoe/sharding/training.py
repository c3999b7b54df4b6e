"""Where a run's state and batches are: on one device, or on a plan's mesh, which may be of several processes."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from raggedmoe.kernels.qarray import QArray
from raggedmoe.params import Params, Specs
from raggedmoe.sharding.axes import TOKEN_AXES, LogicalMesh
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.rules import param_shardings, stored_partition
from raggedmoe.sharding.stage import REPLICATED, TOKENS

TRANSFER_BYTES = 2**28  # of a parameter at a time between hosts
# [parts B S]: the rows of every micro-batch are split, so that none has to move when its turn comes.
PARTS_OF_TOKENS = PartitionSpec(None, TOKEN_AXES)


@dataclass(frozen=True, kw_only=True)
class TrainSharding:
    """The mesh of a run, and on it the sharding of the run's state and of its batches."""

    mesh: LogicalMesh | None  # None: all is on one device, wherever JAX puts it

    def state(self, template: Any, specs: Specs) -> Any:
        """Add its sharding to each shape of a state: the optimizer's moments lie where their parameters do."""
        if self.mesh is None:
            return template
        mesh = self.mesh
        shardings, whole = param_shardings(mesh, specs), mesh.sharding(REPLICATED)

        def with_sharding(path: Any, leaf: Any) -> Any:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            if isinstance(leaf, QArray):
                places = stored_partition(names[-1], specs[names[-1]], leaf, mesh)
                return jax.tree.map(lambda part, place: part.update(sharding=mesh.sharding(place)), leaf, places)
            return leaf.update(sharding=shardings.get(names[-1], whole) if names else whole)

        return jax.tree_util.tree_map_with_path(with_sharding, template, is_leaf=_is_quantized)

    def batch(self, template: Any, parts: int | None = None) -> Any:
        """Add its sharding to each shape of a batch ``[B S]``, or in micro-batches ``[parts B/parts S]``."""
        if self.mesh is None:
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), template)
        sharding = self.mesh.sharding(TOKENS if parts is None else PARTS_OF_TOKENS)
        shape = (lambda a: a.shape) if parts is None else (lambda a: in_micro_batches(a.shape, parts))
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(shape(a), a.dtype, sharding=sharding), template)

    def local_rows(self, num_rows: int, parts: int) -> list[int] | None:
        """List the rows of a batch in micro-batches that this process's devices hold, ascending; None: all of them."""
        if self.mesh is None or jax.process_count() == 1:
            return None
        shape = in_micro_batches((num_rows,), parts)
        indices = self.mesh.sharding(PARTS_OF_TOKENS).addressable_devices_indices_map(shape).values()
        rows = sorted({row for index in indices if index for row in range(shape[1])[index[1]]})
        return [part * shape[1] + row for part in range(parts) for row in rows]

    def put(self, arrays: Any, shapes: Any) -> Any:
        """Put arrays on the devices: whole ones that every process has, or of a batch only its `local_rows`."""

        def put_array(array: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
            values = np.asarray(array)
            if values.ndim < len(shape.shape):  # in micro-batches
                values = values.reshape(shape.shape[0], -1, *values.shape[1:])
            return jax.make_array_from_process_local_data(shape.sharding, values, shape.shape)

        return arrays if self.mesh is None else jax.tree.map(put_array, arrays, shapes)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QArray)


def in_micro_batches(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Return the shape of a batch's array with its micro-batches apart, ``[parts B/parts …]``."""
    if shape[0] % parts:
        raise ValueError(f"a batch of {shape[0]} sequences cannot be cut into {parts} equal micro-batches")
    return (parts, shape[0] // parts, *shape[1:])


def train_sharding(plan: Plan, devices: Any = None) -> TrainSharding:
    """Lay a run out on these devices, or the first of those that there are. A plan for one device has no mesh."""
    mesh = None if plan.num_devices == 1 else LogicalMesh(plan.mesh(devices), tensor_split=plan.tensor_split)
    return TrainSharding(mesh=mesh)


def check_all_take_part(sharding: TrainSharding) -> None:
    """Require a device of the mesh in every process: one without would wait for ever, or train a run of its own."""
    devices = jax.devices()[:1] if sharding.mesh is None else sharding.mesh.sharding(REPLICATED).device_set
    used = {device.process_index for device in devices}
    if len(used) < jax.process_count():
        raise ValueError(
            f"expected degrees that give each of {jax.process_count()} processes a device, got "
            f"{len(devices)} of {jax.device_count()} devices, none of process "
            f"{min(set(range(jax.process_count())) - used)}; use them all, fsdp_parallelism=-1 for example, or fewer "
            "processes"
        )


def transfer_slices(shape: tuple[int, ...], itemsize: int) -> list[slice]:
    """Cut the first dimension into as few slices as have at most `TRANSFER_BYTES`, or one entry, each."""
    if not shape:
        return [slice(None)]
    step = max(1, TRANSFER_BYTES // max(1, itemsize * math.prod(shape[1:])))
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def on_first_host(params: Params) -> Params | None:
    """Bring whole parameters to process 0; all processes must call this, and the others get None.

    A layer is moved at a time, or several, or some entries of a vocabulary: what has about `TRANSFER_BYTES`.
    """
    is_first = jax.process_index() == 0
    if all(value.is_fully_addressable for value in jax.tree.leaves(params)):
        return params if is_first else None

    def gather(value: jax.Array) -> Any:
        whole = np.empty(value.shape if is_first else (0,), value.dtype)
        for part in transfer_slices(value.shape, value.dtype.itemsize):
            here = multihost_utils.process_allgather(value[part], tiled=True)
            if is_first:
                whole[part] = here
        return whole

    gathered = jax.tree.map(gather, params)
    return gathered if is_first else None
