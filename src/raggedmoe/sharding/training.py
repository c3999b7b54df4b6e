"""Where a run's state and batches are: on one device, or on a plan's mesh, which may be of several processes."""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from raggedmoe.kernels.qarray import QArray
from raggedmoe.params import Params, Specs, check_divides
from raggedmoe.sharding.axes import TOKEN_AXES, LogicalMesh, even_parts
from raggedmoe.sharding.rules import stored_partition
from raggedmoe.sharding.stage import REPLICATED, TOKENS

TRANSFER_BYTES = 2**28  # of a parameter at a time between hosts
# [parts B S]: the rows of every micro-batch are split, so that none has to move when its turn comes.
PARTS_OF_TOKENS = PartitionSpec(None, TOKEN_AXES)


def state_shapes(mesh: LogicalMesh, template: Any, specs: Specs) -> Any:
    """Add its sharding to each shape of a state: the optimizer's moments lie where their parameters do."""

    def with_sharding(path: Any, leaf: Any) -> Any:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        is_param = bool(names) and names[-1] in specs
        places = stored_partition(names[-1], specs[names[-1]], leaf, mesh) if is_param else REPLICATED
        return jax.tree.map(lambda part, place: part.update(sharding=mesh.sharding(place)), leaf, places)

    return jax.tree_util.tree_map_with_path(with_sharding, template, is_leaf=lambda leaf: isinstance(leaf, QArray))


def batch_shapes(mesh: LogicalMesh, batch: Any, parts: int | None = None) -> Any:
    """Return the shapes of a batch ``[B S]``, or in micro-batches ``[parts B/parts S]``, with their sharding."""
    sharding = mesh.sharding(TOKENS if parts is None else PARTS_OF_TOKENS)
    if parts is not None:
        batch = jax.eval_shape(functools.partial(in_micro_batches, parts=parts), batch)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), batch)


def in_micro_batches(batch: Any, parts: int) -> Any:
    """Set the micro-batches of a batch ``[B S]`` apart: ``[parts B/parts S]``."""
    for array in jax.tree.leaves(batch):
        check_divides("batch_size", array.shape[0], "gradient_accumulation_steps", parts)
    return jax.tree.map(lambda array: array.reshape(parts, -1, *array.shape[1:]), batch)


def local_rows(mesh: LogicalMesh, num_rows: int, parts: int) -> list[int] | None:
    """List the rows of a batch in micro-batches that this process's devices hold, ascending; None: all of them."""
    shape, sharding = (parts, num_rows // parts), mesh.sharding(PARTS_OF_TOKENS)
    if sharding is None or jax.process_count() == 1:
        return None
    indices = sharding.addressable_devices_indices_map(shape).values()
    rows = sorted({row for index in indices if index for row in range(shape[1])[index[1]]})
    return [part * shape[1] + row for part in range(parts) for row in rows]


def put(arrays: Any, shapes: Any) -> Any:
    """Put arrays where their shapes say: whole ones that every process has, or of a batch only its `local_rows`."""
    make = jax.make_array_from_process_local_data
    return jax.tree.map(
        lambda a, shape: a if shape.sharding is None else make(shape.sharding, np.asarray(a), shape.shape),
        arrays,
        shapes,
    )


def check_all_take_part(mesh: LogicalMesh) -> None:
    """Require a device of the mesh in every process: one without would wait for ever, or train a run of its own."""
    sharding = mesh.sharding(REPLICATED)
    devices = jax.devices()[:1] if sharding is None else sharding.device_set
    idle = set(range(jax.process_count())) - {device.process_index for device in devices}
    if idle:
        raise ValueError(
            f"expected degrees that give each of {jax.process_count()} processes a device, got {len(devices)} of "
            f"{jax.device_count()} devices, none of process {min(idle)}; use them all, fsdp_parallelism=-1 for "
            "example, or fewer processes"
        )


def on_first_host(params: Params) -> Params | None:
    """Bring whole parameters to process 0; all processes must call this, and the others get None.

    A layer is moved at a time, or several, or some entries of a vocabulary: what has about `TRANSFER_BYTES`.
    """
    is_first = jax.process_index() == 0
    if all(value.is_fully_addressable for value in jax.tree.leaves(params)):
        return params if is_first else None

    def gather(value: jax.Array) -> Any:
        whole = np.empty(value.shape if is_first else (0,), value.dtype)
        for part in even_parts(value.shape[0], math.ceil(value.nbytes / TRANSFER_BYTES)):
            here = multihost_utils.process_allgather(value[part], tiled=True)
            if is_first:
                whole[part] = here
        return whole

    gathered = jax.tree.map(gather, params)
    return gathered if is_first else None
