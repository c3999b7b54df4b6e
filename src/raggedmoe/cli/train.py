"""`raggedmoe train`, which trains a model."""

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raggedmoe.launch import processes
from raggedmoe.train.settings.config import SETTINGS
from raggedmoe.train.settings.fields import Setting
from raggedmoe.train.settings.sections import RECIPES
from raggedmoe.train.settings.words import read_words

if TYPE_CHECKING:
    from raggedmoe.train.loop.loop import RunOutcome

INTRODUCTION = """usage: raggedmoe train [MODEL] [KEY=VALUE ...]

Train a Mixture-of-Experts language model; without arguments, a small one on Python's own sources.

  raggedmoe train
  raggedmoe train olmoe-tiny steps=200 learning_rate=1e-3
  raggedmoe train path/to/hf-folder dataset_type=text dataset_path=books/
  raggedmoe train deepseek-v2-lite dataset_type=text dataset_path=books/ tokenizer_path=tokenizer.json
  raggedmoe train demo profiler=xplane steps=20 run_name=traced
  raggedmoe train olmoe num_experts=32 base_emb_dim=512 base_num_decoder_layers=4 vocab_size=512
  raggedmoe train olmoe-tiny expert_parallelism=4 fsdp_parallelism=2 token_chunks=2     8 devices; a CPU makes them

`raggedmoe plan` with the same arguments prints how parameters are sharded and what is communicated; `raggedmoe \
launch` runs several processes.

MODEL is one that `raggedmoe models` lists, or a folder, Hugging Face's or one of ours, which brings its sizes, \
parameters and tokenizer; all other arguments are settings, and the sizes below override those of the model. MaxText's \
command lines can be pasted: its base.yml or another file in its form, key=value, --key value. A setting of MaxText \
that is not below is translated, has no effect and says so, or is refused with the reason (docs/maxtext.md).

A run is written to the folder base_output_directory/run_name. The same command resumes it exactly where it stopped. \
Ctrl-C and SIGTERM save a checkpoint first. `raggedmoe report FOLDER` makes a page of the run, `raggedmoe generate \
FOLDER/model` generates text with the trained model.

Exit codes: 0 finished; 2 a setting is wrong, and nothing was done; 3 stopped, as losses or gradients were not finite; \
74 stopped, as a file could not be written; 75 interrupted and saved: run it again; 76 stopped, as another process of \
the run (`raggedmoe launch`) has ended."""


def print_help() -> None:
    """Print the introduction, and every setting with its default and the type of its values."""
    console = Console(highlight=False)
    console.print(INTRODUCTION, markup=False)
    for title, settings in help_sections().items():
        table = Table.grid(padding=(0, 2), pad_edge=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, style="dim")
        table.add_column(overflow="fold")
        for setting in settings:
            table.add_row(Text(_assignment(setting)), Text(_type_text(setting)), Text(_help_text(setting)))
        console.print(f"\n[bold]{title}[/]")
        console.print(table)
    for model, defaults in RECIPES.items():
        words = " ".join(f"{name}={value}" for name, value in defaults.items())
        console.print(f"\n{model} brings its own defaults: {words}", markup=False)


def help_sections() -> dict[str, list[Setting]]:
    """Return the settings by the titles under which they are listed."""
    sections: dict[str, list[Setting]] = {}
    for setting in SETTINGS.values():
        sections.setdefault(setting.section or "model", []).append(setting)
    return sections


def _assignment(setting: Setting) -> str:
    default = ",".join(setting.usual) if isinstance(setting.usual, tuple) else setting.usual
    return f"{setting.name}={'none' if default in (None, '') else str(default).lower()}"


def _type_text(setting: Setting) -> str:
    return "choice" if setting.choices else setting.type.name


def _help_text(setting: Setting) -> str:
    return f"{setting.help} ({', '.join(setting.choices)})" if setting.choices else setting.help


def train(
    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MODEL] [KEY=VALUE ...]")] = (),
) -> int:
    """Train a model, configured by key=value settings, which `raggedmoe train --help` lists."""
    outcome = run_training(words)
    if jax.process_index() == 0:
        print(outcome.text, file=sys.stderr if outcome.code else sys.stdout)
    return outcome.code


def run_training(words: tuple[str, ...]) -> "RunOutcome":
    """Train as the words say, and return how it ended."""
    try:
        import grain  # noqa: F401

        from raggedmoe.train.loop.loop import train as run
    except ImportError as error:
        raise ValueError(f"training needs more packages ({error}): pip install 'raggedmoe[train]'") from None
    _silence_orbax()
    config = read_words(words)
    processes.join()
    return run(config)


def _silence_orbax() -> None:
    """Silence orbax's threads, which would print some 500 lines after a full disk, for which we print one."""
    for chatty in ("absl", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    default_hook = sys.unraisablehook

    def unraisable(unraised: Any) -> None:
        if not (isinstance(unraised.exc_value, RuntimeError) and str(unraised.exc_value) == "Event loop is closed"):
            default_hook(unraised)

    sys.unraisablehook = unraisable
