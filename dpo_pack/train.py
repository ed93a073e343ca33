"""DPO training, top to bottom.

    train -> start_session      prepares data, reference log-probs, policy, optimizer (run/session.py)
          -> run_steps -> take_steps -> train_step               computes the gradient, clips it, updates
                                        -> accumulate_gradients  one forward and one backward for each row
                                     -> close_step               evaluates and saves, if these are due
          -> finish             exports the model
          -> push_model         uploads it, if the recipe says so

A step trains on one global batch: a fixed number of preference pairs, or of rows. A row has up to
`packing.token_budget` tokens. The loss is the exact mean over the step's pairs, for any number of rows and
ranks:

    loss = sum over the step's pairs of weight * l(pair) / number of pairs

For DPO (`loss.type: sigmoid`, losses/contrastive.py), pi and ref are the summed log-probs of a completion:

    l(pair) = -log sigmoid(beta * ((pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)))

model/scorer.py computes the policy's log-probs. The reference's log-probs were computed earlier and come with
the batch, or a reference model computes them in each step (training/references.py).

`learner.policy` runs the policy on all ranks; a forward pass that needs gradients uses it.
`learner.state.policy` is the same module without the wrapper for several ranks: clipping and the optimizer
use its parameters, and a forward pass without gradients calls it.

A *place* is a point from which a run can resume: it holds the step, the length of metrics.jsonl and the state
of the source of batches. An *idle row* has a gradient of zero. A rank computes an idle row when it has no row
left but another rank still has one, because each pass needs all ranks.

Legend: P pairs of a row; [2 P] holds chosen, rejected, chosen, rejected, ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dpo_pack.losses import weighted_losses
from dpo_pack.recipe.load import Recipe
from dpo_pack.recipe.load import check_environment
from dpo_pack.reports.ending import print_ending
from dpo_pack.reports.pages import write_run_page
from dpo_pack.run.push import push, push_command
from dpo_pack.run.run_dir import RunDir, find_run, only_run
from dpo_pack.run.saving import is_multiple
from dpo_pack.run.session import Learner, Session, start_session
from dpo_pack.system import ranks
from dpo_pack.system.console import format_seconds
from dpo_pack.system.errors import CacheError, RunError, first_line
from dpo_pack.system.hub import why_no_upload
from dpo_pack.system.interrupts import Interrupted, Interruption, interruptible
from dpo_pack.system.progress import waiting_line
from dpo_pack.system.seeding import seed_step
from dpo_pack.training.balancing import StepBalance
from dpo_pack.training.batches import GlobalBatch, by_pair, score_pairs
from dpo_pack.training.coupling import Tangent, row_tangents
from dpo_pack.training.metrics import PairValues, averages, pair_values
from dpo_pack.training.nonfinite import skip_update_if
from dpo_pack.training.optim import clip_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The results of one step. The tensors are still on the device."""

    values: PairValues  # the values of this rank's pairs
    grad_norm: Tensor  # [] norm of the gradient before clipping
    learning_rate: float
    balance: StepBalance | None = None  # of a mixture of experts


AfterStep = Callable[[Learner], object]  # called after each update, before the step's line in metrics.jsonl


def train(
    recipe: Recipe,
    console: Console,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    after_step: AfterStep | None = None,
) -> None:
    """Trains the recipe's policy and writes it to `output_dir`/model; resumes an earlier run if there is one.

    With `dry_run` it does everything before the first step and writes nothing into `output_dir`.
    Raises a DpoPackError for an error that the user can correct, Interrupted after Ctrl-C or SIGTERM.
    """
    check_environment(recipe)
    with contextlib.ExitStack() as stack:
        if not dry_run:
            stack.enter_context(only_run(recipe.output_dir, console.print))
        run = ranks.first_does(lambda: find_run(recipe, overwrite=overwrite))
        if run.is_finished:
            console.print(f"This run is finished and {run.model} holds its model; nothing to do")
            if not dry_run and not run.page.exists():  # the process was killed before it wrote the page
                run.remove_leftovers()
                write_page(run, console)
            return
        obstacle = why_no_upload() if recipe.export.push_to_hub is not None else None
        if obstacle is not None:  # no error: the recipe may be trained without network, and pushed later
            console.print(f"Warning: export.push_to_hub: {obstacle}. The run trains all the same")
        interruption = stack.enter_context(interruptible())
        session = start_session(recipe, run, console, interruption, is_dry=dry_run)
        if dry_run:
            console.print("Dry run: everything up to the first step is in order")
            return
        try:
            run_steps(session, after_step)
            with interruption.deferred():  # all steps are done: a signal waits until the model is written
                finish(session)
        except BaseException as error:
            status = "interrupted" if isinstance(error, Interrupted) else "failed"
            with contextlib.suppress(CacheError):  # the user must see the error that ended the run
                run.update(status=status, totals=session.recorder.totals(session.state))
            raise
        # The run is finished: neither an error of the upload nor a signal changes that.
        push_model(recipe, run, console, interruption)


def run_steps(session: Session, after_step: AfterStep | None = None) -> None:
    """Takes all steps of the run. After a stop signal or a RunError, it saves the state after the last
    complete step, if it can."""
    learner, recorder, saver = session.learner, session.recorder, session.saver
    with (
        recorder.writing(),
        learner.interruption.deferred(),
        saver.writer,
    ):
        saver.begin()
        try:
            if session.state.owes_evaluation:  # before step 1, or not done when the run was stopped
                close_step(session)
            take_steps(session, after_step)
            if saver.recipe.checkpoint.load_best:
                saver.require_best()
        except Interrupted as stopped:
            if not stopped.is_urgent:
                saver.save_on_the_way_out()
            raise
        except RunError:  # raised on all ranks: the loss is not finite, or a judge does not answer any more
            saver.save_what_is_done()
            raise


def take_steps(session: Session, after_step: AfterStep | None) -> None:
    """Runs the training loop until no step is left or early stopping ends the run."""
    learner, recorder, state = session.learner, session.recorder, session.state
    batches = iter(state.source)
    recorder.begin_step()
    while (batch := next_batch(session, batches)) is not None:
        is_logged = is_multiple(state.step + 1, recorder.every_steps)
        with state.policy.measuring(is_logged):
            outcome = train_step(learner, batch)
        if after_step is not None:
            after_step(learner)
        state.source.prepare_next()  # makes the next batch while the device computes
        learner.clock.lap("data")
        is_last = state.step == state.source.num_steps
        # The evaluation resets `owes_evaluation`. If the run is stopped before, it evaluates when it resumes.
        state.owes_evaluation = is_last or is_multiple(state.step, session.evaluator.every_steps)
        if is_logged or state.owes_evaluation or session.saver.is_multiple:  # these wait for the device
            recorder.report_nonfinite()  # raises RunError if the recipe stops at such a step
        # `step_record` comes first: it waits for the device, and `end_step` must count that waiting time.
        record = step_record(learner, batch, outcome) if is_logged else None
        recorder.end_step(state, batch, outcome.values)
        if record is not None:
            recorder.write_step(state, record)
        session.saver.mark_place()
        close_step(session)
        recorder.begin_step()


def next_batch(session: Session, batches: Iterator[GlobalBatch]) -> GlobalBatch | None:
    """Returns the batch of the next step; None after the last step, or if early stopping ends the run."""
    learner = session.learner
    if session.evaluator.ends_run(learner.state):
        return None
    learner.interruption.poll()
    with learner.interruption.lifted():  # no step has begun, so a signal ends the run at once
        batch = next(batches, None)
    seed_step(learner.seed, step=learner.state.step, rank=ranks.rank())
    learner.clock.lap("data")
    return batch


def close_step(session: Session) -> None:
    """Evaluates and saves a checkpoint, if these are due after this step (or before the first step)."""
    if session.state.owes_evaluation:
        session.evaluator.evaluate(session.state, session.recorder)
        session.saver.mark_place()  # again, because the evaluation has written lines to metrics.jsonl
    if session.saver.is_due:
        session.saver.save()


def train_step(learner: Learner, batch: GlobalBatch) -> StepOutcome:
    """Computes and clips the gradient of the global batch, then updates the policy if all values are finite.

    A step with a value that is not finite changes no parameter, but it still counts as a step. With a fused
    AdamW this function only queues work. If it waited for the device, the device would become idle.
    """
    state = learner.state
    balance = None if learner.balance is None else StepBalance(settings=learner.balance)
    with learner.policy.gathered():
        values = accumulate_gradients(learner, batch, balance)
    grad_norm = clip_gradients(state.policy, learner.max_grad_norm)
    learning_rate = float(state.scheduler.get_last_lr()[0])
    must_skip = learner.guard.check(state.step + 1, values, grad_norm, batch.pair_indices)
    skip_update_if(must_skip, state.optimizer)  # the host does not read `must_skip`, so it does not wait
    state.optimizer.step()
    state.scheduler.step()
    state.optimizer.zero_grad(set_to_none=not learner.policy.keeps_gradients)
    learner.clock.lap("optimizer")
    state.step += 1
    learner.reference.follow(state.policy, step=state.step)
    state.num_pairs += batch.num_pairs
    state.num_tokens += batch.num_tokens
    return StepOutcome(values=values, grad_norm=grad_norm, learning_rate=learning_rate, balance=balance)


def accumulate_gradients(
    learner: Learner, batch: GlobalBatch, balance: StepBalance | None = None
) -> PairValues:
    """Runs one forward and one backward pass for each row; adds the gradient of the step's loss to `.grad`.

    `balance` adds the load-balancing loss of a mixture of experts. Returns the values of this rank's pairs.
    Metrics are averages of these values, see training/metrics.py.
    """
    objective, policy = learner.objective, learner.policy
    batch = learner.reference.score_batch(batch)
    tangents = coupled_tangents(learner, batch, balance) if objective.couples_pairs else None
    if balance is not None and tangents is None:
        count_experts_ahead(learner, batch, balance)
    # R ranks average their gradients. Each rank divides the sum of its losses by num_pairs / R. So the
    # average over ranks is the sum over all pairs / num_pairs, also if ranks have different numbers of pairs.
    divisor = batch.num_pairs / ranks.num_ranks()
    values = [PairValues.none(learner.clock.device)]
    for number, pair_row in enumerate(batch.rows, start=1):
        poll_before_pass(learner, batch, number)
        with policy.accumulating(is_last=number == batch.num_passes):
            # Log-probs summed over each completion, [2 P]. `by_pair` repeats shared completions.
            output = by_pair(policy(pair_row.row), pair_row)
            pairs = score_pairs(objective, output, pair_row)  # log-probs of policy and reference, weights
            if tangents is None:  # [P], weights included
                losses = weighted_losses(objective, pairs, mean_chosen_tokens=batch.mean_chosen_tokens)
            else:
                losses = tangents[number - 1].losses(pairs.policy)  # [P]
            loss = losses.sum() / divisor
            if balance is not None:
                if number == 1:
                    balance.complete(output)
                loss = loss + balance.row_loss(output)
            learner.clock.lap("forward")
            loss.backward()
            learner.clock.lap("backward")
        values.append(pair_values(output, pairs.policy, pairs.reference, losses))
    for number, idle_row in enumerate(batch.idle_rows, start=len(batch.rows) + 1):
        poll_before_pass(learner, batch, number)
        with policy.accumulating(is_last=number == batch.num_passes):
            policy.idle(idle_row, balance.complete if balance is not None and number == 1 else None)
            learner.clock.lap("backward")
    return PairValues.join(values)


def poll_before_pass(learner: Learner, batch: GlobalBatch, number: int) -> None:
    """Raises Interrupted before pass `number` (the first is 1) if a stop signal has come to any rank.

    Polling needs all ranks, so it is done only before a pass that all ranks have. Before a later pass, other
    ranks can be waiting in a backward pass already, and a poll would wait for them forever.
    """
    if batch.common_passes is None or number <= batch.common_passes:
        learner.interruption.poll_in_time()


@torch.no_grad()
def coupled_tangents(
    learner: Learner, batch: GlobalBatch, balance: StepBalance | None = None
) -> list[Tangent]:
    """Returns for each row its part ("tangent") of a loss that couples the pairs of a step (aot).

    It first runs a forward pass without gradients on every row; other losses do not need this pass. See
    training/coupling.py. The same pass counts experts for `balance`, as in `count_experts_ahead`.
    """
    objective, scorer = learner.objective, learner.state.policy
    with scorer.measuring(False):
        outputs = [scorer(pair_row.row) for pair_row in batch.rows]
        idle_outputs = [scorer(idle_row) for idle_row in batch.idle_rows]
    if balance is not None:
        for output in [*outputs, *idle_outputs][1:]:
            balance.add(output.expert_counts)
    rows = [
        score_pairs(objective, by_pair(output, pair_row), pair_row)
        for output, pair_row in zip(outputs, batch.rows, strict=True)
    ]
    return row_tangents(
        objective, rows, mean_chosen_tokens=batch.mean_chosen_tokens, device=learner.clock.device
    )


def count_experts_ahead(learner: Learner, batch: GlobalBatch, balance: StepBalance) -> None:
    """Counts the experts that the tokens of this rank's rows choose; leaves out the rank's first row.

    This needs a forward pass without gradients on each of these rows. See training/balancing.py.
    """
    scorer = learner.state.policy
    rows = [*(pair_row.row for pair_row in batch.rows), *batch.idle_rows]
    for row in rows[1:]:
        balance.add(scorer.with_own_weights(partial(scorer.expert_counts, row)))


def step_record(learner: Learner, batch: GlobalBatch, outcome: StepOutcome) -> dict[str, Any]:
    """Returns the step's line of metrics.jsonl, without pairs and tokens a second. Waits for the device."""
    objective = learner.objective
    record: dict[str, Any] = {
        "split": "train",
        "step": learner.state.step,
        "epoch": batch.epoch,
        **averages(
            outcome.values.over_ranks(),
            beta=objective.options.beta,
            dtype=learner.state.policy.compute_dtype,
            has_reference=objective.needs_reference,
        ),
        "grad_norm": float(outcome.grad_norm),
        "learning_rate": outcome.learning_rate,
        "pairs": batch.num_pairs,
        "rows": batch.num_rows,
        "tokens": batch.num_tokens,
        **batch.metrics,
        **learner.clock.seconds(),
    }
    if outcome.balance is not None:
        record |= outcome.balance.metrics()
        record["loss"] += outcome.balance.settings.coefficient * record["aux_loss"]
    return record


def finish(session: Session) -> None:
    """Exports the model, updates run.json, writes the page, and prints totals and what was learned."""
    run, state, recorder, saver = session.run, session.state, session.recorder, session.saver
    best = saver.best_evaluation()
    stopped_early = session.evaluator.ends_run(state)
    if stopped_early:
        recorder.console.print(session.evaluator.stop_sentence(state))
    failure = session.evaluator.failure_sentence(state)
    if failure is not None:
        recorder.console.print(failure)
    if saver.recipe.checkpoint.load_best:
        saver.load_best()
    session.evaluator.sampler.write(saver.exported_step)
    with waiting_line(recorder.console, "Writing the model"):
        saver.export(run.model)
    recorder.close()
    run.update(
        status="finished",
        totals=recorder.totals(state),
        evaluation=state.evaluation,
        model_files=run.model_files(),
        **({} if best is None else {"best": best, "stopped_early": stopped_early}),
        warnings=list(state.health.warned),
    )
    rate = state.num_pairs / max(state.train_seconds, 1e-9)
    page = f"; report: {run.page}" if write_page(run, recorder.console) else ""
    recorder.console.print(
        f"Done: {state.step} steps, {state.num_pairs:,} pairs in {format_seconds(state.train_seconds)} "
        f"({rate:,.1f} pairs/s). Model: {run.model}; metrics: {run.metrics}{page}"
    )
    print_ending(run, state.evaluation, state.health.warnings, recorder.console)


def write_page(run: RunDir, console: Console) -> bool:
    """Writes the page of the finished run. Returns True if this rank has written it; only rank 0 writes.

    The model is already on the disk, so an error of the page is only a warning.
    """
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


def push_model(recipe: Recipe, run: RunDir, console: Console, interruption: Interruption) -> None:
    """Uploads the model of the finished run, if the recipe says so. Prints its URL, or the command that
    repeats the upload. Only rank 0 uploads; the other ranks end when rank 0 ends.

    Raises Interrupted, also for a signal that came while the model was written: the user does not want to
    wait for an upload.
    """
    settings = recipe.export.push_to_hub
    if settings is None:
        return
    again = push_command(run.root, settings.repo, private=settings.private)
    try:
        interruption.poll()
        if ranks.is_first():
            console.print(f"Uploading {run.model} to {settings.repo}")
            for line in push(run.root, settings.repo, private=settings.private).lines():
                console.print(line)
    except RunError as error:
        reason = str(error).removeprefix("push: ")
        console.print(f"Warning: the model is not on the hub: {reason}. To repeat the upload: {again}")
    except Interrupted as stopped:
        stopped.next_step = f"the run is finished and its model is saved; to upload the model: {again}"
        raise
