"""Checkpoints: what identifies a run, the content of a checkpoint, loading one, and when to write the next.

    step-000100/tensors/         weights, optimizer state, a reference that changes; written by all ranks
    step-000100/host.pt          state of the schedule, the source of batches and the optimizer's groups
    step-000100/checkpoint.json  counters, identity of the run, checksums of the other files
    step-000100/model/           the model for from_pretrained, if checkpoint.export is set

A run can resume from it on any number of ranks and with any strategy: torch.distributed.checkpoint stores
each tensor under a name that is the same on any number of ranks, and the position of each shard in the whole
tensor. A checkpoint has no state of random generators: a step's random numbers depend on (seed, step, rank),
see `seed_step` in system/ranks.py.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import dpo_pack
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.fingerprint import relevant_config
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.packing.plan import PLAN_VERSION
from dpo_pack.recipe.load import INFO_FILE, RECIPE_FILE, check_environment, load_recipe
from dpo_pack.reference.cache import FrozenReference, namespace_digest
from dpo_pack.run.checkpoint_files import (
    HOST_STATE,
    MODEL,
    CheckpointContent,
    CheckpointWriter,
    TensorReader,
    checkpoint_path,
    checkpoints,
    damage_of,
    drop_later_checkpoints,
    load_tensors,
    saved_counters,
)
from dpo_pack.run.export import export_model, prepare_verification, verify
from dpo_pack.run.log import RunLog
from dpo_pack.run.memory_estimate import format_bytes
from dpo_pack.run.models import Setup, moment_bytes
from dpo_pack.run.pairs import exact_tables
from dpo_pack.run.run_dir import PARTS, RunDir, only_run
from dpo_pack.run.setup import load_proved, prepare
from dpo_pack.run.state import Counters, Criterion, Evaluations, Identity, ResumePoint, TrainState
from dpo_pack.system import ranks
from dpo_pack.system.console import make_console, shown
from dpo_pack.system.errors import CacheError, RecipeError, RunError, first_line
from dpo_pack.system.files import discard, path_aside, put_in_place, read_json, sync, writing
from dpo_pack.system.machine import package_versions
from dpo_pack.training.batches import BatchSource, OfflineSource

_ROWS, _BUDGET = "plan of rows, version", "packing.token_budget"  # a checkpoint of version 4 has neither
_PACKAGES = ("dpo-pack", "torch", "transformers", "peft")
_COUNTERS = [one.name for one in fields(Counters) if one.name in TrainState.__slots__]

# -------------------------------------------------------------------------------------- what identifies a run


def run_identity(
    setup: Setup,
    loaded: LoadedModel,
    source: BatchSource,
    criterion: Criterion | None,
    frozen: FrozenReference | None,
) -> Identity:
    """Returns what identifies a run, equal on all ranks. `frozen`: the reference's log-probs, if any."""
    data, facts, moves = setup.data, setup.policy_facts, setup.recipe.reference.sync is not None
    reference = "moving" if moves else "none"
    if frozen is not None:
        assert isinstance(source, OfflineSource)
        reference = frozen.fingerprint(data.train.select(source.pairs_of_steps(frozen.num_steps)))
    fingerprints = {
        "data": data.fingerprint,
        "plan": source.steps_fingerprint,
        "reference": reference,
        **_start_fingerprints(facts, loaded),
    }
    if setup.recipe.train.early_stopping is not None:
        fingerprints["held-out data"] = data.eval_fingerprint
    if setup.recipe.optim.name == "adafactor":  # once its rate was relative to each tensor's size
        fingerprints["meaning of optim.lr for adafactor (it is absolute now)"] = "absolute"
    if facts.balance is not None:
        fingerprints["load-balancing loss"] = f"x {facts.balance.coefficient:g}"
    number, versions = ranks.num_ranks(), {"dpo-pack": dpo_pack.__version__, **package_versions()}
    judged_by = f"{criterion.metric} of {criterion.eval_set}, {data.eval_fingerprint}" if criterion else ""
    if criterion and (tables := exact_tables(setup)):
        judged_by += f", {tables[criterion.eval_set].num_pairs} pairs in float32"
    return Identity(
        fingerprints=fingerprints,
        versions={name: versions[name] for name in _PACKAGES if name in versions}
        | {_ROWS: str(PLAN_VERSION), _BUDGET: f"{setup.token_budget:,}"},
        ranks="one process" if number == 1 else f"{number} processes ({setup.strategy.name})",
        judged_by=judged_by,
    )


def _start_fingerprints(facts: ModelFacts, loaded: LoadedModel) -> dict[str, str]:
    """A checkpoint holds trained weights only: the config says what is computed with them, and an adapter's
    checkpoint has nothing of its base."""
    base = {} if loaded.adapter is None else {"base model": facts.namespace["weights"]}
    return {"model config": namespace_digest(relevant_config(facts.config)), **base}


def _refuse_another(path: Path, then: Mapping[str, str], now: Mapping[str, str], remedy: str) -> None:
    changed = [name for name in {**now, **then} if then.get(name) != now.get(name)]
    if changed:
        raise RunError(f"{path} was saved with another {' and another '.join(changed)}; {remedy}")


# --------------------------------------------------------------------------------- when a run saves its state


@dataclass(slots=True, kw_only=True)
class Saver:
    """Remembers the latest step from which the run can resume, and writes checkpoints of that step."""

    setup: Setup
    run: RunDir
    state: TrainState
    loaded: LoadedModel  # for exports
    identity: Identity
    criterion: Criterion | None
    log: RunLog
    writer: CheckpointWriter
    resume_point: ResumePoint = field(init=False)  # `mark_resume_point` sets it
    saved: ResumePoint | None = None  # the one that the newest checkpoint holds

    def mark_resume_point(self) -> None:
        """Makes the present step the point. When a checkpoint of it is written, the run can resume there."""
        metrics, source = self.log.file, self.state.source.state_dict()
        assert metrics is not None
        self.resume_point = ResumePoint(
            step=self.state.step, metrics_offset=metrics.offset, metrics_crc32=metrics.crc32, source=source
        )

    def begin(self) -> None:
        """Marks the point where this process begins to train: step 0, or the checkpoint that it resumes."""
        self.mark_resume_point()
        if self.run.has_own_checkpoint:
            self.saved = self.resume_point
        self.warn_of_full_disk()
        if self.run.checkpoint is not None and self.setup.recipe.checkpoint.keep_best:
            self._forget_missing()

    def _forget_missing(self) -> None:
        """A run that goes on from another directory's checkpoint has none of the best evaluations' here."""
        best, directory = self.state.standing.best, self.run.checkpoints
        kept = ranks.first_says(tuple(one for one in best if checkpoint_path(directory, one[0]).is_dir()))
        if kept != best:
            self.setup.console.print(
                f"Note: {directory} lacks checkpoints of the best evaluations, so only those after step "
                f"{self.state.step} can be the best of this run"
            )
            self.state.standing = replace(self.state.standing, best=kept)

    def warn_of_full_disk(self) -> None:
        """Warns if a disk lacks room for checkpoints and the model. Every rank must call it."""
        setup, state, settings = self.setup, self.state, self.setup.recipe.checkpoint
        tensors = list(_trained_parameters(state.scorer).values())
        number, own = sum(map(Tensor.numel, tensors)), tensors[0].itemsize
        model, size, wanted = number, own, setup.recipe.export.dtype
        if self.loaded.adapter is None:  # it is written as it was
            model = setup.policy_facts.num_parameters
            size = min(own, getattr(setup.policy_facts.config.dtype, "itemsize", own))
        model *= size if wanted == "auto" else getattr(torch, wanted).itemsize
        one = own * (1 + (state.reference is not None)) + moment_bytes(setup.recipe.optim.name, own)
        one = number * one + model * settings.export
        kept = settings.keep_best + (settings.every_steps is not None) * settings.keep
        number = min(kept, state.source.num_steps // (settings.every_steps or 1)) + 1  # the last step's
        path = setup.recipe.export.path or self.run.root
        place = next(one for one in (path, *path.parents) if one.exists())
        if place.stat().st_dev == self.run.root.stat().st_dev:
            place = self.run.root  # both need room on one disk
        needs = {self.run.root: max(0, number - len([*self.run.checkpoints.glob("step-*")])) * one}
        needs[place] = needs.get(place, 0) + model
        for path, needed in needs.items():
            if (free := shutil.disk_usage(path).free) < needed:
                setup.console.print(
                    f"Warning: {path} has {format_bytes(free)} free, and the run needs up to "
                    f"{format_bytes(needed)} (a checkpoint: {format_bytes(one)}, the model: "
                    f"{format_bytes(model)}); free space, or set export.path, checkpoint.keep or output_dir"
                )

    @property
    def is_due(self) -> bool:
        """Whether `checkpoint.every_steps` asks for one, or `keep_best`: an evaluation is among the best."""
        step, settings = self.state.step, self.setup.recipe.checkpoint
        is_best = step in dict(self.state.standing.best[: settings.keep_best])
        is_multiple = settings.every_steps is not None and step % settings.every_steps == 0
        return step > 0 and (is_best or is_multiple)

    def save(self) -> None:
        """Writes a checkpoint of the full state. A run resumed from it goes on as if it had not stopped."""
        settings = self.setup.recipe.checkpoint
        self.log.flush_pairs()
        # The checkpoint refers to the lines of this file.
        ranks.first_does_for_all(writing(self.run.metrics)(partial(sync, self.run.metrics)))
        content = checkpoint_content(
            self.state, self.resume_point, self.identity, keep=settings.keep, num_best=settings.keep_best
        )
        export = partial(self.export, console=Console(quiet=True)) if settings.export else None
        path = self.writer.write(content, export=export)
        self.saved = self.resume_point
        self.setup.console.print(f"  {'saving' if self.writer.in_background else 'saved'} {path}")

    def export(self, target: Path, console: Console) -> dict[str, Tensor]:
        """Writes the policy as a model, as `export_model` does."""
        totals, evaluation = self.log.totals(), self.state.evaluation
        return export_model(self.setup, self.loaded, target, console, totals=totals, evaluation=evaluation)

    def save_on_the_way_out(self) -> None:
        """Saves the state after the last complete step of an interrupted run; drops an unfinished step."""
        self.state.optimizer.zero_grad(set_to_none=True)
        self.log.report_nonfinite()
        if self.state.step == 0:
            self.setup.console.print("  nothing is trained yet, so there is nothing to save")
        elif self.saved is self.resume_point:
            self.setup.console.print(f"  step {self.state.step} is saved already")
        else:
            self.save()

    def save_what_is_done(
        self, error: Exception, *, shared: type[Exception], warns_of: type[Exception] = Exception
    ) -> None:
        """Saves the last complete step after an error, unless other parameters have replaced its own, or the
        error may be of this rank alone: neither is it `shared`, nor does `first_goes_first` say so. If this
        fails, it warns; an error that is not one of `warns_of` is raised."""
        is_on_all = isinstance(error, shared) or hasattr(error, "on_all_ranks") or ranks.num_ranks() == 1
        if self.state.step != self.resume_point.step or not is_on_all:
            return
        try:
            self.save_on_the_way_out()
        except warns_of as refused:  # the user must see the error that ends the run, not this one
            self.setup.console.print(f"  Warning: the last step is not saved: {first_line(refused)}")

    def save_last(self) -> None:
        """Saves the last step, if the disk has room: if not, it may have room for the model."""
        try:
            self.writer.wait()
        except CacheError:  # the last step may be what was written in the background
            self.saved = None
        self.writer.in_background = False
        if self.saved is not self.resume_point:
            # The run goes on. If this rank alone failed, the others would wait for it in another collective.
            warns_of = CacheError if ranks.num_ranks() > 1 else Exception
            self.save_what_is_done(CacheError(""), shared=CacheError, warns_of=warns_of)

    @property
    def _keeps_last(self) -> bool:
        """Whether the recipe keeps the last step, whose weights are in the model, when that is verified."""
        settings = self.setup.recipe.checkpoint
        is_best = self.state.step in self.state.standing.best_steps[: settings.keep_best]
        return self.saved is not self.resume_point or settings.every_steps is not None or is_best

    def drop_last(self) -> None:
        """Removes the last step, whose weights are in the verified model, unless the recipe keeps it."""
        if not self._keeps_last:
            with contextlib.suppress(OSError):  # the run is finished
                drop_later_checkpoints(self.run.checkpoints, self.state.step - 1)

    def best_evaluation(self) -> dict[str, Any] | None:
        """Returns run.json's entry on the best evaluation, if any. `checkpoint`: None if none is kept."""
        standing = self.state.standing
        if self.criterion is None or not standing.best:
            return None
        step, value = standing.best[0]
        path = checkpoint_path(self.run.checkpoints, step)
        stays = path.is_dir() and (step < self.state.step or self._keeps_last)
        return {
            "step": step,
            "metric": self.criterion.metric,
            "eval_set": self.criterion.eval_set,
            "value": value,
            "start": standing.start,
            "checkpoint": str(path) if stays else None,
        }

    def require_best(self) -> None:
        """Raises RunError if `load_exported` would find nothing."""
        remedy = "with checkpoint.load_best=false the same command exports the last weights"
        standing = self.state.standing
        if not standing.best:
            raise RunError(f"checkpoint.load_best: no evaluation gave a finite metric; {remedy}")
        path = checkpoint_path(self.run.checkpoints, standing.best_steps[0])
        damage = damage_of(path)
        if damage is not None:
            raise RunError(f"checkpoint.load_best: {path} is damaged: {damage}; {remedy}")

    def load_exported(self) -> int:
        """Returns the step whose weights the run leaves. With `checkpoint.load_best` it loads the weights of
        the best evaluation into the policy; `require_best` has checked their files."""
        if not self.setup.recipe.checkpoint.load_best:
            return self.state.step
        step = self.state.standing.best_steps[0]
        if step < self.state.step:
            self.resume_point = replace(self.resume_point, step=step)  # that whose parameters the policy has
        self.state.evaluation = load_trained(checkpoint_path(self.run.checkpoints, step), self.state.scorer)
        return step


# ------------------------------------------------------------------------------------ what a checkpoint holds


def checkpoint_content(
    state: TrainState, point: ResumePoint, identity: Identity, *, keep: int, num_best: int
) -> CheckpointContent:
    """Returns the content to write for `state` at `point`: the state's tensors, and copies of the rest."""
    optimizer = state.optimizer
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    moments: Any = {}
    if optimizer.state:  # if it is empty, torch would call optimizer.step() to fill it
        moments = get_optimizer_state_dict(state.scorer, optimizer)["state"]
    counters = Counters(
        **{name: getattr(state, name) for name in _COUNTERS},
        metrics_offset=point.metrics_offset,
        metrics_crc32=point.metrics_crc32,
        identity=identity.fingerprints,
        versions=identity.versions,
        ranks=identity.ranks,
        judged_by=identity.judged_by,
    )
    return CheckpointContent(
        step=state.step,
        tensors={**_weights(state), "optimizer": moments},
        host=copy.deepcopy(
            {"optimizer_groups": groups, "scheduler": state.scheduler.state_dict(), "source": point.source}
        ),
        counters=asdict(counters),  # copies
        keep=keep,
        keep_steps=state.standing.best_steps[:num_best],
    )


def load_checkpoint(path: Path, state: TrainState, *, identity: Identity) -> tuple[int, list[str]]:
    """Loads a checkpoint, whose files are checked, into a new `state`. Returns the length of metrics.jsonl
    then, and messages about changes since then that are allowed. Raises RunError if it is of another run or
    other parameters. Every rank must call it."""
    counters, optimizer = saved_counters(path), state.optimizer
    ways_out = "use another output_dir, or start again with checkpoint.resume=never and --overwrite"
    _refuse_another(path, counters.identity, identity.fingerprints, ways_out)
    kept = torch.load(path / HOST_STATE, map_location="cpu", weights_only=True)
    # torch makes tensors to load into, with the right device and shards, by a step that changes nothing, but
    # only if no parameter has a gradient. DDP's have one from the start: views of its buffers.
    gradients = [(parameter, parameter.grad) for parameter in state.scorer.parameters()]
    optimizer.zero_grad(set_to_none=True)
    new: dict[str, Any] = get_optimizer_state_dict(state.scorer, optimizer)
    for parameter, gradient in gradients:
        parameter.grad = gradient
    # A parameter that never had a gradient has no moments in the checkpoint.
    stored = TensorReader(path).metadata.planner_data.values()
    saved = {name[0] for part, *name in stored if part == "optimizer"}
    moments = {name: moment for name, moment in new["state"].items() if name in saved}
    load_tensors(path, {**_weights(state), "optimizer": moments})
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(state.scorer, optimizer, {**new, "state": moments}, options=options)
    for group, settings in zip(optimizer.param_groups, kept["optimizer_groups"], strict=True):
        group.update(settings)
    state.scheduler.load_state_dict(kept["scheduler"])
    state.source.load_state_dict(kept["source"])
    for name in _COUNTERS:
        setattr(state, name, getattr(counters, name))
    notes = []
    if counters.judged_by != identity.judged_by:
        state.standing = Evaluations()
        if counters.standing.best:
            notes.append(
                "Note: earlier evaluations were compared by another metric, held-out set or precision, so "
                "only later ones can be the best of the run"
            )
    now, then = ({_ROWS: "4", **one.versions, "ranks:": one.ranks} for one in (identity, counters))
    with contextlib.suppress(RecipeError):  # before `auto`, only the run's recipe had the budget, a number
        packing = load_recipe(path.parents[1] / RECIPE_FILE, lenient=True).packing
        if packing.token_budget != "auto":
            then.setdefault(_BUDGET, f"{packing.token_budget:,}")
    changed = [
        f"{name} {was} then, {now.get(name)} now" for name, was in then.items() if was != now.get(name)
    ]
    if changed:
        notes.append(f"Warning: changes that may change the last bits of results: {'; '.join(changed)}")
    return counters.metrics_offset, notes


def load_trained(path: Path, scorer: nn.Module) -> dict[str, Any]:
    """Loads a checkpoint's weights into `scorer`; returns its latest evaluation. Every rank must call it."""
    load_tensors(path, {"policy": _trained_parameters(scorer)})
    return saved_counters(path).evaluation


def _weights(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Returns the parameters that change in training: of the policy, and of a reference that follows it."""
    reference = () if state.reference is None else state.reference.named_parameters()
    return {
        "policy": _trained_parameters(state.scorer),
        "reference": {name: parameter.detach() for name, parameter in reference},
    }


def _trained_parameters(scorer: nn.Module) -> dict[str, Tensor]:
    """Returns the trained parameters by name, tied weights once. (get_model_state_dict has them twice.)"""
    return {name: p.detach() for name, p in scorer.named_parameters() if p.requires_grad}


# --------------------------------------------------------------------------------- the model of a stopped run


@contextlib.contextmanager
def model_of(name: str, console: Console) -> Iterator[str]:
    """Yields the directory of a run's model; a name that is no run's as it is. Of a run that was stopped, it
    exports its newest checkpoint. Every rank must call it. Raises RunError without a checkpoint, or if the
    run is still training."""
    run = Path(name)
    info = read_json(run / INFO_FILE)
    if info is None:
        yield name
        return
    status, found = info.get("status", "finished"), ranks.first_says(checkpoints(run / PARTS["checkpoints"]))
    if (run / MODEL).is_dir() and (status == "finished" or not found):  # else it is of an earlier end
        yield str(run / MODEL)
        return
    while found and damage_of(found[-1]) is not None:
        found.pop()
    if not found:
        raise RunError(
            f"{run}: this run ({status}) has neither a model nor a checkpoint; mend what stopped it, then "
            f"'dpopack train {run}' starts it again"
        )
    target, how = found[-1] / MODEL, "exported before"
    with contextlib.ExitStack() as stack:
        if not target.is_dir():
            stack.enter_context(only_run(run, f"{run} has no finished model: it"))
            with shown(console, f"Exporting {found[-1]}"):
                how = _export_checkpoint(run, found[-1], target, console)
        console.print(
            f"The run in {run} is not finished ({status}); its model is of {found[-1].name}: {target} ({how})"
        )
        yield str(target)


def _export_checkpoint(run: Path, checkpoint: Path, target: Path, console: Console) -> str:
    """Writes the checkpoint's model, whole or not at all; returns how it was verified."""
    overrides = ["distributed.num_processes=auto", "logging.trackers=[]"]
    recipe = load_recipe(run, overrides, lenient=True)
    check_environment(recipe, trains=False)
    setup = prepare(recipe, make_console(quiet=True), takes_prompts=True)
    counters, loaded, facts = saved_counters(checkpoint), load_proved(setup), setup.policy_facts
    now = _start_fingerprints(facts, loaded)
    then = {name: counters.identity.get(name, "") for name in now}
    _refuse_another(checkpoint, then, now, f"put {facts.settings.path} back as it was when the run began")
    totals = {
        "steps": counters.step,
        "pairs": counters.num_pairs,
        "tokens": counters.num_tokens,
        "train_seconds": counters.train_seconds,
    }
    evaluation = load_trained(checkpoint, loaded.scorer)
    temporary, how = ranks.first_says(path_aside(target)), "export.verify: none"
    try:
        saved = export_model(setup, loaded, temporary, console, totals=totals, evaluation=evaluation)
        if recipe.export.verify != "none":
            job = prepare_verification(setup, loaded, temporary, saved)
            _, how = ranks.first_does_for_all(partial(verify, job))
        ranks.first_does_for_all(writing(target)(partial(put_in_place, temporary, target)))
    finally:
        ranks.only_first_does(partial(discard, temporary))
    return how
