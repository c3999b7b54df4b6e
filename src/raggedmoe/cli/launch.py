"""`raggedmoe launch`: a run of several processes, here or, as a manifest, on a cluster."""

import sys
from typing import Annotated

import tyro

from raggedmoe.names import unknown
from raggedmoe.parallel.launcher import LocalRun
from raggedmoe.parallel.launcher import launch as launch_here

COMMANDS = ("train",)  # those that join the other processes
THIS = (sys.executable, "-c", "from raggedmoe.cli.main import main; main()")


def launch(
    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- train [KEY=VALUE ...]")] = (),
    processes: int = 2,
    devices_per_process: int | None = None,
    grace: float = 20.0,
) -> int:
    """x"""
    if not command:
        raise ValueError("expected a command after --, as in: raggedmoe launch --processes 2 -- train olmoe-tiny; got none")
    if command[0] not in COMMANDS:
        raise unknown("command to launch,", command[0], COMMANDS)
    run = LocalRun(
        command=(*THIS, *command), num_processes=processes, devices_per_process=devices_per_process, grace=grace
    )
    return launch_here(run)
