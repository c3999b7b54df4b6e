"""How the C++ kernels are compiled into one library. `hatch_build.py` loads this file alone: it imports none of ours.

The library is named after its sources and flags, so that one that is out of date is not found. It has no digest of
jaxlib's headers, with which it is compiled: XLA loads what was built with its own headers or with older ones.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi")
COMPILERS = ("g++", "clang++")
INSTALL_COMPILER = "`apt install g++`, `dnf install gcc-c++`, `xcode-select --install` or the like"
OLD_LIBRARIES = 3  # kept beside the one just built: whoever goes back and forth in Git need not wait


def sources() -> list[Path]:
    """List the C++ files: those of the operations, and the matmul that they share."""
    return [*sorted(FOLDER.glob("*.cc")), *sorted(FOLDER.parent.glob("*/cpu_native.cc"))]


def flags() -> tuple[str, ...]:
    """Return the compiler's options. On x86 they ask for what all such CPUs have, whatever the compiler's default."""
    return (*FLAGS, "-march=x86-64") if platform.machine() in ("x86_64", "AMD64") else FLAGS


def library_path() -> Path:
    """Return where the library of these sources is, once it is built."""
    texts = [path.read_bytes() for path in (*sources(), *sorted(FOLDER.glob("*.h")), *sorted(FOLDER.glob("*.inc")))]
    digest = hashlib.sha256(b"".join([*texts, repr(flags()).encode()])).hexdigest()
    return FOLDER / f"cpu-{digest[:12]}.so"


def compiler() -> list[str] | None:
    """Find the C++ compiler's command, by CXX or on the path. None: there is none, or RAGGEDMOE_BUILD_NATIVE=0."""
    if os.environ.get("RAGGEDMOE_BUILD_NATIVE") == "0":
        return None
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return next(([path] for path in map(shutil.which, COMPILERS) if path), None)


def compile_library(command: list[str], include: str, path: Path) -> str | None:
    """Write the library to ``path``, whole or not at all, whoever else builds it. Return why it cannot be, or None."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as folder:
            made = Path(folder) / path.name
            reason = compile_and_link([*command, *flags(), f"-I{FOLDER}", "-isystem", include], sources(), made)
            if reason is None:
                made.replace(path)
    except OSError as error:  # the folder cannot be written, or the disk is full
        return str(error)
    return reason


def compile_and_link(
    command: list[str], files: Iterable[Path], out: Path, link: Iterable[str] = ("-shared",)
) -> str | None:
    """Compile files, as many at a time as there are cores, and link them. Return what was wrong, or None."""
    objects = {file: out.parent / f"{number}.o" for number, file in enumerate(files)}
    commands = [[*command, "-c", str(file), "-o", str(made)] for file, made in objects.items()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(max_workers=cores) as pool:
        reasons = [*pool.map(_why_failed, commands)]
    failed = next((reason for reason in reasons if reason), None)
    return failed or _why_failed([*command, *link, *map(str, objects.values()), "-o", str(out)])


def _why_failed(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror or error}"
    if done.returncode == 0:
        return None
    return f"{command[0]} fails:\n{done.stderr[-2000:] or done.stdout[-2000:] or f'exit code {done.returncode}'}"


def remove_old_libraries(path: Path) -> None:
    """Remove all libraries of other sources but the newest few. Another process may be removing them as well."""
    dated = []
    for old in set(path.parent.glob("cpu-*.so")) - {path}:
        with contextlib.suppress(FileNotFoundError):
            dated.append((old.stat().st_mtime, old))
    for _, old in sorted(dated)[:-OLD_LIBRARIES]:
        old.unlink(missing_ok=True)
