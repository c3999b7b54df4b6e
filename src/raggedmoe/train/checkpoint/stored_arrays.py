"""The arrays of a checkpoint: their names and types, and how orbax writes and reads them."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from raggedmoe.storage import AnyPath, ObjectPath
from raggedmoe.storage.trees import download
from raggedmoe.train.checkpoint.manifest import StoredLeaf
from raggedmoe.train.checkpoint.zarr_arrays import read_arrays

# What begins empty where a checkpoint has none like it, and is left out where the run has no place for it: experts may
# be quantised otherwise when a run is resumed.
MAY_BEGIN_EMPTY = "amax_history/"


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Name the arrays of a tree by their paths."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves: dict[str, Any] = {}
    for path, leaf in pairs:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "state"  # a bare array has no path
        if name in leaves:
            raise ValueError(f"{name}: expected one array of that name, got two; rename a key that has a slash in it")
        if not hasattr(leaf, "dtype"):
            raise ValueError(
                f"{name}: expected an array in the state, got {type(leaf).__name__}; put it into extra, or make it one "
                "with jnp.asarray and a dtype"
            )
        leaves[name] = leaf
    return leaves


def describe_leaf(name: str, leaf: Any) -> StoredLeaf:
    """Describe an array for the manifest, and refuse one that would not be restored as it was."""
    if not isinstance(leaf, jax.Array):
        raise ValueError(
            f"{name}: expected a JAX array in the state, got {type(leaf).__name__}; make it one with jnp.asarray"
        )
    if not _is_key(leaf) and leaf.weak_type:
        raise ValueError(
            f"{name}: expected an array with a type of its own, got a weakly typed {leaf.dtype}, which would come back "
            f"strong and promote otherwise; make it with jnp.asarray(…, jnp.{leaf.dtype})"
        )
    impl = str(jax.random.key_impl(leaf)) if _is_key(leaf) else None
    return StoredLeaf(shape=leaf.shape, dtype=str(leaf.dtype), key_impl=impl)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _stored_form(leaf: Any, stored: StoredLeaf) -> jax.ShapeDtypeStruct:
    """Return the shape and type on disk: those of the array, or of a random key's data."""
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(stored.dtype))


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Weights hardly compress: zstd made 96 MB of 104, and reading them several times slower.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def non_empty(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the arrays that are written, and the data of random keys; of one without elements the manifest has all."""
    filled = {name: leaf for name, leaf in leaves.items() if leaf.size}
    return {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in filled.items()}


class OrbaxWriter:
    """Writes arrays to a folder of a disk. They are copied to the host when it is made."""

    def __init__(self, folder: Path, leaves: dict[str, jax.Array]) -> None:
        # A flat table of names: orbax joins the keys of nested ones with dots, and ours have dots in them.
        # It refuses arrays without elements.
        data = non_empty(leaves)
        self._writing: ocp.AsyncCheckpointer | None = None
        if not data:
            folder.mkdir()
            return
        self._writing = ocp.AsyncCheckpointer(_handler())
        self._writing.save(folder, args=ocp.args.PyTreeSave(data))

    def finish(self) -> None:
        """Wait until all processes' parts are written."""
        if self._writing is not None:
            with self._writing:
                self._writing.wait_until_finished()


def read_state(
    folder: AnyPath, template: Any, stored_leaves: dict[str, StoredLeaf], *, of_another_run: bool = False
) -> Any:
    """Read the stored arrays into a tree like the template. Raise an error that lists those that differ from it.

    Of another run's state the template may be a part, such as all parameters, with other floating-point types, to which
    the arrays are cast.
    """
    leaves = leaves_by_name(template)
    stored_leaves, empty = _with_empty_leaves(leaves, stored_leaves)
    _check_same_leaves(folder, leaves, stored_leaves, of_another_run)
    shardings = {name: _template_sharding(leaf) for name, leaf in leaves.items()}
    stored = {name: _stored_form(leaf, stored_leaves[name]) for name, leaf in leaves.items()}
    filled = {name: array for name, array in stored.items() if array.size and name not in empty}
    arrays = _read_arrays(folder, filled, {name: stored_leaves[name].chunks for name in filled}, shardings)
    restored = []
    for name, array in stored.items():
        read = arrays.pop(name) if name in filled else np.zeros(array.shape, array.dtype)
        if not isinstance(read, jax.Array):
            read = jnp.asarray(read) if shardings[name] is None else jax.device_put(read, shardings[name])
        impl = stored_leaves[name].key_impl
        if impl is not None:
            read = jax.random.wrap_key_data(read, impl=impl)
        elif read.dtype != leaves[name].dtype:
            read = read.astype(leaves[name].dtype)
        restored.append(read)
    return jax.tree.unflatten(jax.tree.structure(template), restored)


def _with_empty_leaves(
    template: dict[str, Any], stored: dict[str, StoredLeaf]
) -> tuple[dict[str, StoredLeaf], dict[str, StoredLeaf]]:
    """Replace what may begin empty, and is not stored as the template has it; return all leaves, and the empty ones."""
    empty = {
        name: StoredLeaf(shape=tuple(leaf.shape), dtype=str(leaf.dtype), key_impl=None)
        for name, leaf in template.items()
        if name.startswith(MAY_BEGIN_EMPTY)
        and (name not in stored or (tuple(stored[name].shape), stored[name].dtype) != (leaf.shape, str(leaf.dtype)))
    }
    kept = {name: leaf for name, leaf in stored.items() if name in template or not name.startswith(MAY_BEGIN_EMPTY)}
    return {**kept, **empty}, empty


def _read_arrays(
    folder: AnyPath,
    stored: dict[str, jax.ShapeDtypeStruct],
    chunks: dict[str, tuple[int, ...] | None],
    shardings: dict[str, jax.sharding.Sharding | None],
) -> dict[str, Any]:
    """Read arrays as they were written: by orbax, or as objects."""
    if not stored:
        return {}
    as_objects = {name: shape for name, shape in chunks.items() if shape is not None}
    if as_objects:
        return read_arrays(folder, stored, as_objects, shardings)
    if isinstance(folder, ObjectPath):  # copied from a disk to where orbax does not read
        with tempfile.TemporaryDirectory(prefix="raggedmoe-") as local:
            download(folder, Path(local))
            return _read_with_orbax(Path(local), stored, shardings)
    return _read_with_orbax(folder, stored, shardings)


def _read_with_orbax(
    folder: Path, stored: dict[str, jax.ShapeDtypeStruct], shardings: dict[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    restore_args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if shardings[name] is None
        else ocp.ArrayRestoreArgs(sharding=shardings[name])
        for name in stored
    }
    with ocp.Checkpointer(_handler()) as reading:
        wanted = ocp.args.PyTreeRestore(item=stored, restore_args=restore_args, partial_restore=True)
        return reading.restore(folder, args=wanted)


def _template_sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Return the sharding of a template's leaf; None if it is uncommitted, as the array then must be."""
    return None if isinstance(leaf, jax.Array) and not leaf.committed else getattr(leaf, "sharding", None)


def _check_same_leaves(
    folder: AnyPath, template: dict[str, Any], stored: dict[str, StoredLeaf], of_another_run: bool
) -> None:
    """Refuse a state of other arrays, which is no damage but another model, and say how it differs."""
    lines = []
    parts = {name.partition("/")[0] for name in template}  # of another run perhaps the parameters alone
    compared = {name for name in stored if not of_another_run or name.partition("/")[0] in parts}
    for name in sorted(template.keys() | compared):
        expected = f"{template[name].dtype}{list(template[name].shape)}" if name in template else "nothing"
        actual = f"{stored[name].dtype}{list(stored[name].shape)}" if name in stored else "nothing"
        if expected != actual and not (of_another_run and _can_be_cast(template.get(name), stored.get(name))):
            lines.append(f"{name}: expected {expected}, found {actual}")
    if not lines:
        return
    more = [f"and {len(lines) - 20} more"] if len(lines) > 20 else []
    what = (
        "this state is not that of this run; resume with the model and the optimizer that wrote it, or name another "
        "folder to start anew"
    )
    if of_another_run:
        what = (
            "the model or the optimizer of this checkpoint is not that of this run; give this run their settings, or "
            "begin with the weights alone if the optimizer is another"
        )
    raise ValueError("\n  ".join([f"{folder}: {what}:", *lines[:20], *more]))


def _can_be_cast(leaf: Any, stored: StoredLeaf | None) -> bool:
    """Tell whether a stored array differs from the wanted one by its floating-point type alone."""
    if leaf is None or stored is None or stored.key_impl is not None or stored.shape != tuple(leaf.shape):
        return False
    return all(jnp.issubdtype(jnp.dtype(dtype), jnp.floating) for dtype in (stored.dtype, leaf.dtype))
