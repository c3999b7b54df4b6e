"""The requests to an object store, through obstore: retried for a while, with errors that are OSErrors."""

import contextlib
import errno
import functools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

RETRY_SECONDS = "RAGGEDMOE_STORAGE_SECONDS"  # how long a request that fails is repeated, before the run stops
DEFAULT_RETRY_SECONDS = 120.0
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 4.0  # seconds between two tries; each is twice the one before
PART_BYTES = 8 * 2**20  # larger objects are written in parts of this size, each retried by itself
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # variables that name another server than Amazon's


class ChangedObjectError(OSError):
    """An object is not what it was when it was read: somebody else has written it."""


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """What the server says of an object."""

    key: str
    size: int
    version: str  # another one after every change of content: the ETag
    written: datetime  # by the server's clock


def retry_seconds() -> float:
    """Return how long a request that fails is repeated."""
    text = os.environ.get(RETRY_SECONDS, "")
    try:
        return float(text) if text else DEFAULT_RETRY_SECONDS
    except ValueError:
        raise ValueError(f"{RETRY_SECONDS}: expected a number of seconds, got {text!r}") from None


def endpoint() -> str | None:
    """Return the address of the server; None is Amazon's of the region."""
    return next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), None)


def open_bucket(bucket: str) -> "Bucket":
    """Return the bucket of that name, with the server and the credentials that the environment names."""
    return _open_bucket(bucket, endpoint(), retry_seconds())


@functools.cache
def _open_bucket(name: str, server: str | None, seconds: float) -> "Bucket":
    try:
        from obstore.store import S3Store
    except ImportError:
        raise ValueError(
            f"s3://{name}: object storage needs the obstore package; pip install 'raggedmoe[s3]', or name a folder of "
            "this machine"
        ) from None
    options: Any = {
        "allow_http": server is not None and server.startswith("http://"),
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=max(5.0, seconds / 2)),
    }
    backoff = {
        "init_backoff": timedelta(seconds=FIRST_PAUSE),
        "max_backoff": timedelta(seconds=LONGEST_PAUSE),
        "base": 2,
    }
    # As many tries as there is time for.
    retries: Any = {"max_retries": 10**6, "retry_timeout": timedelta(seconds=seconds), "backoff": backoff}
    patient = S3Store(name, client_options=options, retry_config=retries)
    impatient = S3Store(name, client_options=options, retry_config={**retries, "max_retries": 0})
    return Bucket(name, patient, impatient, seconds)


class Bucket:
    """A bucket of objects. An object is whole or not there: a write that is cut off leaves what was there before.

    A server that was waited for in vain gets one try of each later request, until one succeeds: a run that stops does
    not wait again for each thing that it closes.
    """

    def __init__(self, name: str, patient: Any, impatient: Any, seconds: float) -> None:
        self.name = name
        self._patient, self._impatient, self._seconds = patient, impatient, seconds
        self._was_in_vain = False

    @property
    def _store(self) -> Any:
        return self._impatient if self._was_in_vain else self._patient

    def read(self, key: str) -> bytes:
        """Read an object."""
        import obstore

        with self._explain_errors(key, "read"):
            return bytes(obstore.get(self._store, key).bytes())

    def stream(self, key: str) -> Iterator[bytes]:
        """Read an object piece by piece."""
        import obstore

        with self._explain_errors(key, "read"):
            for piece in obstore.get(self._store, key).stream(PART_BYTES):
                yield bytes(piece)

    def read_range(self, key: str, start: int, count: int) -> list[memoryview]:
        """Read so many bytes of an object from a position on, fewer where it ends, in parts fetched at once."""
        import obstore

        starts = range(start, start + count, PART_BYTES)
        lengths = [min(PART_BYTES, start + count - part) for part in starts]
        with self._explain_errors(key, "read"):
            return [memoryview(part) for part in obstore.get_ranges(self._store, key, starts=starts, lengths=lengths)]

    def write(self, key: str, content: bytes | Path | Iterable[bytes | memoryview]) -> None:
        """Write an object, a file of this machine as one, or what comes in pieces, in place of one that is there."""
        import obstore

        with self._explain_errors(key, "written"):
            obstore.put(self._store, key, content, chunk_size=PART_BYTES)

    def create(self, key: str, content: bytes) -> str:
        """Write an object that must not be there yet, and return its version. Of several writers one succeeds.

        The content must be unlike any other writer's: a try whose answer was lost is recognised by it.
        """
        return self._write_if(key, content, "create")

    def update(self, key: str, content: bytes, version: str) -> str:
        """Replace an object that must be there in that version; what `create` says of retries holds here too."""
        return self._write_if(key, content, {"e_tag": version})

    def _write_if(self, key: str, content: bytes, condition: Any) -> str:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def attempt() -> str:
            import obstore

            try:
                written = obstore.put(self._store, key, content, mode=condition, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                now = self.info(key)
                if now is not None and self.read(key) == content:
                    return now.version  # by a try before, whose answer did not come
                if condition == "create":
                    raise FileExistsError(errno.EEXIST, "is there already", self._url(key)) from None
                raise ChangedObjectError(f"{self._url(key)}: expected it as it was read, but it has changed") from None
            return str(written["e_tag"])

        with self._explain_errors(key, "written"):
            return _repeat(attempt, 0.0 if self._was_in_vain else self._seconds)

    def info(self, key: str) -> ObjectInfo | None:
        """Return what the server says of an object; None if it is not there."""
        import obstore

        try:
            with self._explain_errors(key, "read"):
                return _info(obstore.head(self._store, key))
        except FileNotFoundError:
            return None

    def files(self, prefix: str) -> list[ObjectInfo]:
        """List all objects whose keys begin with a prefix that ends with a slash, or is empty."""
        import obstore

        with self._explain_errors(prefix, "listed"):
            return [_info(entry) for page in obstore.list(self._store, prefix or None) for entry in page]

    def children(self, prefix: str) -> tuple[list[str], list[str]]:
        """List the folders directly below a prefix, and the objects, by their whole keys."""
        import obstore

        with self._explain_errors(prefix, "listed"):
            result = obstore.list_with_delimiter(self._store, prefix or None)
            return sorted(result["common_prefixes"]), sorted(entry["path"] for entry in result["objects"])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Those that are not there are passed over."""
        import obstore

        if keys:
            with self._explain_errors(keys[0], "deleted"), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, list(keys))

    def copy(self, source: str, target: str) -> None:
        """Copy an object inside the server."""
        import obstore

        with self._explain_errors(source, "copied"):
            obstore.copy(self._store, source, target)

    def _url(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    @contextlib.contextmanager
    def _explain_errors(self, key: str, done: str) -> Iterator[None]:
        """Turn obstore's errors, some of which are not even of one class, into OSErrors that name the object."""
        from obstore.exceptions import BaseError, GenericError

        try:
            yield
            self._was_in_vain = False
        except FileNotFoundError as error:
            text = "no such bucket" if "NoSuchBucket" in str(error) else "no such object"
            raise FileNotFoundError(errno.ENOENT, text, self._url(key)) from None
        except BaseError as error:
            self._was_in_vain |= isinstance(error, GenericError)
            said = str(error).split("\n", 1)[0]
            raise OSError(f"{self._url(key)} could not be {done}: {said}") from None


def _repeat(attempt: Callable[[], str], seconds: float) -> str:
    """Repeat what fails for a while. obstore repeats a conditional write only if it cannot have reached the server."""
    from obstore.exceptions import GenericError

    until, pause = time.monotonic() + seconds, FIRST_PAUSE
    while True:
        try:
            return attempt()
        except GenericError:  # neither a refusal nor a condition that is not met
            if time.monotonic() + pause > until:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE)


def _info(entry: Any) -> ObjectInfo:
    return ObjectInfo(
        key=entry["path"], size=entry["size"], version=entry["e_tag"] or "", written=entry["last_modified"]
    )
