"""Everything a run needs, in one directory: a tiny random Llama with its tokenizer, pairs and a recipe."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from support.rows import write_rows
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

NUM_PAIRS = 16
_WORDS = ("red", "green", "blue", "one", "two", "three", "sun", "moon", "bread", "water")


def tiny_checkpoint(directory: Path, family: str = "llama", **changes: Any) -> Path:
    """Writes a tiny model that embeds the tokens of `tiny_tokenizer`, with it; returns `directory`."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(directory)
    tiny_model(family, vocab_size=len(tokenizer), **changes).save_pretrained(directory)
    return directory


def tiny_run(directory: Path) -> Path:
    """Write model/, pairs.jsonl, heldout.jsonl and recipe.yaml; return the recipe's path.

    Answers that end in "yes" are preferred to those that end in "no". Paths start at `${recipe_dir}`, so
    the directory may be copied; the run will be in run/ and its cache in cache/.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tiny_checkpoint(directory / "model")
    rows = tiny_pairs(random.Random(0), NUM_PAIRS + 6)
    write_rows(directory / "pairs.jsonl", rows[:NUM_PAIRS])
    write_rows(directory / "heldout.jsonl", rows[NUM_PAIRS:])
    recipe = {
        "output_dir": "${recipe_dir}/run",
        "model": {"path": "${recipe_dir}/model"},
        "reference": {"cache_dir": "${recipe_dir}/cache"},
        "data": {
            "train": "${recipe_dir}/pairs.jsonl",
            "eval": "${recipe_dir}/heldout.jsonl",
            "max_length": 128,
        },
        "packing": {"pairs_per_step": 8, "token_budget": 128},
        "optim": {"lr": 1e-3},
        "logging": {"samples": None},  # they take longer than such a run
        "export": {"verify": "none"},  # so does the process that reads the model
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return directory / "recipe.yaml"


def tiny_pairs(rng: random.Random, num_pairs: int) -> list[dict[str, Any]]:
    def text(least: int, most: int) -> str:
        return "".join(f" {rng.choice(_WORDS)}" for _ in range(rng.randint(least, most)))

    return [
        {"prompt": "ask" + text(2, 12), "chosen": text(1, 8) + " yes", "rejected": text(1, 8) + " no"}
        for _ in range(num_pairs)
    ]
