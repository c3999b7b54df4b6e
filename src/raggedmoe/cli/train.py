"""`raggedmoe train`: the main job."""

import logging
import math
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raggedmoe.hardware import target_hardware
from raggedmoe.mesh import AXES
from raggedmoe.parallel import processes
from raggedmoe.train.keys import KEYS, RECIPES, SECTIONS, Key

INTRODUCTION = """usage: raggedmoe train [MODEL] [KEY=VALUE ...]

Train a Mixture-of-Experts language model; without a word, a small one on Python's own sources.

  raggedmoe train
  raggedmoe train olmoe-tiny steps=200 learning_rate=1e-3
  raggedmoe train deepseek-v2-lite dataset_type=text dataset_path=books/ tokenizer_path=tokenizer.json
  raggedmoe train demo profiler=xplane steps=20 run_name=traced
  raggedmoe train olmoe num_experts=32 base_emb_dim=512 base_num_decoder_layers=4 vocab_size=512
  raggedmoe train olmoe-tiny expert_parallelism=4 fsdp_parallelism=2 token_chunks=2     8 devices; a CPU makes them

`raggedmoe plan` with the same words prints who holds what and what is sent; `raggedmoe launch` runs several processes.

MODEL is one of `raggedmoe models`; all others are settings, and the sizes below make another model of it. MaxText's \
lines can be pasted: its base.yml or another file in its form, key=value, --key value. A name of its that is not below \
is translated, changes nothing and says so, or is refused with the reason (docs/maxtext.md).

A run is a folder: base_output_directory/run_name. The same command again goes on where it was left, exactly. Ctrl-C \
or SIGTERM saves first. `raggedmoe report FOLDER` makes a page of it, `raggedmoe generate FOLDER/model` \
continues a text.

Exit codes: 0 finished; 2 a setting is wrong, and nothing was done; 3 stopped, as losses or gradients were not finite; \
74 stopped, as a file could not be written; 75 interrupted and saved: run it again; 76 stopped, as another process of \
the run (`raggedmoe launch`) has ended."""


def print_help() -> None:
    """The introduction, and every setting with its default."""
    console = Console(highlight=False)
    console.print(INTRODUCTION, markup=False)
    for section in SECTIONS:
        table = Table.grid(padding=(0, 2), pad_edge=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for key in KEYS.values():
            if key.section == section:
                table.add_row(Text(_assignment(key)), Text(_meaning(key)))
        console.print(f"\n[bold]{section}[/]")
        console.print(table)
    for model, brought in RECIPES.items():
        words = " ".join(f"{name}={value}" for name, value in brought.items())
        console.print(f"\n{model} brings its own defaults: {words}", markup=False)


def _assignment(key: Key) -> str:
    default = ",".join(key.default) if isinstance(key.default, tuple) else key.default
    return f"{key.name}={'none' if default in (None, '') else str(default).lower()}"


def _meaning(key: Key) -> str:
    return f"{key.help} ({', '.join(key.choices)})" if key.choices else key.help


def train(
    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MODEL] [KEY=VALUE ...]")] = (),
) -> int:
    """Train a model from key=value settings; without a word, a small one. `raggedmoe train --help` lists them."""
    try:
        import grain  # noqa: F401

        from raggedmoe.train.config import make_config
        from raggedmoe.train.loop import FINISHED
        from raggedmoe.train.loop import train as run
        from raggedmoe.train.screen import Screen
        from raggedmoe.train.settings import in_keys, parse_settings
    except ImportError as error:
        raise ValueError(f"training needs more packages ({error}): pip install 'raggedmoe[train]'") from None
    _silence_orbax()
    try:
        settings = parse_settings(words)
        processes.join()
        made = make_host_devices(settings.values, processes.num_joined())
        hardware = target_hardware()
        config = make_config(settings, hardware, jax.device_count())
        console = None if jax.process_index() == 0 else Console(quiet=True)  # of several processes one talks
        screen = Screen(config.run.steps, config.run.line_period, console)
        if made and hardware.platform == "cpu":
            each = "in each process, " if jax.process_count() > 1 else ""
            screen.say(f"made {made} host devices of this CPU, {each}as the degrees ask for so many")
        outcome = run(config, hardware, screen)
    except ValueError as error:
        raise ValueError(in_keys(str(error))) from error
    if jax.process_index() == 0:
        print(outcome.text, file=sys.stdout if outcome.code == FINISHED else sys.stderr)
    return outcome.code


def make_host_devices(values: Mapping[str, Any], num_processes: int = 1) -> int:
    """Have the CPU's backend, if it has not started, start with the devices that the degrees ask for, or with a
    process's share of them; how many.

    Other backends are not changed by it. 0: nothing was done, as there are as many as were made before.
    """
    return start_with_host_devices(
        math.ceil(math.prod(max(values[f"{axis}_parallelism"], 1) for axis in AXES) / num_processes)
    )


def start_with_host_devices(wanted: int) -> int:
    """Have the CPU's backend, if it has not started, start with so many devices; how many were made, or 0."""
    counted = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if wanted == 1 or counted or jax.config.values["jax_num_cpu_devices"] > 0:
        return 0
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:  # it has started
        return 0
    return wanted


def _silence_orbax() -> None:
    """A disk that is full is one line of ours, not 500 of what orbax's threads run into afterwards."""
    for chatty in ("absl", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    plain = sys.unraisablehook

    def unraisable(found: Any) -> None:
        if not (isinstance(found.exc_value, RuntimeError) and str(found.exc_value) == "Event loop is closed"):
            plain(found)

    sys.unraisablehook = unraisable
