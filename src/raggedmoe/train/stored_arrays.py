"""The arrays of a checkpoint: what they are called and of what type they are, and how orbax writes and reads them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from raggedmoe.train.manifest import StoredLeaf


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree under their paths."""
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


def described(name: str, leaf: Any) -> StoredLeaf:
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


def _stored(leaf: Any) -> jax.ShapeDtypeStruct:
    """What is on disk for an array: itself, or a key's data."""
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Weights are noise: zstd made 104 MB to 96, and reading them several times slower.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def start_writing(folder: Path, leaves: dict[str, jax.Array]) -> ocp.AsyncCheckpointer | None:
    """Copy the arrays to the host and begin to write them; None if there is nothing to write."""
    # A flat table of names: orbax joins the keys of nested ones with dots, and ours have dots in them.
    # It refuses arrays without elements, of which there is nothing to say but their shape.
    full = {name: leaf for name, leaf in leaves.items() if leaf.size}
    if not full:
        folder.mkdir()
        return None
    data = {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in full.items()}
    writing = ocp.AsyncCheckpointer(_handler())
    writing.save(folder, args=ocp.args.PyTreeSave(data))
    return writing


def read_state(folder: Path, template: Any, found: dict[str, StoredLeaf]) -> Any:
    """The template's tree with the arrays that are stored; an error that lists them if they are not the same."""
    leaves = named_leaves(template)
    _check_same(folder, leaves, found)
    places = {name: _place(leaf) for name, leaf in leaves.items()}
    stored = {name: _stored(leaf) for name, leaf in leaves.items()}
    full = {name: array for name, array in stored.items() if array.size}
    arrays: dict[str, Any] = {}
    if full:
        how = {
            name: ocp.RestoreArgs(restore_type=np.ndarray)
            if places[name] is None
            else ocp.ArrayRestoreArgs(sharding=places[name])
            for name in full
        }
        with ocp.Checkpointer(_handler()) as reading:
            arrays = reading.restore(folder, args=ocp.args.PyTreeRestore(item=full, restore_args=how))
    restored = []
    for name, array in stored.items():
        read = arrays.pop(name) if name in full else np.zeros(array.shape, array.dtype)
        if not isinstance(read, jax.Array):
            read = jnp.asarray(read) if places[name] is None else jax.device_put(read, places[name])
        impl = found[name].key_impl
        restored.append(read if impl is None else jax.random.wrap_key_data(read, impl=impl))
    return jax.tree.unflatten(jax.tree.structure(template), restored)


def _place(leaf: Any) -> jax.sharding.Sharding | None:
    """Where an array must go; None if its template is free. A free one that came back tied could not meet a mesh."""
    return None if isinstance(leaf, jax.Array) and not leaf.committed else getattr(leaf, "sharding", None)


def _check_same(folder: Path, wanted: dict[str, Any], found: dict[str, StoredLeaf]) -> None:
    """A state of another shape is no damage but another model: say how it differs."""
    lines = []
    for name in sorted(wanted.keys() | found.keys()):
        ours = f"{wanted[name].dtype}{list(wanted[name].shape)}" if name in wanted else "nothing"
        theirs = f"{found[name].dtype}{list(found[name].shape)}" if name in found else "nothing"
        if ours != theirs:
            lines.append(f"{name}: expected {ours}, found {theirs}")
    if lines:
        more = [f"and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise ValueError(
            f"{folder}: this state is not that of this run; resume with the model and the optimizer that wrote it, or "
            "name another folder to start anew:\n  " + "\n  ".join(lines[:20] + more)
        )
