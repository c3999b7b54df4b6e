"""The `raggedmoe` command, and what it does before JAX is there, which takes seconds to load.

It answers what needs no JAX: a page of help, and names that are mistyped. It prepares the environment that JAX and the
C library read when they are loaded. It stands outside of the package `raggedmoe`, whose import would load JAX.
"""

import os
import sys

from raggedmoe_command.answers import answer
from raggedmoe_command.compilation_cache import use_compilation_cache
from raggedmoe_command.large_pages import restart_with_large_pages
from raggedmoe_command.platforms import leave_out_missing_tpu

# Commands that compute with large arrays, or start processes that do.
COMPUTING = ("bench", "demo", "generate", "launch", "train", "verify")
# Those of them that compile what they will compile again. `bench` times compilation, and `verify` is to see it.
CACHED = ("demo", "generate", "launch", "train")


def main() -> None:
    """Run the command line as the console script does; a program calls `raggedmoe.cli.main.main` instead."""
    early = answer(sys.argv[1:])
    if early is not None:
        print(early.text, file=sys.stderr if early.code else sys.stdout)
        sys.exit(early.code)
    command = sys.argv[1]
    leave_out_missing_tpu(os.environ)
    if command in CACHED:
        use_compilation_cache(os.environ)
    if command in COMPUTING:
        restart_with_large_pages()
    from raggedmoe.cli.main import main as run

    run()
