"""Measure what a grown file costs: docs/performance.md, "As the work grows".

    python scripts/measure_ingestion.py 300000 10000 [--package DIRECTORY ...]

For each directory that holds a `dpo_pack` (by default, the repository of this script), it tokenises that many
pairs of random words (20 of the prompt, 12 of each answer), adds the second number of pairs at the end of the
file and tokenises it again, each time in a new process. It prints the CPU seconds of `load_data`, the rows
that were tokenised, and the peak of the process's resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
WORDS = ("red", "green", "blue", "one", "two", "three", "sun", "moon", "bread", "water")
LOAD = """
import resource, sys
from pathlib import Path
from support.tiny_tokenizer import tiny_tokenizer
try:
    from dpo_pack.data.sources import load_data
except ModuleNotFoundError:  # up to commit 95b5589
    from dpo_pack.data.load import load_data
from dpo_pack.recipe.schema import DataRecipe
data, cache_dir = DataRecipe.model_validate({"train": sys.argv[1]}), Path(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF)
loaded = load_data(data, tokenizer=tiny_tokenizer(), seed=0, cache_dir=cache_dir)
after = resource.getrusage(resource.RUSAGE_SELF)
seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(f"{seconds:.1f} CPU s, {loaded.report['rows_tokenized']:,} rows, {after.ru_maxrss / 1e3:.0f} MB")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pairs", type=int, nargs=2)
    parser.add_argument("--package", type=Path, action="append")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path, words = Path(directory) / "pairs.jsonl", random.Random(0)
        for number in chosen.pairs:
            with path.open("a") as file:
                for _ in range(number):
                    prompt, *answers = (" ".join(words.choices(WORDS, k=size)) for size in (20, 12, 12))
                    row = {"prompt": prompt, "chosen": f" {answers[0]}", "rejected": f" {answers[1]}"}
                    file.write(json.dumps(row) + "\n")
            for package in chosen.package or [REPOSITORY]:
                print(f"{package.name}, {number:,} pairs more: {load(path, package.resolve())}", flush=True)


def load(path: Path, package: Path) -> str:
    places = {"PYTHONPATH": f"{package}:{REPOSITORY / 'tests'}", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", LOAD, str(path), str(path.with_name(f"cache of {package.name}"))]
    ended = subprocess.run(
        command, cwd=path.parent, env={**os.environ, **places}, check=True, stdout=subprocess.PIPE, text=True
    )
    return ended.stdout.strip()


if __name__ == "__main__":
    main()
