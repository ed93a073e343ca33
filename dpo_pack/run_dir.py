"""A run's `output_dir`: what is in it, who may write there, and how an earlier run there is met."""

from __future__ import annotations

import importlib.metadata
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
from dpo_pack.run_safety import (
    INFO_FILE,
    RECIPE_FILE,
    RUN_DIRECTORIES,
    RUN_FILES,
    refuse_to_replace_inputs,
    refuse_to_replace_strangers,
)

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
            write_json_atomically(self.root / INFO_FILE, self.info)


def find_run(recipe: Recipe, *, overwrite: bool) -> RunDir:
    """Decide, without writing anything, whether this is a new run, a resumed or a finished one.

    Raises RunError when `output_dir` holds a run that this recipe must not touch.
    """
    root = recipe.output_dir
    resume = recipe.checkpoint.resume
    refuse_to_replace_inputs(recipe)
    info = _read_info(root)
    checkpoint = None if resume in ("auto", "never") else Path(resume)
    if info is None and (checkpoint is None or root.resolve() not in checkpoint.resolve().parents):
        refuse_to_replace_strangers(recipe, overwrite=overwrite)
    ways_out = "start again with checkpoint.resume=never and --overwrite, or use another output_dir"
    if checkpoint is not None:
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


def _read_info(root: Path) -> dict[str, Any] | None:
    """What run.json says; None where there is none, or none that a run wrote."""
    info = read_json(root / INFO_FILE)
    return info if isinstance(info, dict) and "status" in info else None


def choose_checkpoint(run: RunDir, recipe: Recipe, say: Callable[[str], None]) -> None:
    """Go on from the newest checkpoint whose files are as they were written; every rank calls.

    Raises RunError when the recipe names a checkpoint and it is damaged, or where a rank cannot look at it.
    """
    if run.checkpoint is not None and not all(ranks.every_rank_says(run.checkpoint.is_dir())):
        raise RunError(
            f"output_dir: not every node sees {run.checkpoint}; use a directory on a file system that all "
            "nodes share"
        )
    while run.checkpoint is not None:
        path = run.checkpoint
        damage = damage_of(path)
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


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None; every rank calls and looks at a part of them.

    Raises RunError, on every rank, where one of them cannot read: that is no reason to begin anew.
    """
    damage = unreadable = None
    try:
        damage = find_damage(checkpoint, rank=ranks.rank(), num_ranks=ranks.num_ranks())
    except OSError as error:
        unreadable = f"{error.filename or checkpoint}: {error.strerror or error}"
    told = ranks.every_rank_says((damage, unreadable))
    for _, unreadable in told:
        if unreadable is not None:
            raise RunError(
                f"{checkpoint} cannot be read ({unreadable}); run the same command when the disk is back"
            )
    return next((damage for damage, _ in told if damage is not None), None)


def _refuse_changes(root: Path, recipe: Recipe, ways_out: str) -> None:
    changed = changed_values(load_recipe(root / RECIPE_FILE), recipe)
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
    write_text_atomically(run.root / RECIPE_FILE, dump_recipe(recipe))
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
    for name in RUN_DIRECTORIES:
        if (root / name).is_dir():
            remove_directory(root / name)
    for dump in root.glob("nonfinite-step-*.json"):
        dump.unlink()
    for name in RUN_FILES:
        (root / name).unlink(missing_ok=True)


def git_commit() -> str | None:
    """The commit checked out in the working directory, if it is in a repository."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
