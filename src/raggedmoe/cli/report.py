"""`raggedmoe report`, which makes one HTML page of a training run."""

import webbrowser

import tyro

from raggedmoe.storage import ObjectPath, as_path
from raggedmoe.train.report.build import write_report


def report(run: tyro.conf.Positional[str], out: str | None = None, open: bool = False) -> int:
    """Make one HTML page of a training run and print its path.

    It shows the loss, the learning rate, each expert's load by layer and step, which kernels ran and why, drops, speed
    and the settings. It is a single file that loads nothing from elsewhere, and can be read on a phone. The run may be
    unfinished.

    Args:
        run: the run's folder, with metrics.jsonl; it may be in an object store, s3://bucket/folder.
        out: where to write the page; report.html in the run's folder by default.
        open: open the page in the browser.
    """
    path = write_report(as_path(run), None if out is None else as_path(out)).resolve()
    print(path)
    if not open:
        return 0
    if isinstance(path, ObjectPath):
        raise ValueError(f"expected a page on this machine to open, got {path}; use --out page.html as well")
    if not webbrowser.open(path.as_uri()):
        raise ValueError(f"found no browser to open; the page is {path}")
    return 0
