"""JAX's cache of compiled programs, in the user's cache folder: the second start of a run compiles nothing."""

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

SETTING = "RAGGEDMOE_CACHE"  # a folder, or 0 for no cache
JAX_FOLDER = "JAX_COMPILATION_CACHE_DIR"
# All programs are kept, as a start has some hundred small ones, whose compilation takes seconds together.
JAX_SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
MOST_BYTES = 2 * 10**9  # of all programs
MOST_DAYS = 30  # since a program was compiled, or read: file systems note that once a day, if at all
CPUINFO = Path("/proc/cpuinfo")
# What XLA asks of a processor before it compiles for it.
CPU_KEYS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")


def use_compilation_cache(environment: MutableMapping[str, str]) -> Path | None:
    """Have JAX keep its compiled programs, where that is possible and not said otherwise; return the folder.

    A setting of the user's for JAX's own cache is left alone.
    """
    if JAX_FOLDER in environment or environment.get(SETTING) == "0":
        return None
    root = cache_root(environment)
    folder = root / f"programs-{machine_key()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:  # no home, a full disk, a folder of somebody else's
        return None
    if not writable:
        return None
    remove_old_programs(root)
    environment[JAX_FOLDER] = str(folder)
    for name, value in JAX_SETTINGS.items():
        environment.setdefault(name, value)
    return folder


def cache_root(environment: Mapping[str, str]) -> Path:
    """Return the folder in which the programs of all machines are, which may share a home."""
    folder = environment.get(SETTING)
    return Path(folder).absolute() if folder else user_cache_folder(environment)


def user_cache_folder(environment: Mapping[str, str]) -> Path:
    """Return raggedmoe's folder in the user's cache folder; `raggedmoe` keeps more there than programs."""
    return Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "raggedmoe"


def machine_key() -> str:
    """Return a key of what programs are compiled for: the processor, its features, and how many cores may be used.

    JAX's own key of a program has its content, the compiler's flags and version, and the kind of device, which for a
    CPU says nothing of its features.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    described = [platform.machine(), platform.processor(), str(cores), *_cpu_lines()]
    return hashlib.blake2b("\n".join(described).encode(), digest_size=8).hexdigest()


def _cpu_lines() -> list[str]:
    """Return what the first processor says of itself."""
    try:
        first = CPUINFO.read_text().split("\n\n")[0]
    except OSError:
        return []
    pairs = (line.partition(":") for line in first.splitlines())
    return [f"{key.strip()}:{value.strip()}" for key, _, value in pairs if key.strip() in CPU_KEYS]


def remove_old_programs(root: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove programs that nobody has used for a month, and those used longest ago until few enough bytes are left.

    Another process may remove or write programs meanwhile. JAX compiles again what is gone.
    """
    oldest_kept, total = time.time() - MOST_DAYS * 24 * 3600, 0
    for used, num_bytes, path in sorted(_programs(root), reverse=True):
        total += num_bytes
        if used < oldest_kept or total > most_bytes:
            with contextlib.suppress(OSError):
                path.unlink()


def _programs(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each program was used last, its bytes and its file."""
    for path in root.glob("programs-*/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            yield max(status.st_mtime, status.st_atime), status.st_size, path
