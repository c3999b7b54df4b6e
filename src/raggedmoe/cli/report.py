"""`raggedmoe report`, which makes one HTML page of a training run, or one that compares several."""

import webbrowser
from typing import Annotated

import tyro

from raggedmoe.storage import ObjectPath, as_path
from raggedmoe.train.loop.record import read_run
from raggedmoe.train.loop.saved_run import SavedRun, find_run
from raggedmoe.train.report.build import write_report
from raggedmoe.train.report.comparison import write_comparison


def report(
    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")],
    out: str | None = None,
    open: bool = False,
) -> int:
    """Make one HTML page of a training run, or one that compares several runs, and print its path.

    It shows the loss, the learning rate, each expert's load by layer and step, which kernels ran and why, drops, speed
    and the settings. Of several runs it shows the results side by side, the curves of all in one picture each, and the
    settings that differ. It is a single file that loads nothing from elsewhere, and can be read on a phone. A run may
    be unfinished.

      raggedmoe report out/demo
      raggedmoe report out/demo out/half --open

    Args:
        runs: a run's folder, with metrics.jsonl, which may be in an object store (s3://bucket/folder); of RUN@STEP the
            steps up to that one. Several are compared.
        out: where to write the page; by default report.html in the run's folder, comparison.html in that of the first.
        open: open the page in the browser.
    """
    if not runs:
        raise ValueError("expected the folder of a run, such as out/demo, or several to compare; got none")
    target = None if out is None else as_path(out)
    saved = [find_run(run) or SavedRun(folder=as_path(run)) for run in runs]
    if len(saved) == 1:
        path = write_report(saved[0].folder, target, step=saved[0].step)
    else:
        records = [(read_run(run.folder), run.step) for run in saved]
        path = write_comparison([record if step is None else record.until(step) for record, step in records], target)
    path = path.resolve()
    print(path)
    if not open:
        return 0
    if isinstance(path, ObjectPath):
        raise ValueError(f"expected a page on this machine to open, got {path}; use --out page.html as well")
    if not webbrowser.open(path.as_uri()):
        raise ValueError(f"found no browser to open; the page is {path}")
    return 0
