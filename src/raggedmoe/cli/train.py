"""`raggedmoe train`, which trains a model."""

import logging
import math
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raggedmoe.hardware import target_hardware
from raggedmoe.launch import processes
from raggedmoe.sharding.axes import AXES
from raggedmoe.train.settings.keys import KEYS, RECIPES, SECTIONS, Key

if TYPE_CHECKING:
    from raggedmoe.train.loop.loop import RunOutcome
    from raggedmoe.train.settings.config import TrainConfig

INTRODUCTION = """usage: raggedmoe train [MODEL] [KEY=VALUE ...]

Train a Mixture-of-Experts language model; without arguments, a small one on Python's own sources.

  raggedmoe train
  raggedmoe train olmoe-tiny steps=200 learning_rate=1e-3
  raggedmoe train deepseek-v2-lite dataset_type=text dataset_path=books/ tokenizer_path=tokenizer.json
  raggedmoe train demo profiler=xplane steps=20 run_name=traced
  raggedmoe train olmoe num_experts=32 base_emb_dim=512 base_num_decoder_layers=4 vocab_size=512
  raggedmoe train olmoe-tiny expert_parallelism=4 fsdp_parallelism=2 token_chunks=2     8 devices; a CPU makes them

`raggedmoe plan` with the same arguments prints how parameters are sharded and what is communicated; `raggedmoe \
launch` runs several processes.

MODEL is one that `raggedmoe models` lists; all other arguments are settings, and the sizes below override those of \
the model. MaxText's command lines can be pasted: its base.yml or another file in its form, key=value, --key value. A \
setting of MaxText that is not below is translated, has no effect and says so, or is refused with the reason \
(docs/maxtext.md).

A run is written to the folder base_output_directory/run_name. The same command resumes it exactly where it stopped. \
Ctrl-C and SIGTERM save a checkpoint first. `raggedmoe report FOLDER` makes a page of the run, `raggedmoe generate \
FOLDER/model` generates text with the trained model.

Exit codes: 0 finished; 2 a setting is wrong, and nothing was done; 3 stopped, as losses or gradients were not finite; \
74 stopped, as a file could not be written; 75 interrupted and saved: run it again; 76 stopped, as another process of \
the run (`raggedmoe launch`) has ended."""


def print_help() -> None:
    """Print the introduction, and every setting with its default."""
    console = Console(highlight=False)
    console.print(INTRODUCTION, markup=False)
    for section in SECTIONS:
        table = Table.grid(padding=(0, 2), pad_edge=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for key in KEYS.values():
            if key.section == section:
                table.add_row(Text(_assignment(key)), Text(_help_text(key)))
        console.print(f"\n[bold]{section}[/]")
        console.print(table)
    for model, defaults in RECIPES.items():
        words = " ".join(f"{name}={value}" for name, value in defaults.items())
        console.print(f"\n{model} brings its own defaults: {words}", markup=False)


def _assignment(key: Key) -> str:
    default = ",".join(key.default) if isinstance(key.default, tuple) else key.default
    return f"{key.name}={'none' if default in (None, '') else str(default).lower()}"


def _help_text(key: Key) -> str:
    return f"{key.help} ({', '.join(key.choices)})" if key.choices else key.help


def train(
    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MODEL] [KEY=VALUE ...]")] = (),
) -> int:
    """Train a model, configured by key=value settings, which `raggedmoe train --help` lists."""
    _, outcome = run_training(words)
    if jax.process_index() == 0:
        print(outcome.text, file=sys.stderr if outcome.code else sys.stdout)
    return outcome.code


def run_training(words: tuple[str, ...]) -> "tuple[TrainConfig, RunOutcome]":
    """Train as the words say. Return what they mean, and how it ended."""
    try:
        import grain  # noqa: F401

        from raggedmoe.train.loop.loop import train as run
        from raggedmoe.train.loop.screen import Screen
        from raggedmoe.train.settings.config import make_config
        from raggedmoe.train.settings.settings import in_keys, parse_settings
    except ImportError as error:
        raise ValueError(f"training needs more packages ({error}): pip install 'raggedmoe[train]'") from None
    _silence_orbax()
    try:
        settings = parse_settings(words)
        processes.join()
        num_made = make_cpu_devices(settings.values, processes.process_count())
        hardware = target_hardware()
        config = make_config(settings, hardware, jax.device_count())
        console = None if jax.process_index() == 0 else Console(quiet=True)  # only process 0 prints
        screen = Screen(config.run.steps, config.run.line_period, console)
        if num_made and hardware.platform == "cpu":
            where = "in each process, " if jax.process_count() > 1 else ""
            screen.say(f"made {num_made} host devices of this CPU, {where}as the degrees ask for so many")
        return config, run(config, hardware, screen)
    except ValueError as error:
        raise ValueError(in_keys(str(error))) from error


def make_cpu_devices(values: Mapping[str, Any], num_processes: int = 1) -> int:
    """Make the CPU devices that the degrees ask for, or a process's share of them, if the CPU backend has not started.

    Return how many were made, or 0 if their number was set before. Other backends are not changed.
    """
    return start_with_cpu_devices(
        math.ceil(math.prod(max(values[f"{axis}_parallelism"], 1) for axis in AXES) / num_processes)
    )


def start_with_cpu_devices(num_devices: int) -> int:
    """Make so many CPU devices, if the CPU backend has not started. Return how many were made, or 0."""
    set_by_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if num_devices == 1 or set_by_flags or jax.config.values["jax_num_cpu_devices"] > 0:
        return 0
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:  # it has started
        return 0
    return num_devices


def _silence_orbax() -> None:
    """Silence orbax's threads, which would print some 500 lines after a full disk, for which we print one."""
    for chatty in ("absl", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    default_hook = sys.unraisablehook

    def unraisable(unraised: Any) -> None:
        if not (isinstance(unraised.exc_value, RuntimeError) and str(unraised.exc_value) == "Event loop is closed"):
            default_hook(unraised)

    sys.unraisablehook = unraisable
