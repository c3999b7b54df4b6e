"""A progress bar of bytes on standard error, shown on terminals only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable


@runtime_checkable
class Advance(Protocol):
    """A function that moves a progress bar forward by some bytes."""

    def __call__(self, num_bytes: int) -> None: ...


@contextmanager
def bytes_bar(what: str, total: int, shown: bool) -> Iterator[Advance]:
    """Show a progress bar, and yield the function that moves it forward."""
    # Not for every `import raggedmoe`.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # In a file or a pipe even a bar that vanishes leaves an empty line.
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
