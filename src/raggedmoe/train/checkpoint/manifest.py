"""The manifest of a checkpoint: its arrays, and its files with their checksums.

orbax reads a file with a flipped bit without an error, so sizes and checksums are compared before it reads any.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raggedmoe.storage import AnyPath
from raggedmoe.storage.trees import list_files, map_files, sha256

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state"  # the folder of the arrays, beside the manifest


class DamagedCheckpointError(Exception):
    """The files of a checkpoint are not as they were written. The text says which, and how they differ."""


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """Shape and type of one array of the state."""

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None  # the implementation of a typed random key, whose data is what is stored
    chunks: tuple[int, ...] | None = None  # the shape of the objects that it is stored as; None: orbax has stored it


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and checksum of one file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds beside its arrays."""

    step: int
    metric: float | None
    extra: dict[str, Any]
    leaves: dict[str, StoredLeaf]
    files: dict[str, StoredFile]  # by path below the state's folder
    state: str = STATE  # the name of that folder


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, with a checksum of itself."""
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest, with a checksum of itself."""
    return _encode({"format": FORMAT, **asdict(manifest)})


def read_manifest(folder: AnyPath) -> Manifest:
    """Read a checkpoint's manifest. Raise `DamagedCheckpointError` if it is not, byte for byte, as it was written."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        content = json.loads(raw)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{MANIFEST} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DamagedCheckpointError(f"{MANIFEST}: expected a JSON object, found {type(content).__name__}")
    content.pop("sha256", None)
    # Encoded again it has the same bytes, unless something in it changed: a value, the checksum, or a mere space.
    if _encode(content) != raw:
        raise DamagedCheckpointError(f"{MANIFEST} does not match its checksum")
    if content["format"] != FORMAT:
        raise ValueError(
            f"{folder}: expected a checkpoint of format {FORMAT}, found {content['format']}; "
            "read it with the version of raggedmoe that wrote it"
        )
    return Manifest(
        step=content["step"],
        metric=content["metric"],
        extra=content["extra"],
        leaves={
            name: StoredLeaf(
                **{
                    **leaf,
                    "shape": tuple(leaf["shape"]),
                    "chunks": None if leaf.get("chunks") is None else tuple(leaf["chunks"]),
                }
            )
            for name, leaf in content["leaves"].items()
        },
        files={name: StoredFile(**file) for name, file in content["files"].items()},
        state=content.get("state", STATE),  # which older checkpoints do not say
    )


def verify_checkpoint(folder: AnyPath) -> Manifest:
    """Read a manifest as `read_manifest`, and compare all files with their checksums; errors name what differs."""
    manifest = read_manifest(folder)
    expected_step = int(folder.name.removeprefix("step_"))
    if manifest.step != expected_step:
        raise DamagedCheckpointError(
            f"{MANIFEST}: expected step {expected_step}, as the folder is called, found {manifest.step}"
        )
    problems = _problems(folder / manifest.state, manifest.files)
    if problems:
        raise DamagedCheckpointError("; ".join(problems))
    return manifest


def _problems(state: AnyPath, expected: dict[str, StoredFile]) -> list[str]:
    sizes = list_files(state)

    def problem(name: str) -> str | None:
        if name not in sizes:
            return "is missing"
        if name not in expected:
            return "was not there when the checkpoint was written"
        if sizes[name] != expected[name].size:
            return f"has {sizes[name]} bytes, expected {expected[name].size}"
        try:
            return None if sha256(state / name) == expected[name].sha256 else "does not match its checksum"
        except OSError as error:  # a disk that cannot read it any more
            return f"cannot be read: {error}"

    names = sorted(expected.keys() | sizes.keys())
    return [f"{state.name}/{name} {said}" for name, said in zip(names, map_files(problem, names, state)) if said]


def hash_files(state: Path) -> dict[str, StoredFile]:
    """List all files below a folder with their sizes and checksums."""
    return {name: StoredFile(size=size, sha256=sha256(state / name)) for name, size in list_files(state).items()}


def plain_json(value: Any, where: str = "extra") -> Any:
    """Copy a value that JSON preserves. A part that JSON would change or refuse raises an error that says where."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [plain_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: expected what JSON gives back as it is (dict, list, str, int, float, bool, None), "
            f"got {type(value).__name__}; convert it, or put arrays into the state"
        )
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{where}: expected keys that are strings, got {key!r}; JSON would make it one")
    return {key: plain_json(item, f"{where}[{key!r}]") for key, item in value.items()}


def _encode(content: dict[str, Any]) -> bytes:
    checksum = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return f"{json.dumps({'sha256': checksum, **content}, indent=1)}\n".encode()
