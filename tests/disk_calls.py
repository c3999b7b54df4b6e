"""What a writer asks of the disk, in order: whether it was safe when it was named, and what each kill would leave."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest


def _content(status: os.stat_result) -> tuple[int, ...]:
    """A file's or folder's identity and state: another one after every change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, kw_only=True)
class Naming:
    """A rename: what of it the system still had in its memory only, and the calls before it."""

    target: Path
    not_on_disk: list[str]
    place: int


class DiskCalls:
    """Records fsync and rename from here to the end of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[tuple[int, ...]] = []
        self.namings: list[Naming] = []
        plain = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

        def fsync(descriptor):
            plain["fsync"](descriptor)
            self.synced.append(_content(os.fstat(descriptor)))

        def naming(how):
            def call(source, target, **options):
                self._note(Path(source), Path(target))
                return plain[how](source, target, **options)

            return call

        monkeypatch.setattr(os, "fsync", fsync)
        for how in ("rename", "replace"):
            monkeypatch.setattr(os, how, naming(how))

    def _note(self, source: Path, target: Path) -> None:
        tree = [source, *source.rglob("*")]
        lacking = [str(path.relative_to(source)) for path in tree if _content(path.stat()) not in self.synced]
        self.namings.append(Naming(target=target, not_on_disk=lacking, place=len(self.synced)))

    def check_named_safely(self, target: Path) -> None:
        """All of it was on the disk before it got its name, and its name is on the disk now."""
        naming = next(naming for naming in self.namings if naming.target == target)
        assert naming.not_on_disk == [], f"{target} got its name before this was on the disk"
        after = {(device, inode) for device, inode, *_ in self.synced[naming.place :]}
        parent = target.parent.stat()
        assert (parent.st_dev, parent.st_ino) in after, f"the name of {target} is not on the disk"


def record_kills(monkeypatch: pytest.MonkeyPatch, folder: Path, into: Path) -> list[Path]:
    """Copies of a folder as a kill before each call to the system would leave it, from here to the end of a test."""
    cuts: list[Path] = []
    copying = False

    def cut_before(plain):
        def call(*args, **options):
            nonlocal copying
            if not copying:
                copying = True
                cuts.append(Path(shutil.copytree(folder, into / f"{len(cuts)}")))
                copying = False
            return plain(*args, **options)

        return call

    for name in ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, cut_before(getattr(os, name)))
    return cuts
