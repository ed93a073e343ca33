"""A run's `output_dir`: its files, which files a run may replace, and how a run treats an earlier run."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import shlex
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dpo_pack
from dpo_pack.data.store import content_key, file_hashes, path_hash
from dpo_pack.model.facts import router_balance
from dpo_pack.model.fingerprint import weights_fingerprint
from dpo_pack.recipe.load import (
    INFO_FILE,
    RECIPE_FILE,
    TOKENIZER_FILES,
    Recipe,
    changed_values,
    dump_recipe,
    load_recipe,
    only_goes_on,
)
from dpo_pack.recipe.text import show
from dpo_pack.reference.cache import default_cache_directory
from dpo_pack.run.checkpoint_files import (
    checkpoints,
    damage_of,
    damage_of_files,
    file_sums,
    saved_counters,
    step_of,
)
from dpo_pack.run.models import CPU, resolve_model
from dpo_pack.system import ranks
from dpo_pack.system.errors import RecipeError, RunError
from dpo_pack.system.files import (
    discard,
    locked,
    read_json,
    remove_directory,
    text_of,
    write_json_atomically,
    write_text_atomically,
    writing,
)
from dpo_pack.system.machine import git_commit, package_versions
from dpo_pack.system.process import counted

LOCK_FILE = "run.lock"
LOOKS_FILE = "history.jsonl"  # in verdict/
ITS_START = "its start"  # names it among the models with which a verdict has compared the run's
_STATUSES = ("running", "interrupted", "failed", "finished")
_MOST_TOLD = 193  # characters of what has changed; with `error: ` a line has 200


@dataclass(slots=True, kw_only=True)
class RunDir:
    """The files of one run, and the content of `run.json`. Only rank 0 writes; the others do not wait."""

    root: Path
    checkpoint: Path | None  # the run resumes from it; None if the run begins at step 0
    is_finished: bool
    info: dict[str, Any] = field(default_factory=dict)
    # What a run writes beside RECIPE_FILE and INFO_FILE. `rollouts` and `pairs` are directories.
    metrics: Path = Path("metrics.jsonl")
    samples: Path = Path("samples.jsonl")
    held_out: Path = Path("held_out.parquet")
    console_log: Path = Path("console.log")
    data_report: Path = Path("data_report.json")
    packing_report: Path = Path("packing_report.json")
    reference: Path = Path("reference.parquet")
    page: Path = Path("report.html")
    checkpoints: Path = Path("checkpoints")
    model: Path = Path("model")
    trackers: Path = Path("trackers")
    rollouts: Path = Path("rollouts.parquet")
    pairs: Path = Path("pairs.parquet")
    verdict: Path = Path("verdict")

    def __post_init__(self) -> None:
        for name, part in PARTS.items():
            setattr(self, name, self.root / part)

    @property
    def has_own_checkpoint(self) -> bool:
        """Whether the run resumes from a checkpoint in this directory."""
        return self.checkpoint is not None and self.checkpoint.resolve().parent == self.checkpoints.resolve()

    def model_files(self) -> dict[str, dict[str, int]]:
        """Returns size and checksum of each file in model/, except README.md, because users edit it."""
        sums = ranks.first_does_for_all(lambda: file_sums(self.model))
        return {name: total for name, total in sums.items() if name != "README.md"}

    def remove_leftovers(self) -> None:
        """Removes the temporary files that a killed process has left."""
        target = self.model.resolve()  # of a link elsewhere, or what is in `root` already
        places = ((self.root, "*"), (self.checkpoints, "*"), (self.rollouts, "*"), (self.pairs, "*"))
        exported = f"{glob.escape(target.name)}.????????"  # as `path_aside` names it; `*` fits others, too
        for directory, name in (*places, (target.parent, exported)):
            for leftover in directory.glob(f".{name}.tmp"):
                ranks.only_first_does(functools.partial(discard, leftover))

    def place_model(self, path: Path | None) -> Path:
        """Returns where the model is to be written: model/, or `path`, to which model/ becomes a link. Raises
        RunError if another run has meanwhile written there."""
        if path is None and self.model.is_symlink():
            discard(self.model)
        if path is None:
            return self.model
        if path.resolve() != self.model.resolve():
            _refuse_place(path, self.model)
            discard(self.model)  # of an earlier end of this run
            with writing(self.model):
                self.model.symlink_to(path.resolve())
        return path.resolve()  # a rename would replace a link, not the directory behind it

    def update(self, **changes: Any) -> None:
        """Sets keys of `run.json` and writes the file."""
        self.info.update(changes)
        ranks.only_first_does(lambda: write_json_atomically(self.root / INFO_FILE, self.info))


# The names of the files and directories that a run writes, by their names in RunDir.
PARTS = {one.name: str(one.default) for one in fields(RunDir) if isinstance(one.default, Path)}


@contextlib.contextmanager
def only_run(root: Path, what: str = "") -> Iterator[None]:
    """Holds the lock of `root`, or raises RunError with `what`. Every rank must call it."""
    lock = locked(root / LOCK_FILE, what or f"output_dir: {root}")
    with contextlib.ExitStack() as stack:
        ranks.first_does_for_all(lambda: stack.enter_context(lock))
        yield


def find_run(recipe: Recipe, *, overwrite: bool) -> RunDir:
    """Decides whether the run is new, resumed or finished, or raises RunError. Writes nothing."""
    root, resume = recipe.output_dir, recipe.checkpoint.resume
    new = RunDir(root=root, checkpoint=None, is_finished=False)
    info = read_json(root / INFO_FILE)
    totals = info.get("totals", {}) if isinstance(info, dict) and info.get("status") in _STATUSES else None
    info = info if isinstance(totals, dict) else None  # the file is missing, or no run wrote it
    named = None if resume in ("auto", "never") else Path(resume)
    owner = None if named is None else named.resolve().parent.parent  # the run that wrote it
    _refuse_to_replace(recipe, is_ours=info is not None or owner == root.resolve(), overwrite=overwrite)
    if named is not None:
        if owner is None or not (named / "checkpoint.json").is_file():
            raise RunError(f"checkpoint.resume: {named} is not a checkpoint; give a step-... directory")
        way_out = "use another checkpoint"
        _refuse_changes(owner, _changes(owner, recipe, way_out), way_out, key="checkpoint.resume")
        if info is not None and owner != root.resolve():
            raise RunError(f"output_dir: {root} holds another run than {named}; use another output_dir")
        return replace(new, checkpoint=named, info=info or {})
    if info is None or overwrite:
        return new
    status, steps = info["status"], info.get("totals", {}).get("steps", 0)
    found, ways_out = checkpoints(new.checkpoints), "use another output_dir, or --overwrite"
    if status == "failed" and not (steps or found or new.rollouts.exists() or new.model.exists()):
        return new  # the earlier run left nothing to lose
    if resume == "never":
        raise RunError(f"output_dir: {root} holds a run ({status}); {ways_out}")
    goes_on = replace(new, checkpoint=found[-1] if found else None, info=info)
    changed = _changes(root, recipe, ways_out, ended=status == "finished")
    if status != "finished":
        _refuse_changes(root, changed, ways_out)
        return goes_on
    if found and step_of(found[-1]) == steps and only_goes_on(changed, recipe):
        return goes_on
    train_on = f"{ways_out}, or train its model further (see {shlex.join(['dpopack', 'train', str(root)])})"
    shorter = "use another output_dir, --overwrite, or train it further (see dpopack train RUN)"
    _refuse_changes(root, changed, train_on, shorter)
    sums = info.get("model_files", {})
    try:
        damage = damage_of_files(new.model, sums) if new.model.is_dir() else "it is missing"
    except OSError as error:
        damage = f"{error.filename} cannot be read: {error.strerror}"
    if damage is not None:
        again = f"write it again with checkpoint.resume={found[-1]}, " if found else ""
        what = f"this run is finished, but {new.model} is not whole ({damage})"
        raise RunError(f"output_dir: {what}; {again}{ways_out}")
    return replace(goes_on, is_finished=True)


def way_on(recipe: Recipe) -> str:
    """Returns the command that trains a finished run's model further, against the same reference."""
    root, model = recipe.output_dir, recipe.model
    settings: dict[str, object] = {"model.path": root / "model", "output_dir": f"{root}-2"}
    if recipe.loss.needs_reference and recipe.reference.sync is None:
        start = model.path if model.revision is None else f"FILL-IN/{model.path}@{model.revision}"
        settings["reference.path"] = recipe.reference.path or start
    settings |= {f"model.{key}": "null" for key in ("lora", "revision") if getattr(model, key) is not None}
    if recipe.export.path is not None:  # this run's model is there
        settings["export.path"] = "null"
    words = [f"{key}={value}" for key, value in settings.items()]
    command = shlex.join(["dpopack", "train", str(root / RECIPE_FILE), *words])
    return f"to train on from its model (the optimizer's moments begin anew), run {command}"


def choose_checkpoint(run: RunDir, resume: str, say: Callable[[str], None]) -> None:
    """Sets `run.checkpoint` to the newest whole one, or None. Raises RunError. Every rank must call it."""
    if run.checkpoint is not None and not all(ranks.every_rank_says(run.checkpoint.is_dir())):
        raise RunError(f"output_dir: not every node sees {run.checkpoint}; use a directory that all share")
    if run.checkpoint is None and run.info.get("status") is not None:
        say("Beginning anew: the earlier run here ended without a checkpoint")
    while run.checkpoint is not None and (damage := damage_of(run.checkpoint)) is not None:
        path = run.checkpoint
        if resume != "auto":
            raise RunError(
                f"checkpoint.resume: {path} is damaged: {damage}; give another checkpoint, or auto"
            )
        older = ranks.first_says([c for c in checkpoints(path.parent) if step_of(c) < step_of(path)])
        run.checkpoint = older[-1] if older else None
        instead = f"going on from {run.checkpoint}" if older else "none is older, so the run begins at step 0"
        say(f"Warning: {path} is damaged: {damage}; {instead}")
    if run.checkpoint is not None and run.has_own_checkpoint:
        ranks.first_does_for_all(functools.partial(_require_metrics, run.metrics, run.checkpoint))


def _require_metrics(metrics: Path, checkpoint: Path) -> None:
    """Raises RunError if lines of metrics.jsonl from before the run's checkpoint are lost or changed."""
    saved = saved_counters(checkpoint)
    content = metrics.read_bytes() if metrics.is_file() else b""
    if zlib.crc32(content[: saved.metrics_offset]) != saved.metrics_crc32:
        raise RunError(
            f"output_dir: {metrics} does not begin with the {saved.metrics_offset:,} bytes that it had when "
            f"{checkpoint} was written; put the whole file back, or go on in another output_dir with "
            f"checkpoint.resume={checkpoint}"
        )


def begin_run(run: RunDir, recipe_text: str, device: str, place: Path | None) -> None:
    """Writes recipe.yaml and run.json. A run that begins at step 0 first removes an earlier run's files, with
    its model at `place`, the recipe's export.path."""
    run.remove_leftovers()  # first: model/ may be a link to where some are
    if run.checkpoint is None:  # a kill leaves recipe.yaml and run.json, which say that a run wrote the rest
        with writing(run.root):
            if place is not None and place.is_dir() and place.resolve() == run.model.resolve():
                remove_directory(place.resolve())  # before the link to it, which shows whose it is
            earlier = (run.root / part for part in PARTS.values() if part != PARTS["verdict"])
            # Who trains again and looks again has looked more than once.
            others = (path for path in run.verdict.glob("*") if path.name != LOOKS_FILE)
            for path in (*earlier, *others, *run.root.glob("nonfinite-step-*.json")):
                if path.is_dir():
                    remove_directory(path)
                else:
                    path.unlink(missing_ok=True)
    write_text_atomically(run.root / RECIPE_FILE, recipe_text)
    if run.checkpoint is None or "status" not in run.info:  # else it goes on
        run.info["begun"] = datetime.now(UTC).isoformat(timespec="seconds")
    run.info.pop("verdict", None)  # of an earlier end
    run.update(
        status="running",
        dpo_pack=dpo_pack.__version__,
        versions=package_versions(),
        devices=[device],
        git_commit=git_commit(),
    )


# ---------------------------------------------------------------------------------------------- refusals


def _changes(root: Path, recipe: Recipe, ways_out: str, ended: bool = False) -> dict[str, tuple[Any, Any]]:
    """Returns `changed_values` since the run in `root`, without paths whose content is the same. Raises
    RunError if that run's recipe cannot be read, or trains as no release does any longer."""
    try:
        earlier = load_recipe(root / RECIPE_FILE, lenient=True)
    except RecipeError as error:
        what = f"the recipe of the run in {root} cannot be read ({error})"
        raise RunError(f"output_dir: {what}; correct {root / RECIPE_FILE}, or {ways_out}") from error
    if earlier.dropped:
        raise RunError(f"output_dir: {root} holds a run with {'; '.join(earlier.dropped)}; {ways_out}")
    changed = changed_values(earlier, recipe)
    if moved := [key for key in changed if key in recipe.inputs]:
        written, read = (read_json(root / INFO_FILE) or {}).get("inputs"), input_fingerprints(recipe, moved)
        for key in moved:
            if isinstance(written, dict) and written.get(key) == read.get(key) is not None:
                for same in (key, key.replace(".path", ".revision")):
                    changed.pop(same, None)
    router = changed.get("loss.router_aux_coef", (True,))
    # 0 and null differ for mixtures of experts only, and earlier releases had 0 as the default.
    if not any(router) and router_balance(resolve_model(recipe, CPU).architecture, None) is None:
        del changed["loss.router_aux_coef"]
    # A run that goes on compares the fingerprint of its data, which says whether a file keeps other pairs.
    return {key: both for key, both in changed.items() if ended or not key.endswith(".keep.from")}


def _refuse_changes(
    root: Path,
    changed: Mapping[str, tuple[Any, Any]],
    ways_out: str,
    shorter: str = "",
    *,
    key: str = "output_dir",
) -> None:
    """Raises RunError, which names the keys, if the run in `root` had a recipe that trains otherwise.
    `shorter`: the ways out where a line has no room for `ways_out`."""
    if changed:
        names = list(changed)
        values = [f"{name} ({show(then)} then, {show(now)} now)" for name, (then, now) in changed.items()]
        rests = ((num, counted(len(names) - num, "more key")) for num in range(len(names) - 1, 0, -1))
        told = [", ".join(values), ", ".join(names)]
        told += [f"{', '.join(names[:num])} and {rest}" for num, rest in rests]
        held, shorter = f"{root} holds a run", shorter or ways_out
        places = ((held, ways_out), (held, shorter), (f"...{str(root)[-20:]} holds a run", shorter))
        lines = [f"{key}: {place} with another {keys}; {ways}" for place, ways in places for keys in told]
        raise RunError(next((line for line in lines if len(line) <= _MOST_TOLD), lines[-1]))


def _refuse_place(place: Path, link: Path) -> None:
    """Raises RunError if the model cannot go to `place`: it is neither new, empty, nor what `link` names."""
    if place.resolve().is_mount():  # it cannot be renamed
        raise RunError(f"export.path: {place}: a disk is mounted there; give a directory in it")
    is_empty = place.is_dir() and not any(place.iterdir())
    if place.exists() and not is_empty and link.resolve() != place.resolve():
        raise RunError(f"export.path: {place} exists already; give a path that does not exist")


def input_fingerprints(recipe: Recipe, keys: Collection[str] | None = None) -> dict[str, str | None]:
    """Returns fingerprints of the content at the recipe's paths (only of `keys`); None: it has none."""
    cache_dir = recipe.reference.cache_dir or default_cache_directory()
    hashes, weights = cache_dir / "file_hashes.json", cache_dir / "model_hashes.json"
    found: dict[str, str | None] = {}
    for key, name in recipe.inputs.items():
        if name is None or (keys is not None and key not in keys):
            continue
        if key in ("model.path", "reference.path") or key.startswith("online."):
            revision = recipe.model.revision if key == "model.path" else None
            found[key] = weights_fingerprint(name, revision, weights)
        elif key == "tokenizer.path":
            files = [file for file in map(Path(name).joinpath, TOKENIZER_FILES) if file.is_file()]
            found[key] = content_key(file_hashes(files, hashes)) if files else None
        else:
            found[key] = path_hash(Path(name), hashes) if os.path.exists(name) else None
    return found


def _refuse_to_replace(recipe: Recipe, *, is_ours: bool, overwrite: bool) -> None:
    """Raises RunError if the run would replace a file that the recipe reads. Also if it would replace
    any other file, unless the directory `is_ours` (a valid run.json shows that a run wrote there, or its
    checkpoint is named), or its run.json is damaged and `overwrite` is set."""
    info, named = recipe.output_dir / INFO_FILE, dict(recipe.inputs)
    written = [recipe.output_dir / name for name in (*PARTS.values(), RECIPE_FILE)]
    for key, path in recipe.inputs.items():
        base = None if path is None else read_json(Path(path) / "adapter_config.json")
        named[f"the adapter of {key}"] = (base or {}).get("base_model_name_or_path")
    for key, path in named.items():
        if not (isinstance(path, str) and os.path.exists(path)):
            continue
        if any(Path(path).resolve().is_relative_to(place.resolve()) for place in (*written, info)):
            what = f"this run would replace {path}, which {key} names"
            raise RunError(f"output_dir: {what}; use another output_dir")
    if (place := recipe.export.path) is not None:
        _refuse_place(place, recipe.output_dir / PARTS["model"])
    if is_ours:
        return
    if info.exists() and not overwrite:
        what = f"{info} cannot be read, so it is unknown which run is there; repair it"
        ways_out = "name one of its checkpoints with checkpoint.resume, or start again with --overwrite"
        raise RunError(f"output_dir: {what}, use another output_dir, {ways_out}")
    for file in () if info.exists() else written:
        is_empty = not file.exists() or (file.is_dir() and not any(file.iterdir()))
        # A process that is killed right after its start leaves its recipe alone, without run.json.
        if not is_empty and not (file.name == RECIPE_FILE and text_of(file) == dump_recipe(recipe)):
            what = f"this run would replace {file}, and there is no {INFO_FILE} to show that a run wrote it"
            raise RunError(f"output_dir: {what}; move it away, or use another output_dir")
