"""Real runs of the command: in processes of their own that can be killed, or here with shared compilations."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax

from raggedmoe.storage import AnyPath
from raggedmoe.storage.appended import read_appended
from raggedmoe.train.loop import loop, run, speed
from raggedmoe.train.loop.log import RunLog
from raggedmoe.train.step.programs import compile_programs

MAIN = "from raggedmoe.cli.main import main; main()"
NOT_REPEATABLE = ("seconds", "tokens_per_second", "mfu")
# The smallest thing with everything on: latent attention, shared and routed experts, the loss-free rule.
TINY = ("deepseek-v3-tiny", "num_layers=2", "mtp_layers=0", "max_target_length=16", "per_device_batch_size=2")


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", MAIN, *words]


def environment(cache: Path) -> dict[str, str]:
    """As a user has it, but one device and compiled programs kept, so that a restart costs seconds."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    return {**os.environ, **settings}


def train(cache: Path, *words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        command("train", *words), env=environment(cache), capture_output=True, text=True, timeout=300, **options
    )


def lines(path: AnyPath) -> list[dict]:
    return [json.loads(line) for line in read_appended(path).splitlines()]


def curve(folder: AnyPath) -> list[dict]:
    """All that a run's steps and evaluations said, without what depends on the clock, in order."""
    found = [line for line in lines(folder / "metrics.jsonl") if line["kind"] in ("train", "eval")]
    return [{name: value for name, value in line.items() if name not in NOT_REPEATABLE} for line in found]


@functools.cache
def _programs(config, sharding, structure, *batches):
    shaped = [jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves]) for leaves in batches]
    return compile_programs(config, *shaped, sharding)


once_measured = functools.cache(speed.measure_peak_flops)


def share_programs(monkeypatch):
    """The loop compiles only what it has not compiled before in this process, and measures the processor once."""

    def compiled(config, *batches_and_layout):
        *batches, sharding = batches_and_layout
        shapes = [tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)) for batch in batches]
        return _programs(config, sharding, jax.tree.structure(batches[0]), *shapes)

    for module in (loop, run):  # a run with more room compiles anew
        monkeypatch.setattr(module, "compile_programs", compiled)
    monkeypatch.setattr(speed, "measure_peak_flops", once_measured)


def disturb(monkeypatch, at, act):
    """Call something when the report of a step is about to be written."""
    plain = RunLog.step

    def logged(log, step, report):
        if step == at:
            act()
        plain(log, step, report)

    monkeypatch.setattr(RunLog, "step", logged)
