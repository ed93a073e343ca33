"""A run that a release has left half done, in tests/fixtures/release: later code reads or refuses it.

`scripts/make_golden_values.py --release` makes it: a model, pairs, a recipe, `run/` with a checkpoint after
two of four steps, `cache/` with the reference log-probs, and expected.json.
"""

from __future__ import annotations

import json
import shutil
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

import dpo_pack
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.run.setup import prepare_data, prepare_tokenizer
from dpo_pack.trainer import train
from support.reference_pairs import all_sums
from support.rows import write_rows
from support.tiny_run import tiny_checkpoint
from support.whole_runs import stop_after

RELEASE = Path(__file__).resolve().parents[1] / "fixtures" / "release"
STEPS, STEPS_DONE = 4, 2
_COLOURS = ("red", "green", "blue", "grey", "pink", "black", "white", "brown")
_RECIPE = {  # paths are relative, so that a copy of the directory is the same run
    "output_dir": "run",
    "model": {"path": "./model", "dtype": "float32"},
    "reference": {"cache_dir": "cache"},
    "data": {"train": "./pairs.jsonl", "max_length": 64},
    "packing": {"pairs_per_step": 4, "token_budget": 128},
    "train": {"epochs": 2},
    "optim": {"lr": 1e-3},
}


def versions() -> dict[str, str]:
    """The versions that decide whether a checkpoint and a cache are those of the same program."""
    return {"dpo-pack": dpo_pack.__version__, "transformers": version("transformers")}


def release_recipe(*overrides: str) -> Recipe:
    """The recipe in the working directory."""
    return load_recipe(Path("recipe.yaml"), overrides)


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["split"] == "train"]


def make_release(directory: Path) -> None:
    """Writes all files into an empty `directory`."""
    tiny_checkpoint(
        directory / "model",
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=4,
    )
    rows = [
        {"prompt": f"which is {colour}?", "chosen": f" {colour} yes", "rejected": f" {other} no"}
        for colour, other in zip(_COLOURS, _COLOURS[1:] + _COLOURS[:1], strict=True)
    ]
    write_rows(directory / "pairs.jsonl", rows)
    (directory / "recipe.yaml").write_text(yaml.safe_dump(_RECIPE, sort_keys=False), encoding="utf-8")
    with chdir(directory):
        console = Console(quiet=True)
        train(release_recipe("output_dir=straight", "reference.cache_dir=other"), console)
        recipe = release_recipe()
        stop_after(STEPS_DONE, recipe, console)
        table = prepare_data(recipe, prepare_tokenizer(recipe), console).train
        expected: dict[str, Any] = {
            "made_with": versions(),
            "losses": losses(Path("straight")),
            "pairs": [
                [ids.tolist() for ids in (group.context, *group.completions)]
                for group in map(table.group, range(table.num_pairs))
            ],
            "sums": all_sums(release_cache(Path()), [table]).tolist(),
        }
        (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
        for unneeded in ("straight", "other"):
            shutil.rmtree(unneeded)
        for path in Path("cache").iterdir():  # memos and tokens are made anew where they lack
            if path.name != "reference":
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def release_cache(directory: Path) -> ReferenceCache:
    """The cache under the namespace that is written in it."""
    (namespace,) = (directory / "cache" / "reference").glob("*/namespace.json")
    cache = ReferenceCache(directory / "cache", json.loads(namespace.read_text(encoding="utf-8")))
    assert cache.directory == namespace.parent, "the same facts have another digest: old values are not found"
    return cache
