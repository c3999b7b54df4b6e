"""`python -m tests.mutants --seed 0`: inject bugs by rule, and see which test of the short suite catches each."""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.reach import Reach, recorded
from tests.mutants.run import Review, Verdict, draw, summary, table, try_mutant
from tests.mutants.tree import Tree

FOLDERS = ["moe", "kernels", "models", "train", "sharding", "launch", "interop"]


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other mutants")
    parser.add_argument("--each", type=int, default=6, help="mutants in each folder")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="folders of src/raggedmoe")
    parser.add_argument("--tests", nargs="+", default=["tests", "src"], help="test files or folders to choose from")
    parser.add_argument("--seconds", type=float, default=90.0, help="of tests for one mutant, as they take without it")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="mutants at once")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    options = parse(words)
    tree = Tree(Path(__file__).resolve().parents[2], "raggedmoe")
    out = tree.root / "out"
    started = time.monotonic()
    reach = recorded(tree, FOLDERS, options.tests, workers=options.workers, folder=out / "mutants")
    review = Review.read(Path(__file__).with_name("reviewed.toml"))
    mutants = [
        mutant
        for folder in options.folders
        for mutant in draw(tree, folder, reach, number=options.each, seed=options.seed)
    ]
    print(f"{len(mutants)} mutants, after {time.monotonic() - started:.0f} s", flush=True)

    def run(number: int) -> Verdict:
        verdict = try_mutant(tree, mutants[number], reach, review, seconds=options.seconds)
        where = f"{verdict.mutant.file}:{verdict.mutant.line}"
        print(f"{number + 1:3} {where}, {verdict.mutant.rule}, {verdict.seconds:.0f} s: {verdict.text}", flush=True)
        return verdict

    with ThreadPoolExecutor(options.workers) as pool:
        verdicts = list(pool.map(run, range(len(mutants))))
    took = f"{summary(verdicts)} Seed {options.seed}, {(time.monotonic() - started) / 60:.0f} minutes."
    text = f"{table(tree, verdicts)}\n\n{took} {reached(tree, options.folders, reach)}\n"
    (out / f"mutants-{options.seed}.md").write_text(text)
    print(f"\n{text}")
    return 0 if all(verdict.is_explained for verdict in verdicts) else 1


def reached(tree: Tree, folders: list[str], reach: Reach) -> str:
    """How much of the sources mutants are drawn from: what no test reaches, no test can be asked about."""
    shares = []
    for folder in folders:
        places = {mutant.expression for mutant in tree.mutants(folder)}
        shares.append(f"{folder} {sum(place in reach.tests for place in places)} of {len(places)}")
    return f"Places of the rules that tests reach: {', '.join(shares)}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
