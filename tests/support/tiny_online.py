"""A tiny online run: the model and prompts of `tiny_run`, and a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dpo_pack.recipe.load import Recipe, parse_recipe
from support.tiny_run import tiny_run


def online_recipe(directory: Path, output_dir: Path, *overrides: str, **online: Any) -> Recipe:
    """`directory` holds a `tiny_run`, made here if it is not there yet."""
    if not (directory / "recipe.yaml").exists():
        tiny_run(directory)
    tree = {
        "output_dir": str(output_dir),
        "model": {"path": str(directory / "model")},
        "reference": {"cache_dir": str(directory / "cache")},
        "data": {"train": str(directory / "pairs.jsonl"), "max_length": 128},
        "packing": {"pairs_per_step": 4, "token_budget": 256},
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "train": {"max_steps": 6},
        "logging": {"samples": None},
        "export": {"verify": "none"},
        "online": {
            "judges": [{"type": "function", "function": "support.online_judges:count_e"}],
            "completions_per_prompt": 3,
            "max_new_tokens": 12,
            "rollouts_per_update": 6,
            **online,
        },
    }
    return parse_recipe(tree, overrides)


def rollouts(run: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run / "rollouts.parquet").to_pylist()
    return rows
