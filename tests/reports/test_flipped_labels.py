"""A run's page finds wrong labels: many of the pairs that it shows first have labels that a test flipped."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.rows import write_rows

from dpo_pack.recipe.load import load_recipe
from dpo_pack.reports.run_files import lowest_margins, read_runs
from dpo_pack.trainer import train

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_PAIRS, NUM_FLIPPED = 2000, 400  # so 20 of any hundred pairs


def flip_labels(source: Path, target: Path, *, seed: int) -> set[int]:
    """Writes the first pairs of `source`, some with chosen and rejected exchanged; returns rows, from 1."""
    pairs = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[:NUM_PAIRS]]
    flipped = set(random.Random(seed).sample(range(1, NUM_PAIRS + 1), NUM_FLIPPED))
    for row in flipped:
        pair = pairs[row - 1]
        pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
    write_rows(target, pairs)
    return flipped


@pytest.mark.slow
def test_of_the_hundred_pairs_shown_first_at_least_four_times_the_base_rate_are_flipped(
    tmp_path: Path,
) -> None:
    assets, data = tmp_path / "assets", tmp_path / "pairs.jsonl"
    subprocess.run([sys.executable, REPOSITORY / "scripts" / "make_quickstart.py", assets], check=True)
    flipped = flip_labels(assets / "train.jsonl", data, seed=0)
    run = tmp_path / "run"
    overrides = (
        f"output_dir={run}", f"model.path={assets / 'model'}", f"reference.cache_dir={tmp_path / 'cache'}",
        f"data.train={data}", "data.eval=[]", "train.eval_every_steps=null", "train.epochs=3",
        "logging.samples=null",
    )  # fmt: skip
    train(load_recipe(REPOSITORY / "configs" / "quickstart.yaml", overrides), Console(quiet=True))
    shown = lowest_margins(read_runs([run])[0])
    found = sum(pair["row"] in flipped for pair in shown)
    print(f"{found} of the {len(shown)} pairs shown first are flipped")
    assert len(shown) == 100 and found >= 80
