"""Tokenise a corpus that is larger than the memory that it may take, train on it, kill that and go on: by hand.

`python -m tests.train.large_corpus FOLDER --megabytes 2000` writes the corpus, and prints the memory of each process
at its fullest, what of it the model needs, and whether the killed run is the uninterrupted one bit for bit.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from raggedmoe.train.data.tokenizer import NUM_BYTES
from tests.train.runs import MAIN, curve

LINE_BYTES, DOCUMENT_LINES, FILES = 100, 20, 8
STEPS, KILLED_AT = 60, 35
TRAIN = ("olmoe-tiny", "dataset_type=tokens", "max_target_length=256", "per_device_batch_size=8", f"steps={STEPS}")
EVERY = ("checkpoint_period=10", "eval_interval=20", "eval_steps=4", "line_period=10", "tensorboard=false")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A process that has ended: how, and what memory it had at its fullest."""

    code: int
    megabytes: float
    seconds: float


def write_corpus(folder: Path, megabytes: int) -> None:
    """Write jsonl files of documents, each of lines that are drawn from many."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    lines = [" ".join(draw.choices(words, k=LINE_BYTES // 6)) + ".\\n" for _ in range(50_000)]
    folder.mkdir(parents=True)
    for number in range(FILES):
        with (folder / f"{number}.jsonl").open("w") as file:
            while file.tell() < megabytes * 10**6 / FILES:
                texts = ("".join(draw.choices(lines, k=DOCUMENT_LINES)) for _ in range(1000))
                file.writelines(f'{{"text": "{text}"}}\n' for text in texts)


def run(*words: str, kill: Path | None = None) -> Finished:
    """Run a command, and kill it once a run's metrics have the step `KILLED_AT` if a path of them is given."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", MAIN, *words], stdout=subprocess.DEVNULL)
    while kill is not None and process.poll() is None and _last_step(kill) < KILLED_AT:
        time.sleep(0.01)
    if kill is not None:
        process.kill()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    print(f"{' '.join(words[:2])} …: {usage.ru_maxrss / 1e3:.0f} MB", flush=True)
    return Finished(code=process.returncode, megabytes=usage.ru_maxrss / 1e3, seconds=time.monotonic() - began)


def _last_step(metrics: Path) -> int:
    lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines[-3:]), default=-1)


def measure(folder: Path, megabytes: int, *, vocab_size: int = NUM_BYTES) -> dict[str, Finished]:
    """Make the corpus and one of 1 MB, tokenise both, train on both, and on the large one again with a kill."""
    write_corpus(folder / "large", megabytes)
    write_corpus(folder / "small", 1)
    train = (*TRAIN, *EVERY, f"vocab_size={vocab_size}", f"base_output_directory={folder / 'runs'}")
    large, small = (str(folder / name) for name in ("large-tokens", "small-tokens"))
    trained = ("--train-vocab-size", str(vocab_size)) if vocab_size > NUM_BYTES else ()
    found = {
        "tokenize large": run("tokenize", str(folder / "large"), large, *trained),
        "tokenize small": run("tokenize", str(folder / "small"), small, "--tokenizer", large),
    }
    # The first compiles, which takes memory of its own.
    for name, tokens in (("first", small), ("small", small), ("large", large)):
        found[f"train {name}"] = run("train", *train, f"dataset_path={tokens}", f"run_name={name}")
    again = ("train", *train, f"dataset_path={large}", "run_name=killed")
    found["train large, killed"] = run(*again, kill=folder / "runs" / "killed" / "metrics.jsonl")
    found["train large, resumed"] = run(*again)
    return found


def is_the_same(folder: Path) -> bool:
    """Tell whether the killed run has the uninterrupted one's curve and weights, to the last bit."""
    runs = [folder / "runs" / name for name in ("large", "killed")]
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
    return curve(runs[0]) == curve(runs[1]) and weights[0] == weights[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--vocab-size", type=int, default=NUM_BYTES, help="more than bytes: of a tokenizer to train")
    options = parser.parse_args()
    for name, process in measure(options.folder, options.megabytes, vocab_size=options.vocab_size).items():
        print(f"{name}: exit {process.code}, {process.megabytes:.0f} MB at most, {process.seconds:.0f} s")
    print(f"the killed run is the uninterrupted one bit for bit: {is_the_same(options.folder)}")


if __name__ == "__main__":
    main()
