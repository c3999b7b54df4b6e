"""Places by their names: a path of this machine, or the URL of an object."""

import os
import re
from pathlib import Path
from typing import TypeAlias

from raggedmoe.storage.object_path import ObjectPath

AnyPath: TypeAlias = Path | ObjectPath
# Why a kind of object storage is refused that others have. One is accepted if the tests can start a server of it, and
# kill, refuse and delay what is written there.
REFUSED_SCHEMES = {
    "gs": "no server of Google Cloud Storage that the tests can start keeps the conditions of its writes "
    "(x-goog-if-generation-match), on which it depends that two runs never write to one folder; use s3://, or a disk "
    "that all processes see",
    "az": "no tests start a server of it",
    "hdfs": "no tests start a server of it",
    "http": "nothing can be written there",
    "https": "nothing can be written there",
    "file": "write it as a path without file://",
}


def as_path(place: str | os.PathLike[str] | ObjectPath) -> AnyPath:
    """Return the path that a text means: of an object for ``s3://bucket/key``, or else of this machine."""
    if isinstance(place, ObjectPath):
        return place
    text = os.fspath(place)
    scheme, separator, rest = text.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return Path(place)
    if scheme != "s3":
        reason = REFUSED_SCHEMES.get(scheme, "no tests start a server of it")
        raise ValueError(f"{text}: expected s3://… or a folder of this machine, got {scheme}://…: {reason}")
    bucket, _, key = rest.partition("/")
    parts = [part for part in key.split("/") if part]
    if not bucket or {".", ".."} & set(parts):
        raise ValueError(f"{text}: expected s3://BUCKET/FOLDER without '.' and '..' in it")
    return ObjectPath(bucket, "/".join(parts))
