"""DPO training, one run from top to bottom. Read this file first.

    train -> find_run               finds an earlier run in `output_dir`, which goes on
          -> prepare_run            data, plan, model, proof, reference, checkpoint (run/inputs.py)
          -> write_first_files      what describes the run
          -> run_steps -> take_steps -> train_step                computes the gradient, clips it, updates
                                         -> accumulate_gradients  one forward and one backward for each row
                                     -> close_step                evaluates and saves, if these are due
          -> finish                 exports the model; the last step has a checkpoint by now
          -> verify_model           compares its files with what was trained (run/export.py)
          -> push_model             uploads it, if the recipe says so

The pairs come from data, and a plan says which are in which step (*offline*), or they are answers that the
policy generates and judges compare (*online*, online/phases.py). The proof shows, on made-up pairs, that rows
with several sequences give the log-probs of each sequence alone on this model and machine (proofs/).

A step trains on one global batch of `packing.pairs_per_step` preference pairs; the last one of an epoch may
have fewer. They are packed into rows of up to `packing.token_budget` tokens, which the ranks divide among
them. Unless `packing.mode` is padded, a row has no padding: its sequences lie one behind the other, and each
token has the number of its sequence, its *segment*. transformers calls our attention in place of its own
(model/attention/), which lets a token see earlier tokens of its own segment only, and of what segments share:
a pair's prompt, the beginning of several pairs. The loss is the exact mean over the step's pairs, for any
number of rows and ranks:

    loss = sum over the step's pairs of weight * l(pair) / number of pairs

The weight of a pair is that of its row of data, times that of `loss.weighting`. The policy of a mixture of
experts adds its load-balancing loss behind `train_step`'s back (`ExpertBalance`, training/step_loss.py).

For DPO (`loss.type: sigmoid`, losses/preference.py), pi and ref are the summed log-probs of a completion:

    l(pair) = -log sigmoid(beta * ((pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)))

`pair_losses` computes weight * l(pair) by the `objective`, which is the recipe's loss. The `scorer` computes
the log-probs of a row with the weights of the model. The `policy` is the scorer as all ranks run it together
(DDP, FSDP2): forward passes that need gradients call it. The reference's log-probs are cached or computed
before the first step and come with the batch. Or a reference model computes them in each step: that of an
online run, or one that follows the policy (TR-DPO). Some losses have no reference.

Ranks may have different numbers of rows. With shards (fsdp2) each pass needs all ranks, because each holds a
part of the weights. So a rank that has no row left computes *idle rows*, whose gradient is zero, while others
still have rows.

A run can resume after any step that has a checkpoint: `prepare_run` takes the newest undamaged one and fills
the state from it, and what an earlier process wrote after it is removed before the first step. A stop signal
(Ctrl-C, SIGTERM) acts at once while a run is prepared. From the first step on it acts at the next `poll`,
which all ranks reach together, or at once where nothing can be lost (`ending_at_once`). A second one acts at
once everywhere (`is_urgent`), and nothing is saved. The checkpoint of the last step is kept until the model
is verified: after an error in `finish` the same command goes on from it and trains nothing again.

Legend: P pairs of a row; [P] a number of each. `setup`: the recipe, data and facts of models, no weights.
`inputs`: that and what is loaded. `state`: what changes while the run trains, as in a checkpoint; its
`standing` is the evaluations so far, by which the `criterion` stops early. *Resume point*: the state and the
ends of the run's files, to which a checkpoint of now would go back. `frozen`: the run's own copy of cached
reference log-probs. `planned`: the plan of an offline run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import Tensor

from dpo_pack.recipe.load import INFO_FILE, RECIPE_FILE, Recipe, check_environment, dump_recipe, load_recipe
from dpo_pack.recipe.verdict import VerdictRecipe
from dpo_pack.reports.packing import packing_report
from dpo_pack.reports.pages import write_run_page
from dpo_pack.reports.run_files import print_ending, print_next
from dpo_pack.run.checkpoint import Saver
from dpo_pack.run.checkpoint_files import CheckpointWriter, drop_later_checkpoints
from dpo_pack.run.evaluate import conclusions, evaluate_run
from dpo_pack.run.export import prepare_verification, verify_model
from dpo_pack.run.inputs import Inputs, prepare_run
from dpo_pack.run.run_dir import ITS_START, RunDir, begin_run, find_run, input_fingerprints, only_run, way_on
from dpo_pack.run.samples import Sampler
from dpo_pack.run.state import ends_run
from dpo_pack.system import ranks
from dpo_pack.system.console import format_rate, format_seconds, keep_log, shown
from dpo_pack.system.endings import VERDICT_STATUSES
from dpo_pack.system.errors import CacheError, DpoPackError, RunError, first_line
from dpo_pack.system.files import Json, read_json, write_json_atomically, write_text_atomically
from dpo_pack.system.hub import push_command, upload_model, why_no_upload
from dpo_pack.system.interrupts import Interrupted, Interruption, interruptible
from dpo_pack.system.machine import release_memory
from dpo_pack.system.process import BEGUN, counted, environment_alone, placement
from dpo_pack.training.batches import GlobalBatch
from dpo_pack.training.metrics import averages, column, join_values, pair_values
from dpo_pack.training.optim import clip_gradients
from dpo_pack.training.step_loss import ExpertBalance, pair_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The results of one step. The tensors are still on the device."""

    values: Tensor  # the `pair_values` of this rank's pairs
    grad_norm: Tensor  # [] norm of the gradient before clipping
    learning_rate: float


AfterStep = Callable[["Trainer"], object]  # called after each update, before the step's line is written


def train(
    recipe: Recipe, console: Console, *, overwrite: bool = False, after_step: AfterStep | None = None
) -> None:
    """Trains the recipe's policy and writes it to `output_dir`/model; resumes an earlier run if there is one.
    Raises a DpoPackError for an error that the user can correct, Interrupted after Ctrl-C or SIGTERM."""
    begun = time.time()
    check_environment(recipe)
    with only_run(recipe.output_dir), interruptible() as interruption:
        run = ranks.first_does_for_all(lambda: find_run(recipe, overwrite=overwrite))
        if run.is_finished:
            console.print(f"This run is finished and {run.model} holds its model; nothing to do")
            console.print(f"  {way_on(recipe)}")
            run.remove_leftovers()
            if not run.page.exists():  # the process was killed before it wrote the page
                write_page(run, console)
            return
        if recipe.export.push_to_hub is not None and (obstacle := why_no_upload()) is not None:
            console.print(f"Warning: export.push_to_hub: {obstacle}. The run trains all the same")
        trainer = Trainer(prepare_run(recipe, run, console), run, interruption)
        ranks.first_does_for_all(trainer.write_first_files)
        try:
            trainer.run_steps(after_step)
            with interruption.waiting_for_poll():  # a signal waits until the model is written
                job = trainer.finish()
        except BaseException as error:
            status = "interrupted" if isinstance(error, Interrupted) else "failed"
            with contextlib.suppress(Exception):  # the user must see the error that ended the run
                if run.info.get("status") != "finished":  # else only the terminal or the page failed
                    run.update(status=status)
                    run.update(totals=trainer.log.totals())
            raise
        # The run is finished and stays so, whatever follows. A model that is not what was trained ends the
        # command before the upload. The ranks that do not verify wait in `push_model`, or end.
        if ranks.is_first() and (job is None or verify_model(run, console, job)):
            trainer.saver.drop_last()
        seconds = format_seconds(time.time() - float(os.environ.get(BEGUN, begun)))
        console.print(f"{seconds} in all" + ", before the upload" * (recipe.export.push_to_hub is not None))
        print_next(run.root, trainer.state.evaluation, console, has_images=recipe.model.images)
        if (target := recipe.export.push_to_hub) is not None:
            push_model(run, console, interruption, repo=target.repo, private=target.private)


class Trainer:
    """One rank's part of a run, from its next step to its end."""

    def __init__(self, inputs: Inputs, run: RunDir, interruption: Interruption) -> None:
        setup = inputs.setup
        self.inputs, self.setup, self.recipe = inputs, setup, setup.recipe
        self.console, self.objective = setup.console, setup.objective
        self.run = run  # the files of `output_dir`; only rank 0 writes them
        self.interruption = interruption
        self.state = inputs.state  # weights, optimizer, schedule, counters: all that a checkpoint holds
        self.source = self.state.source  # of global batches
        self.policy, self.reference = inputs.policy, inputs.reference
        self.balance: ExpertBalance | None = None
        if (balance := setup.policy_facts.balance) is not None:  # a mixture of experts
            self.balance = ExpertBalance(settings=balance, scorer=self.state.scorer, alone=inputs.policy)
            self.policy = self.balance.policy
        self.log, self.clock = inputs.log, inputs.log.clock  # the clock measures the phases of a step
        self.sampler = Sampler(setup, self.state.scorer, run.samples)
        in_background = self.recipe.checkpoint.asynchronous
        self.saver = Saver(
            setup=setup,
            run=run,
            state=self.state,
            loaded=inputs.loaded,
            identity=inputs.identity,
            criterion=inputs.criterion,
            log=self.log,
            writer=CheckpointWriter(directory=run.checkpoints, in_background=in_background),
        )

    def write_first_files(self) -> None:
        """Writes what describes the run, and cuts off what came after its checkpoint; on rank 0."""
        run, setup, inputs = self.run, self.setup, self.inputs
        fingerprints = dict(inputs.identity.fingerprints)
        begin_run(run, dump_recipe(setup.recipe), str(setup.device), setup.recipe.export.path)
        keep_log(self.console, run.console_log)
        write_json_atomically(run.data_report, setup.data.report)
        if inputs.planned is not None:
            fingerprints["packing"] = inputs.planned.first_plan.fingerprint
        if inputs.frozen is not None:
            inputs.frozen.save(run.reference)
        run.update(fingerprints=fingerprints, inputs=input_fingerprints(setup.recipe))
        if run.checkpoint is not None:  # else nothing is left of an earlier process
            drop_later_checkpoints(run.checkpoints, self.state.step)
            self.sampler.cut_after(self.state.step)
            if self.log.pairs is not None:
                self.log.pairs.cut_after(self.state.step)

    # --------------------------------------------------------------------------------------------- the steps

    def run_steps(self, after_step: AfterStep | None = None) -> None:
        """Takes all steps. After a stop signal or an error it saves the last complete step, if it can."""
        if ranks.num_ranks() > 1:
            ranks.require_shared(self.run.root, "output_dir")  # every node must see the first files
        if self.recipe.logging.trackers:
            self.log.begin_tracking()
        self.log.startup_seconds = time.monotonic() - self.log.begun - self.log.reference_seconds
        with self.log.writing(), self.interruption.waiting_for_poll(), self.saver.writer:
            self.saver.begin()
            try:
                if self.state.owes_evaluation:  # before step 1, or not done when the run was stopped
                    self.close_step()
                self.take_steps(after_step)
                self.saver.save_last()
                if self.recipe.checkpoint.load_best:
                    self.saver.require_best()
            except Interrupted as stopped:
                if not stopped.is_urgent:
                    self.saver.save_on_the_way_out()
                    stopped.next_step += f"; it goes on after step {self.state.step}"
                raise
            except Exception as error:
                # RunErrors are on all ranks: the loss is not finite, or a judge does not answer any more.
                self.saver.save_what_is_done(error, shared=RunError)
                raise

    def take_steps(self, after_step: AfterStep | None) -> None:
        """Runs the training loop until no step is left or early stopping ends the run."""
        state, log = self.state, self.log
        eval_every_steps = self.recipe.train.eval_every_steps or self.source.num_steps
        batches = iter(self.source)
        self.clock.restart()
        while not ends_run(self.inputs.criterion, state.standing):
            self.interruption.poll()
            with self.interruption.ending_at_once():  # no step has begun, so a signal ends the run at once
                batch = next(batches, None)
            ranks.seed_step(self.recipe.seed, step=state.step, rank=ranks.rank())
            self.clock.lap("data")
            if batch is None:
                break
            is_logged = state.step == 0 or (state.step + 1) % self.recipe.logging.every_steps == 0
            with state.scorer.measuring(is_logged):
                outcome = self.train_step(batch)
            if after_step is not None:
                after_step(self)
            self.source.prepare_next()  # makes the next batch while the device computes
            self.clock.lap("data")
            is_last = state.step == self.source.num_steps
            # The evaluation resets `owes_evaluation`. If a signal comes first, a resumed run evaluates.
            state.owes_evaluation = is_last or state.step % eval_every_steps == 0
            if is_logged or state.owes_evaluation or self.saver.is_due:  # these wait for the device
                log.report_nonfinite()  # raises RunError if the recipe stops at such a step
            # `step_record` comes first: it waits for the device, and `end_step` must count that waiting time.
            record = self.step_record(batch, outcome) if is_logged else None
            log.end_step(batch, outcome.values)
            if record is not None:
                log.write_step(record)
            self.saver.mark_resume_point()
            self.close_step()
            self.clock.restart()

    def close_step(self) -> None:
        """Evaluates and saves a checkpoint, if these are due after this step (or before the first step)."""
        if self.state.owes_evaluation:
            evaluate_run(self.inputs, self.sampler, self.interruption)
            self.saver.mark_resume_point()  # again, because the evaluation has written lines to metrics.jsonl
        if self.saver.is_due:
            self.saver.save()

    def train_step(self, batch: GlobalBatch) -> StepOutcome:
        """Computes and clips the gradient of the global batch, then updates the model if all is finite. A
        step with a value that is not finite changes no parameter, but counts as a step. With a fused AdamW
        this only queues work. If it waited for the device, the device would become idle."""
        state, optimizer = self.state, self.state.optimizer
        with self.policy.step(batch.passes):  # a mixture first counts the tokens of the step's experts
            batch = self.reference.score_batch(batch)
            values = self.accumulate_gradients(batch)
        grad_norm = clip_gradients(state.scorer, self.recipe.optim.max_grad_norm)
        learning_rate = float(state.scheduler.get_last_lr()[0])
        losses = column(values, "loss")
        self.log.guard.skip_if_nonfinite(
            optimizer, losses, grad_norm, step=state.step + 1, pairs=batch.pair_indices
        )
        # First, so that after an error in the update nothing is saved: the step is not that of the last
        # resume point, and some parameters may have changed.
        state.step += 1
        optimizer.step()
        state.scheduler.step()
        optimizer.zero_grad(set_to_none=not self.policy.keeps_gradients)
        self.clock.lap("optimizer")
        self.reference.follow(state.scorer, step=state.step)
        state.num_pairs += batch.num_pairs
        state.num_tokens += batch.num_tokens
        return StepOutcome(values=values, grad_norm=grad_norm, learning_rate=learning_rate)

    def accumulate_gradients(self, batch: GlobalBatch) -> Tensor:
        """Runs one forward and one backward pass for each row, which add the step's gradient to `.grad`.
        Copies (DDP) exchange gradients in the last pass only, shards (FSDP2) in each, unless
        `distributed.accumulate_unsharded` is set. Returns the values of this rank's pairs, of which metrics
        are averages (training/metrics.py)."""
        values: list[Tensor] = []
        passes = batch.passes
        for number, tokens in enumerate(passes, start=1):
            # A poll needs all ranks, and all have these passes. Before a later one, other ranks can be in a
            # backward pass already, and a poll would wait for them forever.
            if number <= batch.common_passes:
                self.interruption.poll(at_once=False)
            with self.policy.accumulating(is_last=number == len(passes)):
                if number > len(batch.rows):
                    self.policy.idle(tokens)
                    self.clock.lap("backward")
                    continue
                row = batch.rows[number - 1]
                output = self.policy.forward(tokens)  # log-probs summed over each completion
                losses = pair_losses(self.objective, output, row, batch.mean_chosen_tokens)  # [P]
                # R ranks average their gradients, so each divides the sum of its losses by num_pairs / R.
                share = losses.sum() / (batch.num_pairs / ranks.num_ranks())
                self.clock.lap("forward")
                share.backward()
                self.clock.lap("backward")
            values.append(pair_values(output, row, losses))
        return join_values(values, self.setup.device)

    def step_record(self, batch: GlobalBatch, outcome: StepOutcome) -> Json:
        """Returns the step's line of metrics.jsonl without rates. Waits for the device."""
        means = averages(
            ranks.gather_over_ranks(outcome.values),
            beta=self.objective.options.beta,
            has_reference=self.objective.needs_reference,
        )
        return {
            "split": "train",
            "step": self.state.step,
            "epoch": batch.epoch,
            **means,
            **({} if self.balance is None else self.balance.metrics(means["loss"])),
            "grad_norm": float(outcome.grad_norm),
            "learning_rate": outcome.learning_rate,
            "pairs": batch.num_pairs,
            "rows": len(batch.row_pairs),
            "tokens": batch.num_tokens,
            **batch.metrics,
            **self.clock.seconds(),
        }

    # --------------------------------------------------------------------------------------- after the steps

    def finish(self) -> Json | None:
        """Exports the model, updates run.json, writes the page, and prints totals and what was learned. After
        an error it saves the last step, if it can. Returns what `verify_model` needs, or None."""
        run, state, saver = self.run, self.state, self.saver
        for sentence in conclusions(state, self.inputs.criterion, self.recipe.optim):
            self.console.print(sentence)
        try:
            saved = self.write_results()
        except Exception as error:  # the same command goes on after the last step
            saver.save_what_is_done(error, shared=DpoPackError)
            if isinstance(error, CacheError) and saver.saved is saver.resume_point:
                raise CacheError(f"{error}; the same command trains nothing again") from error
            raise
        rate = format_rate(state.num_pairs / max(state.train_seconds, 1e-9))
        page = f"; report: {run.page}" if write_page(run, self.console) else ""
        self.console.print(
            f"Done: {counted(state.step, 'step')}, {counted(state.num_pairs, 'pair')} in "
            f"{format_seconds(state.train_seconds)} ({rate} pairs/s). Model: {run.model}; metrics: "
            f"{run.metrics}{page}"
        )
        print_ending(run.root, state.evaluation, state.health.warnings, self.console)
        if self.recipe.export.verify == "none":
            return None
        state.optimizer.zero_grad(set_to_none=True)  # the process that reads the model back needs memory
        state.optimizer.state.clear()
        return prepare_verification(self.setup, self.inputs.loaded, run.model, saved)

    def write_results(self) -> dict[str, Tensor]:
        """Writes samples, model and facts of a finished run. Rank 0 gets the tensors in the model's files."""
        run, state, log, saver = self.run, self.state, self.log, self.saver
        best, criterion, verify = saver.best_evaluation(), self.inputs.criterion, self.recipe.export.verify
        self.sampler.write(saver.load_exported(), at_end=True)
        with shown(self.console, "Writing the model"):
            target = ranks.first_does_for_all(lambda: run.place_model(self.recipe.export.path))
            try:
                saved = saver.export(target, self.console)
            except CacheError as error:
                raise CacheError(f"{error} (export.path=DIR)") from error
        ranks.every_rank_does(log.close)
        if (planned := self.inputs.planned) is not None:
            data, shape, model = self.setup.data, self.setup.policy_facts.shape, self.recipe.model.path
            ranks.first_does_for_all(
                lambda: write_json_atomically(
                    run.packing_report, packing_report(planned, data, shape, model=model)
                )
            )
        facts: Json = {
            "status": "finished",
            "totals": log.totals(),
            "evaluation": state.evaluation,
            "model_files": run.model_files(),
            **({} if best is None else {"best": best, "stopped_early": ends_run(criterion, state.standing)}),
            "warnings": list(state.health.warned),
            "verified": False,
            "not_verified": "export.verify: none"
            if verify == "none"
            else "the process ended before its files were compared",
        }
        ranks.every_rank_does(lambda: run.update(**facts))
        return saved


def write_page(run: RunDir, console: Console) -> bool:
    """Writes the page of the finished run, on rank 0. Returns whether it did: an error is only a warning."""
    if not ranks.is_first():
        return False
    try:
        write_run_page([run.root], run.page)
    except Exception as error:
        console.print(
            f"Warning: the run has no page ({first_line(error)}); 'dpopack report {run.root}' writes one"
        )
        return False
    return True


def begin_verdict(root: Path, section: VerdictRecipe, console: Console) -> None:
    """Gives the finished run in `root` a verdict, in another process, if it has none by this section. The
    run's ending does not depend on it."""
    written = load_recipe(root, lenient=True)
    if written.verdict != section:  # which may be new; the other process reads recipe.yaml
        text = dump_recipe(written.model_copy(update={"verdict": section}))
        write_text_atomically(root / RECIPE_FILE, text)
    elif ITS_START in (read_json(root / INFO_FILE) or {}).get("verdict", {}):
        return
    release_memory()
    alone = environment_alone()
    if (place := placement(os.environ)) is not None and place.num_ranks > 1:
        alone.pop("OMP_NUM_THREADS", None)  # a rank's part of the cores
    command = [sys.executable, "-P", "-m", "dpo_pack", "verdict", str(root), "--trust-recipe"]
    out = subprocess.DEVNULL if console.quiet else None
    ended = subprocess.run(command, env=alone, stdout=out, check=False)
    if ended.returncode not in VERDICT_STATUSES.values():
        console.print("Warning: the run is finished, but has no verdict; the same command tries again")


def push_model(
    run: RunDir, console: Console, interruption: Interruption, *, repo: str, private: bool
) -> None:
    """Uploads the finished run's model on rank 0; prints its URL, or the command that repeats it. Raises
    Interrupted, also for a signal that came while the model was written: the user does not want to wait."""
    again = push_command(run.root, repo, private=private)
    try:
        interruption.poll()
        if ranks.is_first():
            console.print(f"Uploading {run.model} to {repo}")
            for line in upload_model(run.model, run.page, repo, private=private)[1]:
                console.print(line)
    except RunError as error:
        reason = str(error).removeprefix("push: ")
        console.print(f"Warning: the model is not on the hub: {reason}. To repeat the upload: {again}")
    except Interrupted as stopped:
        stopped.next_step = f"the run is finished and its model is saved; to upload the model: {again}"
        raise
