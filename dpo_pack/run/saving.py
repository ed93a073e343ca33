"""Saves a run: its identity, the step from which it can resume (a "place"), checkpoints and the model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

import dpo_pack
from dpo_pack.model.fingerprint import relevant_config
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.recipe.load import Recipe
from dpo_pack.reference.cache import namespace_digest
from dpo_pack.reference.frozen import FrozenReference
from dpo_pack.run.checkpoint.directory import checkpoint_path
from dpo_pack.run.checkpoint.state import Identity, Place, TrainState, checkpoint_content, load_policy
from dpo_pack.run.checkpoint.writer import CheckpointWriter
from dpo_pack.run.export import export_model
from dpo_pack.run.prepare import Prepared
from dpo_pack.run.recording import Recorder
from dpo_pack.run.run_dir import RunDir, damage_of
from dpo_pack.run.samples import before_and_after
from dpo_pack.run.selection import Selection
from dpo_pack.system import ranks
from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.system.files import sync, writing
from dpo_pack.system.machine import package_versions
from dpo_pack.training.batches import BatchSource

# Another release of these packages may change the last bits of results.
_PACKAGES = ("torch", "transformers", "peft")


def is_multiple(step: int, every_steps: int | None) -> bool:
    """Returns whether `step` is a multiple of `every_steps`; False if `every_steps` is None."""
    return every_steps is not None and step % every_steps == 0


def run_identity(
    prepared: Prepared,
    policy: LoadedModel,
    source: BatchSource,
    selection: Selection | None,
    *,
    moves: bool,
    frozen: FrozenReference | None,
) -> Identity:
    """Returns what identifies a run in its checkpoints: hashes that must not change when the run resumes, and
    values that can. It is equal on all ranks.

    `moves`: the reference follows the policy. `frozen`: the reference's log-probs, if the run has them. The
    fingerprints include the held-out data only if the recipe uses early stopping.
    """
    recipe, train = prepared.recipe, prepared.data.train
    fingerprints = {
        "data": prepared.data.fingerprint,
        "plan": source.steps_fingerprint,
        "reference": "moving" if moves else "none" if frozen is None else frozen.only(train).fingerprint,
        # A checkpoint holds weights only. The model's config says what is computed with them.
        "model config": namespace_digest(relevant_config(prepared.policy_facts.config)),
    }
    words = {
        "data": f"{train.num_pairs:,} rows to train on",
        "plan": f"{source.num_steps:,} steps",
        "reference": recipe.reference.path or "the policy as it starts",
    }
    if recipe.train.early_stopping is not None:
        fingerprints["held-out data"] = prepared.data.eval_fingerprint
    if policy.adapter is not None:  # checkpoints of such a run hold the adapter alone
        fingerprints["base model"] = prepared.policy_facts.namespace["weights"]
        words["base model"] = prepared.policy_facts.path
    balance = prepared.policy_facts.balance
    if balance is not None:
        fingerprints["load-balancing loss"] = words["load-balancing loss"] = f"x {balance.coefficient:g}"
    versions = package_versions()
    number = ranks.num_ranks()
    return Identity(
        fingerprints=fingerprints,
        words=words,
        versions={
            "dpo-pack": dpo_pack.__version__,
            **{package: versions[package] for package in _PACKAGES if package in versions},
        },
        ranks="one process" if number == 1 else f"{number} processes ({prepared.strategy.name})",
        judged_by=""
        if selection is None
        else f"{selection.metric} of {selection.eval_set}, {prepared.data.eval_fingerprint}",
    )


@dataclass(slots=True, kw_only=True)
class Saver:
    """Remembers the latest step from which the run can resume, and writes checkpoints of that step."""

    recipe: Recipe
    run: RunDir
    state: TrainState
    policy: LoadedModel  # for exports; `state.policy` is the scorer of this model
    tokenizer: PreTrainedTokenizerBase
    identity: Identity
    selection: Selection | None
    recorder: Recorder
    writer: CheckpointWriter
    place: Place = field(init=False)  # `mark_place` sets it
    saved: Place | None = None  # the place that the newest checkpoint holds

    def mark_place(self) -> None:
        """Makes the present step the place. When a checkpoint of it is written, the run can resume there."""
        offset, crc32 = self.recorder.written
        self.place = Place(
            step=self.state.step,
            metrics_offset=offset,
            metrics_crc32=crc32,
            source=self.state.source.state_dict(),
        )

    def begin(self) -> None:
        """Marks the place where this process begins to train: step 0, or the checkpoint that it resumes."""
        self.mark_place()
        if self.run.has_own_checkpoint:
            self.saved = self.place
        if self.run.checkpoint is not None:
            self._forget_lost_bests()

    @property
    def is_multiple(self) -> bool:
        """Whether the step is a multiple of `checkpoint.every_steps`."""
        return is_multiple(self.state.step, self.recipe.checkpoint.every_steps)

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due: by `checkpoint.every_steps`, or because the evaluation after this step
        is among the best (`checkpoint.keep_best`)."""
        best_steps = self.state.standing.best_steps[: self.recipe.checkpoint.keep_best]
        return self.state.step > 0 and (self.is_multiple or self.state.step in best_steps)

    def save(self) -> None:
        """Writes a checkpoint of the full state. A run resumed from it goes on as if it had not stopped."""
        settings = self.recipe.checkpoint
        self.recorder.flush_pairs()
        if ranks.is_first():
            with writing(self.run.metrics):
                sync(self.run.metrics)  # the checkpoint refers to the lines of this file
        content = checkpoint_content(
            self.state, self.place, self.identity, keep=settings.keep, num_best=settings.keep_best
        )
        path = self.writer.write(content, export=self.export if settings.export else None)
        self.saved = self.place
        self.recorder.console.print(f"  {'saving' if self.writer.is_busy else 'saved'} {path}")

    def export(self, target: Path) -> None:
        """Writes the policy as a model that transformers, PEFT or vLLM can load."""
        export_model(
            self.policy,
            self.tokenizer,
            target,
            recipe=self.recipe,
            totals=self.recorder.totals(self.state),
            evaluation=self.state.evaluation,
            samples=before_and_after(self.run.samples) if ranks.is_first() else (),
        )

    def save_on_the_way_out(self) -> None:
        """Saves the state after the last complete step of an interrupted run; drops an unfinished step."""
        console = self.recorder.console
        self.state.optimizer.zero_grad(set_to_none=True)
        self.recorder.report_nonfinite()
        if self.state.step == 0:
            console.print("  nothing is trained yet, so there is nothing to save")
        elif self.saved is self.place:
            console.print(f"  step {self.state.step} is saved already")
        else:
            self.save()

    def save_what_is_done(self) -> None:
        """Saves the last complete step after an error, unless a later step has changed the parameters."""
        if self.state.step != self.place.step:
            return
        try:
            self.save_on_the_way_out()
        except CacheError as refused:  # the user must see the error that ends the run, not this one
            self.recorder.console.print(f"  Warning: {refused}")

    def best_evaluation(self) -> dict[str, Any] | None:
        """Returns for run.json the step with the best evaluation, or None without evaluations. Its
        `checkpoint` is None if no checkpoint of this step is kept."""
        standing = self.state.standing
        if self.selection is None or not standing.best:
            return None
        step, value = standing.best[0]
        path = checkpoint_path(self.run.checkpoints, step)
        return {
            "step": step,
            "metric": self.selection.metric,
            "eval_set": self.selection.eval_set,
            "value": value,
            "start": standing.start,
            "checkpoint": str(path) if path.is_dir() else None,
        }

    def require_best(self) -> None:
        """Raises RunError if `load_best` would find no weights. Every rank must call it.

        It is called before the run ends, so that the caller can still save the last step.
        """
        remedy = "with checkpoint.load_best=false the same command exports the last weights"
        standing = self.state.standing
        if not standing.best:
            raise RunError(f"checkpoint.load_best: no evaluation gave a finite metric; {remedy}")
        path = checkpoint_path(self.run.checkpoints, standing.best_steps[0])
        self.writer.wait()  # the writer may still be writing this checkpoint
        damage = damage_of(path)
        if damage is not None:
            raise RunError(f"checkpoint.load_best: {path} is damaged: {damage}; {remedy}")

    @property
    def exported_step(self) -> int:
        """The step whose weights the run leaves."""
        return self.state.standing.best_steps[0] if self.recipe.checkpoint.load_best else self.state.step

    def load_best(self) -> None:
        """Loads the best evaluation's weights into the policy. `require_best` has checked their files."""
        path = checkpoint_path(self.run.checkpoints, self.exported_step)
        self.state.evaluation = load_policy(path, self.state.policy)

    def _forget_lost_bests(self) -> None:
        """Removes from the list of best evaluations those without a checkpoint in this run's directory.

        Their checkpoint is in another directory, was never written, or was removed for a better one.
        """
        standing = self.state.standing
        kept = ranks.first_says(
            tuple(
                (step, value)
                for step, value in standing.best
                if checkpoint_path(self.run.checkpoints, step).is_dir()
            )
        )
        if self.recipe.checkpoint.keep_best > 0 and kept != standing.best:
            lost = ", ".join(str(step) for step in standing.best_steps if step not in dict(kept))
            self.recorder.console.print(
                f"Note: the best evaluations were after step {lost}, but {self.run.checkpoints} has none "
                "of their checkpoints; from now on, those of the best later evaluations are kept"
            )
            self.state.standing = replace(standing, best=kept)
