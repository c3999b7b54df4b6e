"""The command line, `raggedmoe COMMAND`; each command is a thin file beside this one."""

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable

import tyro

from raggedmoe.cli import (
    bench,
    compile,
    convert,
    demo,
    explain,
    generate,
    launch,
    models,
    plan,
    quantise,
    report,
    tokenize,
    train,
    tune,
    verify,
)
from raggedmoe.kernels.registry import CannotRunError
from raggedmoe.launch import processes
from raggedmoe.train.settings.words import assignments, settings_first

COMMANDS: dict[str, Callable[..., int]] = {
    "train": train.train,
    "demo": demo.demo,
    "plan": plan.plan,
    "launch": launch.launch,
    "report": report.report,
    "models": models.models,
    "import": convert.import_,
    "export": convert.export,
    "quantise": quantise.quantise,
    "generate": generate.generate,
    "explain": explain.explain,
    "verify": verify.verify,
    "bench": bench.bench,
    "compile": compile.compile_,
    "tune": tune.tune_,
    "tokenize": tokenize.tokenize_,
}


# What `raggedmoe --help` says of each, in a line of a screen.
SUMMARIES = {
    "train": "train a model, or go on with a run",
    "demo": "train a small model, make its report, generate text: two minutes",
    "plan": "how a run is split over devices: memory and communication",
    "launch": "train with several processes, here or on a cluster",
    "report": "make a page of a run",
    "models": "list the models and their sizes",
    "import": "convert a Hugging Face checkpoint to our format",
    "export": "convert a checkpoint of ours to a Hugging Face folder",
    "quantise": "write a checkpoint in 8 bits, and say what that costs",
    "generate": "continue a text with a model",
    "explain": "which kernel runs on a chip, and why not the others",
    "verify": "compare a kernel with its reference, and record the proof",
    "bench": "measure kernels, layers and models beside their peers",
    "compile": "compile for a TPU or CPU that is not here: does it fit, how fast",
    "tokenize": "write the tokens of a corpus that is larger than memory",
    "tune": "find the tiles of a kernel with the compiler's schedule",
}

# Commands that take the settings of a run, where `--key value` is `key=value`.
TAKE_SETTINGS = ("train", "demo", "plan", "launch", "explain", "compile", "bench")

# Commands that print their own help.
HELP: dict[str, Callable[[], None]] = {"train": train.print_help}


def main() -> None:
    """Run the command that the arguments name. A user's mistake prints one line, not a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    # Without its cache JAX compiles, and that is all: a full disk or another user's file are no reason to worry.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in TAKE_SETTINGS:
        options = inspect.signature(COMMANDS[command]).parameters
        sys.argv[2:] = settings_first(assignments(sys.argv[2:], options=options))
    if command in HELP and {"-h", "--help"} & set(sys.argv[2:]):
        HELP[command]()
        sys.exit(0)
    try:
        code: int = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="raggedmoe",
            description="Mixture-of-Experts for JAX: train models and convert their checkpoints; see which kernel runs "
            "where and why, verify it and measure it.",
        )
    except (ValueError, CannotRunError, OSError) as error:  # OSError: a full disk, a file that may not be read
        print(f"raggedmoe: {error}", file=sys.stderr)
        # A setting stays wrong. A disk may be back when a run is started again, a folder no longer in use.
        code = processes.CANNOT_WRITE if command in ("train", "demo") and isinstance(error, OSError) else 2
        processes.leave(code, failed=True)
        sys.exit(code)
    except KeyboardInterrupt:
        print("raggedmoe: interrupted", file=sys.stderr)
        processes.leave(130, failed=True)
        sys.stdout.flush()
        os._exit(130)  # at once: Python would wait for threads, of which one may write a checkpoint
    processes.leave(code, failed=code == processes.CANNOT_WRITE)
    sys.exit(code)
