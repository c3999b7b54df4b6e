"""`raggedmoe demo`: a small model trained, the report of its run, and a sample of its text, in one process."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import jax
import tyro

from raggedmoe.cli.generate import generate
from raggedmoe.cli.train import run_training

PROMPT, NEW_TOKENS, TEMPERATURE = "def __init__(self", 240, 0.6


def demo(
    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[KEY=VALUE ...]")] = (),
) -> int:
    """Train a small model on Python's own sources, make the report of the run, and generate some text.

    It does what `raggedmoe train demo`, `raggedmoe report` and `raggedmoe generate` do, and says what to try next. It
    takes the settings of `raggedmoe train` and has its exit codes.
    """
    outcome = run_training(("demo", *words))
    if outcome.code:
        print(outcome.text, file=sys.stderr)
        return outcome.code
    if jax.process_index() != 0:
        return 0
    from raggedmoe.train.loop.run_folder import MODEL
    from raggedmoe.train.report.build import write_report

    folder = outcome.folder
    page = write_report(folder)
    print(f"\nA sample, which continues {PROMPT!r}:\n\n{PROMPT}", end="", flush=True)
    generate(str(folder / MODEL), PROMPT, max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE)
    print(summary(folder, folder / MODEL, page))
    return 0


def summary(folder: Path, model: Path, page: Path) -> str:
    """Say what a newcomer has now, and which commands to try next."""
    from raggedmoe.train.loop.record import read_run, series

    record, command, path = read_run(folder), command_name(), shlex.quote(str(model))
    losses = series(record.held_out, "loss").values
    loss = "not measured" if not len(losses) else f"{losses[-1]:.3f} nats per token, from {losses[0]:.3f}"
    return f"""
You have
  a model        {model}; `raggedmoe export` makes a Hugging Face folder of it
  held-out loss  {loss} (a token is a byte; ln 256 is 5.545)
  speed          {record.series("tokens_per_second").median:,.0f} tokens per second in training
  a report       {page.resolve()}, to open in a browser
Try next
  {command} generate {path} --prompt "class " --max-new-tokens 200 --temperature 0.6
  {command} train olmoe-tiny steps=200
  {command} explain --model deepseek-v3 --hardware tpu7x"""


def command_name() -> str:
    """Return what to type for `raggedmoe`: its name, where a shell finds it by that, or its path."""
    called, known = Path(sys.argv[0]), shutil.which("raggedmoe")
    if called.name != "raggedmoe" or (known is not None and Path(known).resolve() == called.resolve()):
        return "raggedmoe"
    return shlex.quote(str(called))
