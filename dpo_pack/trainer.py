"""DPO training, one run from top to bottom. Read this file first.

    train -> Trainer(...)           gets the run ready: data, plan, model, proof, reference, optimizer, resume
          -> run_steps -> take_steps -> train_step                computes the gradient, clips it, updates
                                         -> accumulate_gradients  one forward and one backward for each row
                                     -> close_step                evaluates and saves, if these are due
          -> finish                 exports the model
          -> push_model             uploads it, if the recipe says so

A step trains on one global batch: a fixed number of preference pairs, or of rows. A row has up to
`packing.token_budget` tokens. The loss is the exact mean over the step's pairs, for any number of rows and
ranks:

    loss = sum over the step's pairs of weight * l(pair) / number of pairs

For DPO (`loss.type: sigmoid`, losses/contrastive.py), pi and ref are the summed log-probs of a completion:

    l(pair) = -log sigmoid(beta * ((pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)))

The `scorer` computes the log-probs of a row with the weights of the `model`. The `policy` is the scorer as
all ranks run it together: forward passes that need gradients call it. The reference's log-probs come with the
batch, from the run's reference.parquet, or a reference model computes them in each step.

A *place* is a point from which a run can resume: it holds the step, the length of metrics.jsonl and the state
of the source of batches, not the weights. An *idle row* has a gradient of zero. A rank computes an idle row
when it has no row left but another rank still has one, because each pass needs all ranks.

A run that goes on: `find_run` names its newest checkpoint, `load_checkpoint` fills the state from it, and
what an earlier process wrote after it is removed before the first step. Legend: P pairs of a row.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from accelerate.utils import set_seed
from rich.console import Console
from torch import Tensor

from dpo_pack.model.parallel import DistributedPolicy, distribute_policy
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.online.win_rate import WinRate
from dpo_pack.recipe.load import Recipe, check_environment, dump_recipe, source_names
from dpo_pack.reference.frozen import FrozenReference
from dpo_pack.reports.ending import print_ending, print_next
from dpo_pack.reports.pages import write_run_page
from dpo_pack.run.checkpoint import Saver, load_checkpoint, run_identity
from dpo_pack.run.checkpoint_files import CheckpointWriter, drop_later_checkpoints
from dpo_pack.run.evaluate import Evaluator
from dpo_pack.run.export import verify_model
from dpo_pack.run.log import RunLog, describe_policy, describe_training, initial_loss
from dpo_pack.run.memory_estimate import (
    largest_row,
    memory_report,
    print_measured_memory,
    print_memory_report,
    stays_gathered,
)
from dpo_pack.run.pairs import (
    exact_reference,
    offline_source,
    prepare_reference,
    resume_reference,
    trained_pair_sizes,
    write_packing_report,
)
from dpo_pack.run.rollouts import build_online, check_generator, live_reference
from dpo_pack.run.run_dir import (
    RunDir,
    begin_run,
    choose_checkpoint,
    find_run,
    input_fingerprints,
    only_run,
    way_on,
)
from dpo_pack.run.samples import Sampler
from dpo_pack.run.setup import Setup, load_moving_reference, load_policy, prepare
from dpo_pack.run.state import TrainState, ends_run, find_selection, is_multiple
from dpo_pack.system import ranks
from dpo_pack.system.console import TrainingLines, format_seconds, keep_log, shown
from dpo_pack.system.errors import CacheError, DpoPackError, RunError, first_line
from dpo_pack.system.files import write_json_atomically
from dpo_pack.system.hub import push_command, upload_model, why_no_upload
from dpo_pack.system.interrupts import Interrupted, Interruption, interruptible
from dpo_pack.system.machine import release_memory
from dpo_pack.training.batches import BatchSource, GlobalBatch, OfflineSource
from dpo_pack.training.health import RunFacts
from dpo_pack.training.metrics import averages, column, join_values, pair_values
from dpo_pack.training.optim import (
    NonfiniteGuard,
    build_optimizer,
    clip_gradients,
    learning_rate_schedule,
    schedule_warnings,
)
from dpo_pack.training.records import PairLog
from dpo_pack.training.references import CachedReference, Reference, check_followable, check_start
from dpo_pack.training.step_loss import StepLoss, begin_step_loss, score_pairs
from dpo_pack.training.throughput import Meter, PhaseClock, device_peak


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The results of one step. The tensors are still on the device."""

    values: Tensor  # the `pair_values` of this rank's pairs
    grad_norm: Tensor  # [] norm of the gradient before clipping
    learning_rate: float
    loss: StepLoss


AfterStep = Callable[["Trainer"], object]  # called after each update, before the step's line is written


def train(
    recipe: Recipe,
    console: Console,
    *,
    overwrite: bool = False,
    dry_run: bool | Literal["full"] = False,
    after_step: AfterStep | None = None,
) -> None:
    """Trains the recipe's policy and writes it to `output_dir`/model; resumes an earlier run if there is one.

    With `dry_run` it stops before the reference pass ("full": the first step) and leaves `output_dir` alone.
    Raises a DpoPackError for an error that the user can correct, Interrupted after Ctrl-C or SIGTERM.
    """
    check_environment(recipe)
    with contextlib.ExitStack() as stack:
        if not dry_run:
            stack.enter_context(only_run(recipe.output_dir))
        told = console.print if dry_run else None
        run = ranks.first_does_for_all(lambda: find_run(recipe, overwrite=overwrite, told=told))
        if run.is_finished:
            console.print(f"This run is finished and {run.model} holds its model; nothing to do")
            console.print(f"  {way_on(recipe)}")
            if not dry_run and not run.page.exists():  # the process was killed before it wrote the page
                run.remove_leftovers()
                write_page(run, console)
            return
        if recipe.export.push_to_hub is not None and (obstacle := why_no_upload()) is not None:
            console.print(f"Warning: export.push_to_hub: {obstacle}. The run trains all the same")
        interruption = stack.enter_context(interruptible())
        trainer = Trainer(recipe, run, console, interruption, dry_run=dry_run)
        if dry_run:
            end = "first step" if dry_run == "full" else "reference pass; --full goes on to the first step"
            console.print(f"Dry run: everything is in order up to the {end}")
            return
        try:
            trainer.run_steps(after_step)
            with interruption.deferred():  # all steps are done: a signal waits until the model is written
                job = trainer.finish()
        except BaseException as error:
            status = "interrupted" if isinstance(error, Interrupted) else "failed"
            with contextlib.suppress(CacheError):  # the user must see the error that ended the run
                if run.info.get("status") != "finished":  # else only the terminal or the page failed
                    run.update(status=status, totals=trainer.log.totals(trainer.state))
            raise
        # The run is finished: neither an error of what follows nor a signal changes that.
        if job is not None and ranks.is_first():
            verify_model(run, console, job)
        print_next(run.root, trainer.state.evaluation, console, has_images=recipe.model.images)
        if (target := recipe.export.push_to_hub) is not None:
            push_model(run, console, interruption, repo=target.repo, private=target.private)


class Trainer:
    """One rank's part of a run. The constructor gets it ready for its next step; a checkpoint says which."""

    recipe: Recipe
    setup: Setup  # all that is known before weights are loaded
    run: RunDir  # the files of `output_dir`; only rank 0 writes them
    pairs: OfflineSource | None = None  # the planned pairs; an online run has none, it makes its pairs
    loaded: LoadedModel  # the model that is trained, in its scorer
    source: BatchSource  # the pairs, or online rollouts
    reference: Reference
    frozen: FrozenReference | None = None  # reference log-probs, which the run keeps in `output_dir`
    win_rate: WinRate | None = None  # of an online run with held-out prompts
    state: TrainState  # weights, optimizer, schedule, counters: all that a checkpoint holds
    policy: DistributedPolicy
    log: RunLog
    evaluator: Evaluator
    saver: Saver

    def __init__(
        self,
        recipe: Recipe,
        run: RunDir,
        console: Console,
        interruption: Interruption,
        *,
        dry_run: bool | Literal["full"] = False,
    ) -> None:
        """A dry run prints the memory that the run needs, and writes nothing into `output_dir`."""
        begun = time.monotonic()
        set_seed(recipe.seed)
        self.recipe, self.run, self.console, self.interruption = recipe, run, console, interruption
        # Data: pairs as token ids, and all that is known of models and machine without weights.
        self.setup = setup = prepare(recipe, console, takes_prompts=True)
        self.objective = setup.objective
        self.selection = find_selection(recipe, list(setup.data.eval_prompts or setup.data.eval))
        if run.checkpoint is not None:
            choose_checkpoint(run, recipe.checkpoint.resume, console.print)
        # Plan: which pairs share a step, a rank and a row.
        shards = setup.strategy.shards
        if recipe.online is None:
            self.pairs = offline_source(
                recipe, setup.data, setup.policy_facts, device=setup.device, equal_rows=shards
            )
        first_plan = None if self.pairs is None else self.pairs.first_plan
        num_steps = recipe.train.max_steps if self.pairs is None else self.pairs.num_steps
        describe_training(setup, first_plan, num_steps=num_steps or 0)
        if dry_run:
            print_memory_report(memory_report(setup, first_plan), console)
        gathers_once = shards and stays_gathered(setup, first_plan)
        # Model, proof that its packed rows are exact, and the reference's log-probs.
        seconds = self.load_online(dry_run) if self.pairs is None else self.load_offline(self.pairs, dry_run)
        # Optimizer and schedule, then the state of an earlier run.
        self.state = self.new_state()
        self.policy = distribute_policy(
            self.loaded.scorer, setup.strategy, setup.accelerator, stays_gathered=gathers_once
        )
        self.clock = PhaseClock(device=setup.device)
        self.sampler = Sampler(setup, self.loaded.scorer, run.samples)
        self.log = self.open_log(begun, self.load_checkpoint())
        describe_policy(setup, self.loaded)
        if dry_run:
            self.measure_memory()
        else:
            self.begin_output()
        self.make_evaluator_and_saver()
        release_memory()
        self.log.reference_seconds = seconds
        self.log.startup_seconds = time.monotonic() - begun - seconds

    # ---------------------------------------------------------------------------------- before the first step

    def load_offline(self, pairs: OfflineSource, dry_run: bool | Literal["full"]) -> float:
        """Loads the model, and gets the pairs' reference log-probs. Returns the seconds of their pass."""
        setup, recipe, resumes = self.setup, self.recipe, self.run.checkpoint is not None
        starts_as_reference = recipe.reference.path is None and not resumes
        loaded = load_policy(setup) if starts_as_reference else None
        moving: Reference | None = None
        seconds = 0.0
        if not self.objective.needs_reference:
            self.console.print("Reference: none, the loss needs no reference")
        elif recipe.reference.sync is not None:
            moving = load_moving_reference(setup)
            self.console.print("Reference: follows the policy; a second model runs live, nothing is cached")
        elif resumes:
            computes, known = dry_run is not True, self.run.resumed_reference
            self.frozen, seconds = resume_reference(setup, known, computes=computes)
        elif dry_run is not True:
            filled = prepare_reference(setup, loaded)
            self.frozen, seconds = filled.values, filled.seconds
            self.run.info["totals"] = {
                "reference_sequences_computed": filled.num_computed,
                "reference_sequences_cached": filled.num_cached,
            }
        dtype = setup.policy_facts.precision.activations
        has_exact = dtype.itemsize < 4 and moving is None and dry_run is not True
        exact = exact_reference(setup, loaded) if has_exact else None
        if loaded is None:
            release_memory()
            loaded = load_policy(setup)
        self.loaded, self.source = loaded, pairs
        lookup = None if self.frozen is None else self.frozen.of
        self.reference = moving or CachedReference(lookup=lookup, exact=exact)
        if self.frozen is not None:
            reference = self.frozen.of(setup.data.train)
            reference = replace(reference, sums=ranks.of_node(lambda: reference.sums))
            pairs.builder = replace(pairs.builder, reference=reference)
            if starts_as_reference:
                first_row = next(row for rows in pairs.first_plan.pack_step(0) for row in rows)
                check_start(loaded.scorer, pairs.builder, first_row, dtype=dtype)
        return seconds

    def load_online(self, dry_run: bool | Literal["full"]) -> float:
        """Loads the policy and the source of pairs, which are made from the policy's own completions."""
        setup = self.setup
        check_generator(setup)
        self.loaded = load_policy(setup)
        self.source, self.win_rate = build_online(setup, self.loaded, directory=self.run.rollouts)
        if self.win_rate is not None and dry_run is not True:
            self.win_rate.begin()
        if self.objective.needs_reference:
            self.reference = live_reference(setup, self.loaded)
            self.console.print("Reference: live, on the rows of each step")
        else:
            self.reference = CachedReference(lookup=None)
            self.console.print("Reference: none, the loss needs no reference")
        return 0.0

    def new_state(self) -> TrainState:
        """Makes the optimizer and the schedule of the learning rate, for step 0."""
        settings, scorer, num_steps = self.recipe.optim, self.loaded.scorer, self.source.num_steps
        if self.reference.moving is not None:
            check_followable(scorer, self.reference.moving)
        optimizer = build_optimizer(
            settings.name,
            scorer,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        warmup_steps = settings.num_warmup_steps(num_steps)
        scheduler = learning_rate_schedule(
            optimizer,
            settings.schedule,
            num_steps=num_steps,
            warmup_steps=warmup_steps,
            min_lr_ratio=settings.min_lr_ratio,
        )
        for warning in schedule_warnings(
            optimizer, lr=settings.lr, num_steps=num_steps, warmup_steps=warmup_steps
        ):
            self.console.print(warning)
        return TrainState(
            scorer=scorer,
            optimizer=optimizer,
            scheduler=scheduler,
            source=self.source,
            reference=self.reference.moving,
        )

    def load_checkpoint(self) -> int:
        """Loads the run's checkpoint, if any, into `state`; returns the bytes of metrics.jsonl to keep."""
        run, state = self.run, self.state
        moves = self.reference.moving is not None
        self.identity = run_identity(
            self.setup, self.loaded, self.source, self.selection, moves=moves, frozen=self.frozen
        )
        if run.checkpoint is None:
            if run.info.get("status") is not None:
                self.console.print("Beginning anew: the earlier run here ended without a checkpoint")
            return 0
        metrics_offset, notes = load_checkpoint(run.checkpoint, state, identity=self.identity)
        self.console.print(f"Going on after step {state.step} of {self.source.num_steps} ({run.checkpoint})")
        for note in notes:
            self.console.print(note)
        # A run that resumes from a checkpoint in another directory begins a new metrics.jsonl.
        return metrics_offset if run.has_own_checkpoint else 0

    def open_log(self, begun: float, offset: int) -> RunLog:
        """Returns the log. `offset`: the bytes of metrics.jsonl that stay."""
        setup, recipe = self.setup, self.recipe
        train, balance = setup.data.train, setup.policy_facts.balance
        sizes, peak_flops = None, None  # generation and judges take most of an online run's time
        if self.pairs is not None:
            is_adapter = self.loaded.adapter is not None
            sizes = trained_pair_sizes(setup, self.pairs, trains_adapter=is_adapter)
            peak_flops = device_peak(setup.device, self.loaded.scorer.compute_dtype)
        return RunLog(
            setup=setup,
            run=self.run,
            clock=self.clock,
            meter=Meter(sizes=sizes, peak_flops=peak_flops),
            facts=RunFacts(
                num_steps=self.source.num_steps,
                beta=recipe.loss.beta,
                initial_loss=initial_loss(self.objective, train, [name for name, _ in recipe.loss.terms]),
                router_aux_coef=0.0 if balance is None else balance.coefficient,
            ),
            guard=NonfiniteGuard(stops=recipe.train.stop_on_nonfinite, device=setup.device),
            lines=TrainingLines(self.console, num_steps=self.source.num_steps),
            pairs=PairLog(
                directory=self.run.pairs,
                table=train,
                source_names=source_names(recipe.data.train),
                beta=recipe.loss.beta,
                has_reference=self.objective.needs_reference,
            )
            if recipe.logging.pairs
            else None,
            offset=offset,
            begun=begun,
        )

    def measure_memory(self) -> None:
        """On CUDA, prints the peak memory of a forward and backward pass of the largest row."""
        if self.setup.device.type == "cuda" and self.pairs is not None:
            row = self.pairs.builder.build(largest_row(self.pairs.first_plan, rank=ranks.rank())).row
            print_measured_memory(self.policy, self.state.optimizer, row, self.setup.device, self.console)

    def begin_output(self) -> None:
        """Writes the first files, which every node must see, and starts the trackers."""
        ranks.first_does_for_all(self.write_first_files)
        if ranks.num_ranks() > 1:
            ranks.require_shared(self.run.root, "output_dir")
        if self.recipe.logging.trackers:
            self.log.begin_tracking(self.state.step)

    def write_first_files(self) -> None:
        """Writes the files that describe the run, and cuts off what an earlier process wrote later than the
        checkpoint; on rank 0."""
        run, setup = self.run, self.setup
        fingerprints = dict(self.identity.fingerprints)
        begin_run(run, dump_recipe(setup.recipe), str(setup.device))
        keep_log(self.console, run.console_log)
        write_json_atomically(run.data_report, setup.data.report)
        if self.pairs is not None:
            fingerprints["packing"] = self.pairs.first_plan.fingerprint
        if self.frozen is not None:
            self.frozen.save(run.reference)
        run.update(fingerprints=fingerprints, inputs=input_fingerprints(setup.recipe))
        if run.checkpoint is not None:  # else nothing is left of an earlier process
            drop_later_checkpoints(run.checkpoints, self.state.step)
            self.sampler.cut_after(self.state.step)
            if self.log.pairs is not None:
                self.log.pairs.cut_after(self.state.step)

    def make_evaluator_and_saver(self) -> None:
        self.saver = Saver(
            setup=self.setup,
            run=self.run,
            state=self.state,
            loaded=self.loaded,
            identity=self.identity,
            selection=self.selection,
            log=self.log,
            writer=CheckpointWriter(self.run.checkpoints, in_background=self.recipe.checkpoint.asynchronous),
        )
        self.evaluator = Evaluator(
            setup=self.setup,
            reference=self.reference,
            win_rate=self.win_rate,
            selection=self.selection,
            interruption=self.interruption,
            sampler=self.sampler,
        )

    # --------------------------------------------------------------------------------------------- the steps

    def run_steps(self, after_step: AfterStep | None = None) -> None:
        """Takes all steps of the run. After a stop signal or an error, it saves the state after the last
        complete step, if it can."""
        with self.log.writing(), self.interruption.deferred(), self.saver.writer:
            self.saver.begin()
            try:
                if self.state.owes_evaluation:  # before step 1, or not done when the run was stopped
                    self.close_step()
                self.take_steps(after_step)
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
        state, log, every_steps = self.state, self.log, self.recipe.train.eval_every_steps
        batches = iter(self.source)
        self.clock.restart()
        while not ends_run(self.selection, state.standing):
            self.interruption.poll()
            with self.interruption.lifted():  # no step has begun, so a signal ends the run at once
                batch = next(batches, None)
            ranks.seed_step(self.recipe.seed, step=state.step, rank=ranks.rank())
            self.clock.lap("data")
            if batch is None:
                break
            is_logged = is_multiple(state.step + 1, self.recipe.logging.every_steps)
            with state.scorer.measuring(is_logged):
                outcome = self.train_step(batch)
            if after_step is not None:
                after_step(self)
            self.source.prepare_next()  # makes the next batch while the device computes
            self.clock.lap("data")
            is_last = state.step == self.source.num_steps
            # The evaluation resets `owes_evaluation`. A run that stops before it evaluates when it resumes.
            state.owes_evaluation = is_last or is_multiple(state.step, every_steps)
            if is_logged or state.owes_evaluation or self.saver.is_due:  # these wait for the device
                log.report_nonfinite()  # raises RunError if the recipe stops at such a step
            # `step_record` comes first: it waits for the device, and `end_step` must count that waiting time.
            record = self.step_record(batch, outcome) if is_logged else None
            log.end_step(state, batch, outcome.values)
            if record is not None:
                log.write_step(state, record)
            self.saver.mark_place()
            self.close_step()
            self.clock.restart()

    def close_step(self) -> None:
        """Evaluates and saves a checkpoint, if these are due after this step (or before the first step)."""
        if self.state.owes_evaluation:
            self.evaluator.evaluate(self.state, self.log)
            self.saver.mark_place()  # again, because the evaluation has written lines to metrics.jsonl
        if self.saver.is_due:
            self.saver.save()

    def train_step(self, batch: GlobalBatch) -> StepOutcome:
        """Computes and clips the gradient of the global batch, then updates the model if all is finite.

        A step with a value that is not finite changes no parameter, but it still counts as a step. With a
        fused AdamW this only queues work. If it waited for the device, the device would become idle.
        """
        state, optimizer = self.state, self.state.optimizer
        with self.policy.gathered():
            batch = self.reference.score_batch(batch)
            balance, device = self.setup.policy_facts.balance, self.setup.device
            loss = begin_step_loss(self.objective, batch, state.scorer, balance, device=device)
            values = self.accumulate_gradients(batch, loss)
        grad_norm = clip_gradients(state.scorer, self.recipe.optim.max_grad_norm)
        learning_rate = float(state.scheduler.get_last_lr()[0])
        losses = column(values, "loss")
        # after it, optimizer.step() may change nothing
        self.log.guard.check(state.step + 1, losses, grad_norm, batch.pair_indices, optimizer)
        state.step += 1  # first: an error while the parameters change must not save them
        optimizer.step()
        state.scheduler.step()
        optimizer.zero_grad(set_to_none=not self.policy.keeps_gradients)
        self.clock.lap("optimizer")
        self.reference.follow(state.scorer, step=state.step)
        state.num_pairs += batch.num_pairs
        state.num_tokens += batch.num_tokens
        return StepOutcome(values=values, grad_norm=grad_norm, learning_rate=learning_rate, loss=loss)

    def accumulate_gradients(self, batch: GlobalBatch, loss: StepLoss) -> Tensor:
        """Runs one forward and one backward pass for each row, which add the step's gradient to `.grad`.

        Returns the values of this rank's pairs, of which metrics are averages (training/metrics.py).
        """
        values: list[Tensor] = []
        num_passes = len(batch.rows) + len(batch.idle_rows)
        for number, pair_row in enumerate(batch.rows, start=1):
            self.poll_before_pass(batch, number)
            with self.policy.accumulating(is_last=number == num_passes):
                output = self.policy(pair_row.row)  # log-probs summed over each completion
                pairs = score_pairs(self.objective, output, pair_row)  # [P] of policy and reference
                losses, share = loss.of_row(number, output, pairs)  # [P] and []
                self.clock.lap("forward")
                share.backward()
                self.clock.lap("backward")
            values.append(pair_values(pairs, losses))
        for number, idle_row in enumerate(batch.idle_rows, start=len(batch.rows) + 1):
            self.poll_before_pass(batch, number)
            with self.policy.accumulating(is_last=number == num_passes):
                self.policy.idle(idle_row, loss.of_idle_row(number))
                self.clock.lap("backward")
        return join_values(values, self.setup.device)

    def poll_before_pass(self, batch: GlobalBatch, number: int) -> None:
        """Raises Interrupted before pass `number` (the first is 1) if a stop signal has come to any rank.

        Polling needs all ranks, so it is done only before a pass that all ranks have. Before a later pass,
        other ranks can be waiting in a backward pass already, and a poll would wait for them forever.
        """
        if number <= batch.common_passes:
            self.interruption.poll(at_once=False)

    def step_record(self, batch: GlobalBatch, outcome: StepOutcome) -> dict[str, Any]:
        """Returns the step's line of metrics.jsonl without rates. Waits for the device."""
        means = averages(
            ranks.gather_over_ranks(outcome.values),
            beta=self.objective.options.beta,
            dtype=self.state.scorer.compute_dtype,
            has_reference=self.objective.needs_reference,
        )
        return {
            "split": "train",
            "step": self.state.step,
            "epoch": batch.epoch,
            **outcome.loss.metrics(means),
            "grad_norm": float(outcome.grad_norm),
            "learning_rate": outcome.learning_rate,
            "pairs": batch.num_pairs,
            "rows": len(batch.row_pairs),
            "tokens": batch.num_tokens,
            **batch.metrics,
            **self.clock.seconds(),
        }

    # --------------------------------------------------------------------------------------- after the steps

    def finish(self) -> dict[str, Any] | None:
        """Exports the model, updates run.json, writes the page, and prints totals and what was learned.

        After an error it saves the state after the last step, if it can. Returns what `verify_model` needs,
        if the export is to be verified.
        """
        run, state, saver = self.run, self.state, self.saver
        best = saver.best_evaluation()
        stopped_early = ends_run(self.selection, state.standing)
        if stopped_early:
            self.console.print(self.evaluator.stop_sentence(state))
        failure = self.evaluator.failure_sentence(state)
        if failure is not None:
            self.console.print(failure)
        try:
            saved = self.write_results(best, stopped_early=stopped_early)
        except Exception as error:  # the same command goes on after the last step
            saver.save_what_is_done(error, shared=DpoPackError)
            raise
        saver.exporter.round_policy()  # a checkpoint has the weights as they were trained, so only now
        rate = state.num_pairs / max(state.train_seconds, 1e-9)
        seconds = format_seconds(self.log.totals(state)["seconds"])
        page = f"; report: {run.page}" if write_page(run, self.console) else ""
        self.console.print(
            f"Done: {state.step} steps, {state.num_pairs:,} pairs in {format_seconds(state.train_seconds)} "
            f"({rate:,.1f} pairs/s), {seconds} in all. Model: {run.model}; metrics: {run.metrics}{page}"
        )
        print_ending(run.root, state.evaluation, state.health.warnings, self.console)
        if self.recipe.export.verify == "none":
            return None
        state.optimizer.zero_grad(set_to_none=True)  # the reader of the model needs memory
        state.optimizer.state.clear()
        return saver.exporter.job_to_verify(run.model, saved)

    def write_results(self, best: dict[str, Any] | None, *, stopped_early: bool) -> dict[str, Tensor]:
        """Writes samples, model and facts of a finished run; returns the tensors in the model's files."""
        run, state, log, saver = self.run, self.state, self.log, self.saver
        self.sampler.write(saver.load_exported(), at_end=True)
        with shown(self.console, "Writing the model"):
            saved = saver.exporter.export(run.model)
        if turn_end := saver.exporter.turn_end()[1]:
            self.console.print(turn_end)
        ranks.every_rank_does(log.close)
        if (pairs := self.pairs) is not None:
            ranks.first_does_for_all(lambda: write_packing_report(self.setup, pairs, run.packing_report))
        facts: dict[str, Any] = {
            "status": "finished",
            "totals": log.totals(state),
            "evaluation": state.evaluation,
            "model_files": run.model_files(),
            **({} if best is None else {"best": best, "stopped_early": stopped_early}),
            "warnings": list(state.health.warned),
            "verified": False,
            "not_verified": "the process ended before",
        }
        if self.recipe.export.verify == "none":
            facts["not_verified"] = "export.verify: none"
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


def push_model(
    run: RunDir, console: Console, interruption: Interruption, *, repo: str, private: bool
) -> None:
    """Uploads the model of the finished run. Prints its URL, or the command that repeats the upload. Only
    rank 0 uploads; the other ranks end when rank 0 ends.

    Raises Interrupted, also for a signal that came while the model was written: the user does not want to
    wait for an upload.
    """
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
