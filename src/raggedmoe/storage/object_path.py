"""The path of an object, or of a folder of objects, with the methods of `pathlib.Path` that a run's files need."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from raggedmoe.storage.object_store import Bucket, open_bucket


@dataclass(frozen=True, order=True)
class ObjectPath:
    """``s3://bucket/key``. A folder is there as long as an object is below it; none is made or removed."""

    bucket_name: str
    key: str  # without a slash at its ends; empty: the whole bucket

    def __str__(self) -> str:
        return f"s3://{self.bucket_name}/{self.key}"

    def __truediv__(self, name: str) -> "ObjectPath":
        key = str(PurePosixPath(self.key) / name) if self.key else str(PurePosixPath(name))
        return ObjectPath(self.bucket_name, "" if key == "." else key)

    @property
    def bucket(self) -> Bucket:
        """The bucket that it is in."""
        return open_bucket(self.bucket_name)

    @property
    def prefix(self) -> str:
        """What the keys of all objects below this folder begin with."""
        return f"{self.key}/" if self.key else ""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return PurePosixPath(self.key).name

    @property
    def parent(self) -> "ObjectPath":
        """The folder that it is in."""
        parent = str(PurePosixPath(self.key).parent)
        return ObjectPath(self.bucket_name, "" if parent == "." else parent)

    def resolve(self) -> "ObjectPath":
        """Return itself: there are no links."""
        return self

    def absolute(self) -> "ObjectPath":
        """Return itself."""
        return self

    def with_name(self, name: str) -> "ObjectPath":
        """Return the path of that name in the same folder."""
        return self.parent / name

    def relative_to(self, folder: "ObjectPath") -> PurePosixPath:
        """Return the path as seen from a folder above it."""
        return PurePosixPath(self.key).relative_to(folder.key)

    def is_file(self) -> bool:
        """Tell whether there is an object of that name."""
        return bool(self.key) and self.bucket.info(self.key) is not None

    def is_dir(self) -> bool:
        """Tell whether there is an object below it."""
        return any(True for _ in self.iterdir())

    def exists(self) -> bool:
        """Tell whether there is an object of that name, or below it."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Iterate over the folders and objects directly below it."""
        folders, files = self.bucket.children(self.prefix)
        for key in (*folders, *files):
            yield ObjectPath(self.bucket_name, key.rstrip("/"))

    def read_bytes(self) -> bytes:
        """Read the object."""
        return self.bucket.read(self.key)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Read the object as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Write the object; it is replaced as a whole."""
        self.bucket.write(self.key, content)
