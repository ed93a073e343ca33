"""A run's `output_dir`: what is in it, who may write there, and how an earlier run there is met."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dpo_pack
from dpo_pack import ranks
from dpo_pack.checkpoint_dir import checkpoints, find_damage, step_of
from dpo_pack.errors import RunError
from dpo_pack.files import (
    discard,
    read_json,
    remove_directory,
    write_json_atomically,
    write_text_atomically,
)
from dpo_pack.recipe import Recipe, changed_values, dump_recipe, load_recipe
from dpo_pack.recipe_errors import show

_OUR_FILES = (
    "recipe.yaml",
    "run.json",
    "metrics.jsonl",
    "data_report.json",
    "packing_report.json",
    "reference.parquet",
)
_OUR_DIRECTORIES = ("checkpoints", "model", "trackers", "rollouts.parquet")
_MOST_SHOWN = 30  # characters of a recipe's value
_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "numpy",
    "flash-attn",
    "liger-kernel",
    "peft",
)


@dataclass(slots=True, kw_only=True)
class RunDir:
    """Paths of one run, and `run.json`, rewritten whole whenever something in it changes."""

    root: Path
    checkpoint: Path | None  # where to go on from; None: from the start
    is_finished: bool
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def reference(self) -> Path:
        return self.root / "reference.parquet"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts.parquet"

    @property
    def has_own_checkpoint(self) -> bool:
        """Whether it goes on from a checkpoint of this directory."""
        return self.checkpoint is not None and self.checkpoint.resolve().parent == self.checkpoints.resolve()

    @property
    def resumed_reference(self) -> Path:
        """The frozen reference of the checkpoint's run, which may be in another directory."""
        assert self.checkpoint is not None
        return self.checkpoint.resolve().parents[1] / "reference.parquet"

    def update(self, **changes: Any) -> None:
        """Set keys of `run.json` and write it; ranks other than 0 write nothing."""
        self.info.update(changes)
        if ranks.is_first():
            write_json_atomically(self.root / "run.json", self.info)


def find_run(recipe: Recipe, *, overwrite: bool) -> RunDir:
    """Decide, without writing anything, whether this is a new run, a resumed or a finished one.

    Raises RunError when `output_dir` holds a run that this recipe must not touch.
    """
    root = recipe.output_dir
    resume = recipe.checkpoint.resume
    _refuse_to_replace_inputs(recipe)
    info = read_json(root / "run.json")
    ways_out = "start again with checkpoint.resume=never and --overwrite, or use another output_dir"
    if resume not in ("auto", "never"):
        checkpoint = Path(resume)
        if not (checkpoint / "checkpoint.json").is_file():
            raise RunError(f"checkpoint.resume: {checkpoint} is not a checkpoint; give a step-... directory")
        owner = checkpoint.resolve().parents[1]
        _refuse_changes(owner, recipe, "use another checkpoint")
        if info is not None and owner != root.resolve():
            raise RunError(f"output_dir: {root} holds another run than {checkpoint}; use another output_dir")
        return RunDir(root=root, checkpoint=checkpoint, is_finished=False, info=info or {})
    if info is None or overwrite or _stopped_before_it_began(root, info):
        return RunDir(root=root, checkpoint=None, is_finished=False)
    if resume == "never":
        raise RunError(f"output_dir: {root} holds a run ({info['status']}); {ways_out}")
    _refuse_changes(root, recipe, ways_out)
    valid = checkpoints(root / "checkpoints")
    return RunDir(
        root=root,
        checkpoint=valid[-1] if valid else None,
        is_finished=info["status"] == "finished",
        info=info,
    )


def _stopped_before_it_began(root: Path, info: dict[str, Any]) -> bool:
    """Whether an earlier run ended in an error and left nothing that another recipe would cost."""
    kept = (root / "rollouts.parquet", root / "model")
    return (
        info.get("status") == "failed"
        and info.get("totals", {}).get("steps", 0) == 0
        and not checkpoints(root / "checkpoints")
        and not any(path.exists() for path in kept)
    )


def _refuse_to_replace_inputs(recipe: Recipe) -> None:
    # The export, `--overwrite` and `checkpoint.keep` would each destroy a model where the run writes.
    inputs = {
        "model.path": recipe.model.path,
        "tokenizer.path": recipe.tokenizer.path,
        "reference.path": recipe.reference.path,
    }
    for key, path in inputs.items():
        if path is None or not os.path.isdir(path):
            continue
        for name in _OUR_DIRECTORIES:
            if Path(path).resolve().is_relative_to((recipe.output_dir / name).resolve()):
                raise RunError(
                    f"output_dir: this run would replace {path}, which {key} names; use another output_dir"
                )


def choose_checkpoint(run: RunDir, recipe: Recipe, say: Callable[[str], None]) -> None:
    """Go on from the newest checkpoint whose files are as they were written; every rank calls.

    Raises RunError when the recipe names a checkpoint and it is damaged.
    """
    while run.checkpoint is not None:
        path = run.checkpoint
        own = find_damage(path, rank=ranks.rank(), num_ranks=ranks.num_ranks())
        damage = next((told for told in ranks.every_rank_says(own) if told is not None), None)
        if damage is None:
            return
        if recipe.checkpoint.resume != "auto":
            raise RunError(
                f"checkpoint.resume: {path} is damaged: {damage}; give another, or auto for the newest whole"
            )
        older = ranks.first_says([c for c in checkpoints(path.parent) if step_of(c) < step_of(path)])
        run.checkpoint = older[-1] if older else None
        instead = f"going on from {run.checkpoint}" if older else "none is older, and the run begins anew"
        say(f"Warning: {path} is damaged: {damage}; {instead}")


def _refuse_changes(root: Path, recipe: Recipe, ways_out: str) -> None:
    changed = changed_values(load_recipe(root / "recipe.yaml"), recipe)
    if changed:
        told = ", ".join(f"{key}{_then_and_now(*values)}" for key, values in changed.items())
        raise RunError(f"output_dir: {root} holds a run with another {told}; {ways_out}")


def _then_and_now(then: Any, now: Any) -> str:
    """What a key was and is, where that is short."""
    shown = show(then), show(now)
    return f" ({shown[0]} then, {shown[1]} now)" if max(map(len, shown)) <= _MOST_SHOWN else ""


def begin_run(run: RunDir, recipe: Recipe, device: str) -> None:
    """Write what identifies the run. A run that starts anew leaves nothing of an earlier one behind."""
    if run.checkpoint is None:
        _clear(run.root)
    for directory in (run.root, run.checkpoints, run.rollouts):
        for leftover in directory.glob(".*.tmp"):  # of a killed process
            discard(leftover)
    write_text_atomically(run.root / "recipe.yaml", dump_recipe(recipe))
    run.update(
        status="running",
        dpo_pack=dpo_pack.__version__,
        versions=package_versions(),
        devices=[device],
        git_commit=git_commit(),
    )


def package_versions() -> dict[str, str]:
    """Python and the packages whose releases may change numbers, as installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _clear(root: Path) -> None:
    for name in _OUR_FILES:
        (root / name).unlink(missing_ok=True)
    for dump in root.glob("nonfinite-step-*.json"):
        dump.unlink()
    for name in _OUR_DIRECTORIES:
        if (root / name).is_dir():
            remove_directory(root / name)


def git_commit() -> str | None:
    """The commit checked out in the working directory, if it is in a repository."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
