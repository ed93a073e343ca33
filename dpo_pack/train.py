"""DPO training, top to bottom.

    train -> start_session      data, reference log-probs, policy, optimizer (session.py)
          -> run_steps -> take_steps -> train_step               gradient, clip, update
                                        -> accumulate_gradients  one forward and one backward a row
          -> finish             the model

A step is a fixed number of preference pairs, the global batch. Its pairs lie in rows of up to
`packing.token_budget` tokens, and the loss is the exact mean over the step's pairs, however many rows (and
ranks) they came in:

    loss = sum over the step's pairs of weight * l(pair) / number of pairs

For DPO (`loss.type: sigmoid`, losses/contrastive.py), with pi and ref the summed log-probs of a completion:

    l(pair) = -log sigmoid(beta * ((pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)))

The policy's log-probs are models.CompletionLogps'. A frozen reference's come with the batch, from the cache;
one that follows the policy is run here.

Legend: P pairs of a row; [2 P] is the chosen and the rejected completion of each pair in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dpo_pack import ranks
from dpo_pack.console import TrainingLines, format_seconds
from dpo_pack.coupling import Tangent, row_tangents
from dpo_pack.errors import RunError
from dpo_pack.export import export_model
from dpo_pack.health import examine
from dpo_pack.interrupts import Interrupted, interruptible
from dpo_pack.losses import weighted_losses
from dpo_pack.memory_report import largest_row, print_measured_memory
from dpo_pack.metrics import PairValues, averages, pair_values
from dpo_pack.monitoring import report_nonfinite
from dpo_pack.moving_reference import MovingReference
from dpo_pack.offline import OfflineSource
from dpo_pack.optim import clip_gradients
from dpo_pack.recipe import Recipe, check_environment
from dpo_pack.run_dir import find_run
from dpo_pack.saving import (
    best_evaluation,
    checkpoint,
    forget_lost_bests,
    is_checkpoint_due,
    load_best,
    mark_place,
    require_best,
    save_on_the_way_out,
    save_what_is_done,
    stop_sentence,
)
from dpo_pack.seeding import seed_step
from dpo_pack.session import Session, start_session, totals
from dpo_pack.session_evaluation import evaluate
from dpo_pack.sources import GlobalBatch, by_pair, score_pairs
from dpo_pack.trackers import MetricsLog, end_trackers, track


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step computed, still on the device."""

    values: PairValues  # of this rank's pairs
    grad_norm: Tensor  # [] before clipping
    learning_rate: float


def train(recipe: Recipe, console: Console, *, overwrite: bool = False, dry_run: bool = False) -> None:
    """Train the recipe's policy and leave it in `output_dir`/model; go on where an earlier run stopped.

    `dry_run` does everything up to the first step and leaves nothing in `output_dir`.
    Raises a DpoPackError for what the user can mend, Interrupted after Ctrl-C or SIGTERM.
    """
    check_environment(recipe)
    run = ranks.first_does(lambda: find_run(recipe, overwrite=overwrite))
    if run.is_finished:
        console.print(f"This run is finished and {run.model} holds its model; nothing to do")
        return
    with interruptible() as interruption:
        session = start_session(recipe, run, console, interruption, keeps_files=not dry_run)
        if dry_run:
            measure_memory(session)
            console.print("Dry run: everything up to the first step is in order")
            return
        try:
            run_steps(session)
            with interruption.deferred():  # nothing but the model holds the run now: a signal waits for it
                finish(session)
        except Interrupted:
            run.update(status="interrupted", totals=totals(session))
            raise
        except BaseException:
            run.update(status="failed", totals=totals(session))
            raise


def measure_memory(session: Session) -> None:
    """On CUDA: say what the largest row takes, forward and backward. Changes nothing."""
    prepared, source = session.prepared, session.source
    if prepared.device.type == "cuda" and isinstance(source, OfflineSource):
        row = source.builder.build(largest_row(source.first_plan, rank=source.rank)).row
        print_measured_memory(
            session.distributed_policy, session.state.optimizer, row, prepared.device, prepared.console
        )


def run_steps(session: Session) -> None:
    """All steps of the run; one that cannot go on saves the last place at which it could."""
    with (
        MetricsLog(session.run.metrics, offset=session.place.metrics_offset) as log,
        session.interruption.deferred(),
        session.writer,
    ):
        mark_place(session, log)
        if session.run.has_own_checkpoint:
            session.saved = session.place
        if session.run.checkpoint is not None:
            forget_lost_bests(session)
        try:
            if session.state.owes_evaluation:  # the one before the first step, or of a run that was stopped
                close_step(session, log)
            take_steps(session, log)
            if session.prepared.recipe.checkpoint.load_best:
                require_best(session)
        except Interrupted as stopped:
            if not stopped.is_urgent:
                save_on_the_way_out(session)
            raise
        except RunError:  # of all ranks: a judge that is gone for good, say
            save_what_is_done(session)
            raise


def take_steps(session: Session, log: MetricsLog) -> None:
    """The training loop."""
    recipe, state = session.prepared.recipe, session.state
    lines = TrainingLines(session.prepared.console, num_steps=session.source.num_steps)
    batches = iter(session.source)
    begun = time.monotonic()
    session.clock.restart()
    while (batch := next_batch(session, batches)) is not None:
        outcome = train_step(session, batch)
        session.source.prepare_next()  # while the device is at what was queued
        session.clock.lap("data")
        is_last = state.step == session.source.num_steps
        state.owes_evaluation = is_last or _is_due(state.step, recipe.train.eval_every_steps)
        logs = _is_due(state.step, recipe.logging.every_steps)
        if logs or state.owes_evaluation or _is_due(state.step, recipe.checkpoint.every_steps):
            report_nonfinite(session.guard, session.prepared, session.run.root)
        record = step_record(session, batch, outcome) if logs else None
        seconds = time.monotonic() - begun
        state.train_seconds += seconds
        state.num_flops += session.meter.add(
            batch.row_pairs,
            pairs=batch.num_pairs,
            tokens=batch.num_tokens,
            seconds=seconds,
        )
        if record is not None:
            record |= session.meter.take()
            log.write(record)
            track(session.prepared.accelerator, record)
            lines.show(record, seconds_left=_seconds_left(session))
            state.health, warnings = examine(state.health, record, session.facts)
            for warning in warnings:
                session.prepared.console.print(f"  Warning: {warning}")
        mark_place(session, log)
        close_step(session, log)
        begun = time.monotonic()  # a step's time has the layout of the next one's batch in it
        session.clock.restart()


def next_batch(session: Session, batches: Iterator[GlobalBatch]) -> GlobalBatch | None:
    """What the next step is made of; None after the last step, or where early stopping ends the run."""
    selection, state = session.selection, session.state
    if selection is not None and selection.stops(state.standing):
        return None
    session.interruption.poll()
    with session.interruption.lifted():  # a step that is not taken may be left anywhere
        batch = next(batches, None)
    seed_step(session.prepared.recipe.seed, step=state.step, rank=ranks.rank())
    session.clock.lap("data")
    return batch


def close_step(session: Session, log: MetricsLog) -> None:
    """The evaluation and the checkpoint that are due after a step, or before the first."""
    if session.state.owes_evaluation:
        evaluate(session, log)
    if is_checkpoint_due(session):
        checkpoint(session)


def train_step(session: Session, batch: GlobalBatch) -> StepOutcome:
    """Gradients of the whole global batch, clipped; one optimizer step, if all of it is finite.

    With a fused AdamW it only queues work: whatever waited for the device here would leave it idle.
    """
    state = session.state
    values = accumulate_gradients(session, batch)
    grad_norm = clip_gradients(state.policy, session.prepared.recipe.optim.max_grad_norm)
    learning_rate = float(state.scheduler.get_last_lr()[0])
    session.guard.step_if_finite(state.step + 1, values, grad_norm, batch.pair_indices)
    state.scheduler.step()
    state.optimizer.zero_grad(set_to_none=not session.distributed_policy.keeps_gradients)
    session.clock.lap("optimizer")
    state.step += 1
    if isinstance(session.reference, MovingReference):
        session.reference.follow(state.policy, step=state.step)
    state.num_pairs += batch.num_pairs
    state.num_tokens += batch.num_tokens
    return StepOutcome(values=values, grad_norm=grad_norm, learning_rate=learning_rate)


def step_record(session: Session, batch: GlobalBatch, outcome: StepOutcome) -> dict[str, Any]:
    """The step's line of metrics.jsonl, without rates. Waits for the device."""
    return {
        "split": "train",
        "step": session.state.step,
        "epoch": batch.epoch,
        **averages(
            outcome.values.over_ranks(),
            beta=session.objective.options.beta,
            has_reference=session.objective.needs_reference,
        ),
        "grad_norm": float(outcome.grad_norm),
        "learning_rate": outcome.learning_rate,
        "pairs": batch.num_pairs,
        "rows": batch.num_rows,
        "tokens": batch.num_tokens,
        **batch.metrics,
        **session.clock.seconds(),
    }


def accumulate_gradients(session: Session, batch: GlobalBatch) -> PairValues:
    """One forward and one backward a row; leaves the gradient of the step's loss in the parameters.

    Returns what metrics are made of, see metrics.py: of this rank's pairs.
    """
    objective, policy = session.objective, session.distributed_policy
    if isinstance(session.reference, MovingReference):
        batch = session.reference.score_batch(batch)
    tangents = coupled_tangents(session, batch) if objective.couples_pairs else None
    # R ranks average their gradients. Each divides its losses' sum by num_pairs / R, however many pairs it
    # has, and so the average is the sum over all pairs / num_pairs: no row's mean is ever averaged.
    divisor = batch.num_pairs / ranks.num_ranks()
    values = [PairValues.none(session.prepared.device)]
    for number, row in enumerate(batch.rows, start=1):
        poll_before_pass(session, batch, number)
        with policy.accumulating(is_last=number == batch.num_passes):
            output = by_pair(policy(row.row), row)  # RowLogps: log-probs summed over each completion, [2 P]
            pairs = score_pairs(objective, output, row)  # of policy and reference, and weights
            if tangents is None:  # [P], weights included
                losses = weighted_losses(objective, pairs, mean_chosen_tokens=batch.mean_chosen_tokens)
            else:
                losses = tangents[number - 1].losses(pairs.policy)  # [P]
            session.clock.lap("forward")
            (losses.sum() / divisor).backward()
            session.clock.lap("backward")
        values.append(pair_values(output, pairs.policy, pairs.reference, losses))
    for number, idle_row in enumerate(batch.idle_rows, start=len(batch.rows) + 1):
        poll_before_pass(session, batch, number)
        with policy.accumulating(is_last=number == batch.num_passes):
            policy.idle(idle_row)
            session.clock.lap("backward")
    return PairValues.join(values)


def poll_before_pass(session: Session, batch: GlobalBatch, number: int) -> None:
    """Let a run that is to stop leave between two rows, `number` from 1.

    Ranks ask together, so only before passes that all of them have: in the others' backward they may already
    wait for each other. As ranks are balanced, one with fewer rows has longer ones.
    """
    if batch.common_passes is None or number <= batch.common_passes:
        session.interruption.poll()


@torch.no_grad()
def coupled_tangents(session: Session, batch: GlobalBatch) -> list[Tangent]:
    """For a loss that couples the step's pairs: what it comes to for each row, see coupling.py.

    Takes a forward of every row first, without gradients; only such losses pay for it.
    """
    objective, scorer = session.objective, session.state.policy
    rows = [score_pairs(objective, by_pair(scorer(row.row), row), row) for row in batch.rows]
    for idle_row in batch.idle_rows:
        scorer(idle_row)
    return row_tangents(
        objective, rows, mean_chosen_tokens=batch.mean_chosen_tokens, device=session.prepared.device
    )


def finish(session: Session) -> None:
    """Export the model, and say what was learned and where things are."""
    prepared, run, state = session.prepared, session.run, session.state
    best = best_evaluation(session)
    stopped_early = stop_sentence(session)
    if stopped_early is not None:
        prepared.console.print(stopped_early)
    if prepared.recipe.checkpoint.load_best:
        load_best(session)
    export_model(
        session.policy,
        prepared.tokenizer,
        run.model,
        recipe=prepared.recipe,
        totals=totals(session),
        evaluation=state.evaluation,
    )
    end_trackers(prepared.accelerator)
    run.update(
        status="finished",
        totals=totals(session),
        evaluation=state.evaluation,
        **({} if best is None else {"best": best, "stopped_early": stopped_early is not None}),
        warnings=list(state.health.said),
    )
    rate = state.num_pairs / max(state.train_seconds, 1e-9)
    prepared.console.print(
        f"Done: {state.step} steps, {state.num_pairs:,} pairs in {format_seconds(state.train_seconds)} "
        f"({rate:,.1f} pairs/s). Model: {run.model}; metrics: {run.metrics}"
    )


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def _seconds_left(session: Session) -> float:
    state = session.state
    return state.train_seconds / state.step * (session.source.num_steps - state.step)
