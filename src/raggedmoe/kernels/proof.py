"""How far an implementation is proven on a chip: levels, the declared proofs, and certificates from `verify`."""

import enum
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raggedmoe.compat import in_versions
from raggedmoe.hardware import Hardware
from raggedmoe.kernels.qarray import FORMATS

logger = logging.getLogger("raggedmoe")


class Level(enum.IntEnum):
    """The evidence that stands behind an implementation on a chip. `auto` takes INTERPRETED and RUN."""

    UNPROVEN = 0  # nobody has tried
    COMPILED = 1  # compiled for the chip, never executed
    INTERPRETED = 2  # executed elsewhere (TPU interpret mode; for a plain XLA program, another backend)
    RUN = 3  # executed on that hardware and verified


AUTO_TAKES = Level.INTERPRETED


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A level that an implementation declares for some chips and JAX versions, and what shows it."""

    level: Level
    platforms: tuple[str, ...] = ()  # empty: every one
    chips: tuple[str, ...] = ()  # empty: every one of those platforms
    first_jax: str | None = None
    last_jax: str | None = None
    formats: tuple[str, ...] = ()  # of quantised operands, with which it was shown as well
    shown_by: str

    @property
    def jax_range(self) -> str:
        """The versions of JAX with which it was shown, as a text."""
        ends = (f"from {self.first_jax}" if self.first_jax else "", f"to {self.last_jax}" if self.last_jax else "")
        return " ".join(filter(None, ends)) or "of any version"


# A plain XLA program means the same on every backend; the tests run it on a CPU.
PLAIN_XLA: tuple[Proof, ...] = (
    Proof(level=Level.RUN, platforms=("cpu",), formats=FORMATS, shown_by="make test"),
    Proof(
        level=Level.INTERPRETED, formats=FORMATS, shown_by="a plain XLA program; make test runs it on the CPU backend"
    ),
)

# A plain XLA program that libtpu has also compiled.
COMPILED_XLA: tuple[Proof, ...] = (
    Proof(
        level=Level.INTERPRETED,
        chips=("v5e", "v5p", "v6e", "tpu7x"),
        first_jax="0.12",
        formats=FORMATS,
        shown_by="a plain XLA program: make test runs it on the CPU backend, and libtpu compiled it (docs/log.md)",
    ),
    *PLAIN_XLA,
)

# The chips for which the public libtpu compiles.
COMPILED_CHIPS = ("v5e", "v5p", "v6e", "tpu7x")

# Our TensorCore kernels: executed in TPU interpret mode, compiled for each chip, on both ends of the JAX range.
INTERPRETED_KERNEL: tuple[Proof, ...] = (
    Proof(
        level=Level.INTERPRETED,
        chips=COMPILED_CHIPS,
        first_jax="0.10.2",
        last_jax="0.12.0.1",
        shown_by="make test interprets it, and make test-tpu compiles it for the chip",
    ),
)


def interpreted_with(*formats: str) -> tuple[Proof, ...]:
    """Declare the same of a kernel that takes quantised operands of these formats as well."""
    return tuple(replace(proof, formats=formats) for proof in INTERPRETED_KERNEL)


# SparseCore programs, and others' kernels that interpret mode does not run: compiled for each chip.
COMPILED_KERNEL: tuple[Proof, ...] = (
    Proof(
        level=Level.COMPILED,
        chips=COMPILED_CHIPS,
        first_jax="0.10.2",
        last_jax="0.12.0.1",
        shown_by="make test-tpu compiles it for the chip; nobody has run it there",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A record of what `raggedmoe verify` saw on a real chip. `auto` reads it from then on."""

    implementation: str  # "operation/name"
    source: str  # digest of the kernels' sources: another kernel needs another certificate
    chip: str
    jax_version: str
    libtpu_version: str | None
    cases: int
    worst_error: float  # largest error as a fraction of its bound, over all cases
    seconds: float  # the whole verification, as a hint of speed
    formats: tuple[str, ...] = ()  # of quantised operands, that were among the cases


def certificate_folder() -> Path | None:
    """Find the folder of certificates: $RAGGEDMOE_CERTIFICATES, or one in the user's data folder.

    None: a user without a home, as containers have them, who is in no list of users and has no $HOME.
    """
    folder = os.environ.get("RAGGEDMOE_CERTIFICATES")
    if folder:
        return Path(folder)
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # as it is, where there is no home
    return None if data.startswith("~") else Path(data, "raggedmoe", "certificates")


def folder_to_write() -> Path:
    """Return the `certificate_folder`; where there is none, an error says what to set."""
    folder = certificate_folder()
    if folder is None:
        raise ValueError(
            "expected a folder to keep certificates in, got a user without a home; set RAGGEDMOE_CERTIFICATES or HOME"
        )
    return folder


def write_certificate(certificate: Certificate, folder: Path | None = None) -> Path:
    """Keep a certificate for later processes, and return its path."""
    folder = folder or folder_to_write()
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{certificate.implementation}-{certificate.chip}-jax{certificate.jax_version}.json".replace("/", "-")
    path = folder / name.replace(":", "-").replace(" ", "-")
    partial = path.with_suffix(f".{secrets.token_hex(8)}.partial")  # another one for each thread of each process
    try:
        partial.write_text(json.dumps(asdict(certificate), indent=2) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    read_certificates.cache_clear()
    return path


def _readable(folder: Path | None) -> Iterator[tuple[Path, Certificate]]:
    """Read the certificates in a folder. One that cannot be read is named in a warning and proves nothing."""
    folder = folder or certificate_folder()
    for path in sorted(folder.glob("*.json")) if folder else ():
        try:
            stored = json.loads(path.read_text())
            yield path, Certificate(**stored | {"formats": tuple(stored.get("formats", ()))})
        except (TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
            logger.warning("certificate %s ignored: %s; run `raggedmoe verify` to make it again", path, error)


@functools.lru_cache(maxsize=8)
def read_certificates(folder: Path | None = None) -> tuple[Certificate, ...]:
    """Read all certificates in a folder that can be read."""
    return tuple(certificate for _, certificate in _readable(folder))


@functools.cache
def source_digest() -> str:
    """Hash all kernels' sources: implementations share code, so a change to one may be a change to another."""
    folder = Path(__file__).parent
    sources = (path for suffix in ("py", "cc", "h", "inc") for path in sorted(folder.rglob(f"*.{suffix}")))
    files = [*sources, folder.parent / "compat.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


@functools.cache
def libtpu_version() -> str | None:
    """Look up the version of the installed libtpu, the compiler of TPU kernels; None without one."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def drop_certificates(implementation: str, chip: str, folder: Path | None = None) -> list[Path]:
    """Remove the certificates of an implementation that was shown to be wrong on a chip."""
    paths = [path for path, seen in _readable(folder) if (seen.implementation, seen.chip) == (implementation, chip)]
    for path in paths:
        path.unlink(missing_ok=True)  # another process may have been faster
    read_certificates.cache_clear()
    return paths


def level_on(
    name: str,
    proofs: tuple[Proof, ...],
    hardware: Hardware,
    jax_version: str,
    certificates: tuple[Certificate, ...],
    formats: Iterable[str] = (),
) -> tuple[Level, str]:
    """Find the best level that proofs and certificates give ``operation/name`` on a chip, and what shows it.

    With quantised operands only what was shown with their ``formats`` counts.
    """
    asked = set(formats)
    best = (Level.UNPROVEN, "nobody has tried")
    for proof in proofs:
        here = (not proof.platforms or hardware.platform in proof.platforms) and (
            not proof.chips or hardware.name in proof.chips
        )
        if not here or proof.level <= best[0]:
            continue
        if not asked <= set(proof.formats):
            if best[0] is Level.UNPROVEN:
                best = (Level.UNPROVEN, f"{proof.level.name.lower()} without {', '.join(sorted(asked))} only")
            continue
        if in_versions(jax_version, proof.first_jax, proof.last_jax):
            best = (proof.level, proof.shown_by)
        elif best[0] is Level.UNPROVEN:
            best = (Level.UNPROVEN, f"{proof.level.name.lower()} only with JAX {proof.jax_range}")
    for certificate in certificates:
        if (
            certificate.implementation == name
            and certificate.chip == hardware.name
            and certificate.jax_version == jax_version
            and certificate.source == source_digest()
            and asked <= set(certificate.formats)
            and (hardware.platform != "tpu" or certificate.libtpu_version == libtpu_version())
            and best[0] < Level.RUN
        ):
            best = (Level.RUN, f"a certificate of `raggedmoe verify` on {hardware.name}")
    return best
