"""What a run would replace in its `output_dir`, and whether that is its own to replace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dpo_pack.errors import RunError
from dpo_pack.files import read_json
from dpo_pack.recipe import Recipe, dump_recipe
from dpo_pack.recipe_schema import EvalFraction

RECIPE_FILE, INFO_FILE = "recipe.yaml", "run.json"
RUN_FILES = (
    RECIPE_FILE,
    "metrics.jsonl",
    "data_report.json",
    "packing_report.json",
    "reference.parquet",
    INFO_FILE,  # the last to be removed: without it, nothing says that the rest is a run's
)
RUN_DIRECTORIES = ("checkpoints", "model", "trackers", "rollouts.parquet")


def refuse_to_replace_inputs(recipe: Recipe) -> None:
    """The export, `--overwrite` and `checkpoint.keep` would each destroy an input where the run writes."""
    for key, path in _inputs(recipe):
        for name in (*RUN_DIRECTORIES, *RUN_FILES):
            if Path(path).resolve().is_relative_to((recipe.output_dir / name).resolve()):
                raise RunError(
                    f"output_dir: this run would replace {path}, which {key} names; use another output_dir"
                )


def refuse_to_replace_strangers(recipe: Recipe, *, overwrite: bool) -> None:
    """For an `output_dir` of whose run.json nothing could be read: what lies there may be anybody's."""
    root = recipe.output_dir
    if (root / INFO_FILE).exists():
        if overwrite:
            return
        raise RunError(
            f"output_dir: {root / INFO_FILE} cannot be read, so nothing says what run {root} holds; mend it, "
            "use another output_dir, or start again with --overwrite"
        )
    for name in (*RUN_DIRECTORIES, *RUN_FILES):
        path = root / name
        is_empty_directory = path.is_dir() and not any(path.iterdir())
        if not path.exists() or is_empty_directory or (name == RECIPE_FILE and _is_ours(path, recipe)):
            continue
        raise RunError(
            f"output_dir: this run would replace {path}, and no {INFO_FILE} beside it says that a run wrote "
            "it; move it away, or use another output_dir"
        )


def _is_ours(path: Path, recipe: Recipe) -> bool:
    # A process killed at its very start leaves this file alone.
    try:
        return path.read_text(encoding="utf-8") == dump_recipe(recipe)
    except (OSError, UnicodeDecodeError):
        return False


def _inputs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Everything on this machine that the recipe reads, by the key that names it."""
    held_out = () if isinstance(recipe.data.eval, EvalFraction) else recipe.data.eval
    judges = () if recipe.online is None else recipe.online.judges
    named = [
        ("model.path", recipe.model.path),
        ("tokenizer.path", recipe.tokenizer.path),
        ("reference.path", recipe.reference.path),
        *((f"data.train.{number}.path", source.path) for number, source in enumerate(recipe.data.train)),
        *((f"data.eval.{number}.path", source.path) for number, source in enumerate(held_out)),
        *((f"online.judges.{number}.path", judge.path) for number, judge in enumerate(judges)),
    ]
    for key, path in named:
        if path is None or not os.path.exists(path):
            continue
        yield key, path
        adapter = read_json(Path(path) / "adapter_config.json")
        base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
        if isinstance(base, str) and os.path.exists(base):
            yield f"the adapter of {key}", base
