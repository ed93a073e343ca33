"""Real preference data as it is: Anthropic's HH-RLHF, where it lies beside the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from dpo_pack.recipe.load import Recipe, parse_recipe
from dpo_pack.trainer import train


def make_recipe(shared_dir: Path, output_dir: Path, *overrides: str) -> Recipe:
    tree = {
        "output_dir": str(output_dir),
        "model": {"path": str(shared_dir / "conformance" / "llama" / "policy")},
        "data": {
            "train": {
                "path": str(shared_dir / "data" / "hh_harmless_base_test.jsonl.gz"),
                "format": "transcript",
            },
            "max_length": 1024,
        },
        "optim": {"lr": 3e-4},
    }
    return parse_recipe(tree, overrides)


@pytest.mark.slow
def test_an_epoch_of_hh_trains_and_counts_its_bad_rows_by_reason(
    shared_dir: Path, tmp_path: Path, console: Console
) -> None:
    train(make_recipe(shared_dir, tmp_path / "run", "data.on_bad_row=skip"), console)
    source = json.loads((tmp_path / "run" / "data_report.json").read_text())["train"]["sources"][0]
    dropped = {reason: entry["rows"] for reason, entry in source["dropped"].items()}
    assert dropped.pop("no_common_prompt") == 5 and dropped.pop("empty_completion") == 4
    assert dropped.keys() <= {"too_long"}
    assert source["rows_read"] == 2312
    num_pairs = 2312 - 5 - 4 - dropped.get("too_long", 0)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["pairs"] for step in steps) == source["pairs_kept"] == num_pairs
    assert len(steps) == -(-num_pairs // 64)
    # It learns something about real preferences: less than log 2 over the last third of the epoch.
    last = steps[-12:]
    assert sum(step["loss"] for step in last) / len(last) < 0.69
    packing = json.loads((tmp_path / "run" / "packing_report.json").read_text())["statistics"]
    assert packing["saved_by_sharing_tokens"] > 0.3 * packing["unshared_tokens"]
