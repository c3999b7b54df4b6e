"""On Linux, asking malloc for large pages, and to keep a program's memory from one call to the next.

XLA frees what a program needs when it ends, and allocates it anew for the next call. glibc gives such memory back to
the system at once, so a training step on a CPU spends a third of its time in the page faults of memory that it had a
moment ago (docs/log.md). With `glibc.malloc.hugetlb=1` malloc asks for pages of 2 MB, of which there are 512 times
fewer. Pieces below 256 MiB come from one heap, of whose end up to 512 MiB stay when they are free; one for all threads,
as those of other threads are 64 MiB at most. glibc reads this when a process starts and not later. So the command
starts itself again in the same process, with arguments and process number as they were.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

TUNABLES, LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
KEPT_HEAP = (
    "glibc.malloc.arena_max=1",
    f"glibc.malloc.mmap_threshold={1 << 28}",
    f"glibc.malloc.trim_threshold={1 << 29}",
)
FIRST_GLIBC = (2, 35)
KERNEL_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_large_pages() -> None:
    """Replace this process by one whose malloc asks for large pages, where that is possible and not so already."""
    environment = with_large_pages(os.environ)
    if environment is None or not sys.executable or "jax" in sys.modules:
        return
    with contextlib.suppress(OSError):  # as it was, only slower
        os.execve(sys.executable, (sys.executable, *sys.orig_argv[1:]), environment)


def with_large_pages(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Add the setting to a process's environment. None: it is there, or the user's own, or means nothing here."""
    tunables = environment.get(TUNABLES, "")
    if LARGE_PAGES in tunables or not are_large_pages_possible():
        return None
    is_users = any(setting.split("=")[0] in tunables for setting in KEPT_HEAP)
    added = (f"{LARGE_PAGES}=1", *(() if is_users else KEPT_HEAP))
    return {**environment, TUNABLES: ":".join(filter(None, (tunables, *added)))}


def are_large_pages_possible() -> bool:
    """Say whether this is Linux with a glibc that knows the setting, and a kernel that has large pages."""
    if sys.platform != "linux":
        return False
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        major, minor = version.split(".")[:2]
        is_enabled = "[never]" not in KERNEL_SETTING.read_text()
    except (ValueError, OSError):  # musl does not know the name, or a kernel does not have the file
        return False
    return name == "glibc" and (int(major), int(minor)) >= FIRST_GLIBC and is_enabled
