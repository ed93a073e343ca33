"""DPO training, top to bottom.

`train` prepares a run and goes through its steps; `train_step` is one of them. A step is a fixed number of
preference pairs, the global batch. Its pairs lie in rows of up to `packing.token_budget` tokens; each row
is one forward and one backward, and the loss is the exact mean over the step's pairs, however many rows
(and ranks) they came in:

    loss = sum over the step's pairs of weight * l(pair) / number of pairs

The policy's log-probs are computed here; the reference's were computed beforehand, once, and cached.

Legend: P pairs of a row, S = 2 P sequences, alternating chosen and rejected.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dpo_pack.checkpoint import save_checkpoint
from dpo_pack.console import TrainingLines, format_seconds
from dpo_pack.coupling import Tangent, row_tangents
from dpo_pack.evaluate import evaluate_sets
from dpo_pack.export import export_model
from dpo_pack.health import examine
from dpo_pack.interrupts import Interrupted, Interruption, interruptible
from dpo_pack.losses import weighted_losses
from dpo_pack.metrics import PairValues, averages, pair_values
from dpo_pack.monitoring import report_nonfinite
from dpo_pack.moving_reference import MovingReference
from dpo_pack.online.win_rate import win_rate_sentence
from dpo_pack.optim import clip_gradients
from dpo_pack.recipe import Recipe, check_environment
from dpo_pack.run_dir import find_run
from dpo_pack.session import Session, run_identity, start_session
from dpo_pack.sources import GlobalBatch, by_pair, score_pairs
from dpo_pack.trackers import MetricsLog, track


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
    run = find_run(recipe, overwrite=overwrite)
    if run.is_finished:
        console.print(f"This run is finished and {run.model} holds its model; nothing to do")
        return
    with interruptible() as interruption:
        session = start_session(recipe, run, console, keeps_files=not dry_run)
        if dry_run:
            console.print("Dry run: everything up to the first step is in order")
            return
        try:
            run_steps(session, interruption)
            with interruption.deferred():  # nothing but the model holds the run now: a signal waits for it
                finish(session)
        except Interrupted:
            run.update(status="interrupted", totals=totals(session))
            raise
        except BaseException:
            run.update(status="failed", totals=totals(session))
            raise


def run_steps(session: Session, interruption: Interruption) -> None:
    """The training loop. Saves a checkpoint when one is due and when the run is interrupted."""
    recipe, state = session.prepared.recipe, session.state
    lines = TrainingLines(session.prepared.console, num_steps=session.source.num_steps)
    with MetricsLog(session.run.metrics, offset=session.metrics_offset) as log, interruption.deferred():
        if state.step == 0:
            evaluate(session, log)
        begun = time.monotonic()
        session.clock.restart()
        for batch in session.source:
            session.clock.lap("data")
            outcome = optimizer_step(session, batch)
            is_last = state.step == session.source.num_steps
            evaluates = is_last or _is_due(state.step, recipe.train.eval_every_steps)
            saves = _is_due(state.step, recipe.checkpoint.every_steps) or interruption.signum is not None
            logs = _is_due(state.step, recipe.logging.every_steps)
            if logs or evaluates or saves:
                report_nonfinite(session.guard, session.prepared, session.run.root)
            record = step_record(session, batch, outcome) if logs else None
            seconds = time.monotonic() - begun
            state.train_seconds += seconds
            state.num_flops += session.meter.add(
                [row.pair_indices for row in batch.rows],
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
            if evaluates:
                evaluate(session, log)
            if saves:
                checkpoint(session, log)
            if interruption.signum is not None:
                raise Interrupted(interruption.signum)
            begun = time.monotonic()  # the next step's time has its batch's layout in it
            session.clock.restart()


def optimizer_step(session: Session, batch: GlobalBatch) -> StepOutcome:
    """Gradients of the whole global batch, clipped; one AdamW step, if they are finite.

    Only queues work: whatever waited for the device here would leave it idle.
    """
    state = session.state
    values = train_step(session, batch)
    grad_norm = clip_gradients(state.policy, session.prepared.recipe.optim.max_grad_norm)
    learning_rate = float(state.scheduler.get_last_lr()[0])
    session.guard.step(state.step + 1, values, grad_norm, batch.pair_indices)
    state.scheduler.step()
    state.optimizer.zero_grad(set_to_none=True)
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


def train_step(session: Session, batch: GlobalBatch) -> PairValues:
    """One forward and one backward a row; leaves the gradient of the step's loss in the parameters.

    Returns what metrics are made of, see metrics.py.
    """
    objective, policy = session.objective, session.state.policy
    if isinstance(session.reference, MovingReference):
        batch = session.reference.score_batch(batch)
    tangents = coupled_tangents(session, batch) if objective.couples_pairs else None
    values = []
    for number, row in enumerate(batch.rows):
        output = by_pair(policy(row.row), row)  # [2 P] summed completion log-probs
        pairs = score_pairs(objective, output, row)  # [P] of policy and reference, and weights
        if tangents is None:
            losses = weighted_losses(objective, pairs, mean_chosen_tokens=batch.mean_chosen_tokens)  # [P]
        else:
            losses = tangents[number].losses(pairs.policy)  # [P]
        session.clock.lap("forward")
        # Over all rows this adds up to the mean over the step's pairs: no row's mean is ever averaged.
        (losses.sum() / batch.num_pairs).backward()
        session.clock.lap("backward")
        values.append(pair_values(output, pairs.policy, pairs.reference, losses))
    return PairValues.join(values)


@torch.no_grad()
def coupled_tangents(session: Session, batch: GlobalBatch) -> list[Tangent]:
    """For a loss that couples the step's pairs: what it comes to for each row, see coupling.py.

    Takes a forward of every row first, without gradients; only such losses pay for it.
    """
    objective, policy = session.objective, session.state.policy
    rows = [score_pairs(objective, by_pair(policy(row.row), row), row) for row in batch.rows]
    return row_tangents(objective, rows, mean_chosen_tokens=batch.mean_chosen_tokens)


def evaluate(session: Session, log: MetricsLog) -> None:
    """Metrics of every held-out set, into the log, the trackers and the state."""
    prepared, state, begun = session.prepared, session.state, time.monotonic()
    for held_out in evaluate_sets(prepared, state.policy, session.reference, session.objective):
        state.evaluation[held_out.name] = held_out.record
        record = {"split": "eval", "source": held_out.name, "step": state.step, **held_out.record}
        log.write(record)
        track(prepared.accelerator, record)
        low, high = held_out.record["intervals"]["rewards/accuracies"]
        prepared.console.print(
            f"  held out ({held_out.name}) after step {state.step}: "
            f"reward accuracy {record['rewards/accuracies']:.3f} ({low:.3f} to {high:.3f}), "
            f"margin {record['rewards/margins']:.4f}, loss {record['loss']:.4f}"
        )
    for name, result in () if session.win_rate is None else session.win_rate.evaluate():
        state.evaluation[name] = result
        record = {"split": "eval", "source": name, "step": state.step, **result}
        log.write(record)
        track(prepared.accelerator, record)
        prepared.console.print(f"  held out ({name}) after step {state.step}: {win_rate_sentence(result)}")
    session.eval_seconds += time.monotonic() - begun


def checkpoint(session: Session, log: MetricsLog) -> None:
    """Save the full state, so that the run can go on from here as if it had never stopped."""
    path = save_checkpoint(
        session.run.checkpoints,
        session.state,
        metrics_offset=log.offset,
        identity=run_identity(session),
        keep=session.prepared.recipe.checkpoint.keep,
    )
    session.prepared.console.print(f"  saved {path}")


def finish(session: Session) -> None:
    """Export the model, and say what was learned and where things are."""
    prepared, run, state = session.prepared, session.run, session.state
    export_model(
        session.policy,
        prepared.tokenizer,
        run.model,
        recipe=prepared.recipe,
        totals=totals(session),
        evaluation=state.evaluation,
    )
    prepared.accelerator.end_training()
    run.update(
        status="finished",
        totals=totals(session),
        evaluation=state.evaluation,
        warnings=list(state.health.said),
    )
    rate = state.num_pairs / max(state.train_seconds, 1e-9)
    prepared.console.print(
        f"Done: {state.step} steps, {state.num_pairs:,} pairs in {format_seconds(state.train_seconds)} "
        f"({rate:,.1f} pairs/s). Model: {run.model}; metrics: {run.metrics}"
    )


def totals(session: Session) -> dict[str, Any]:
    """`run.json`'s totals: `train_seconds` and rates of the whole run, other seconds of this process."""
    state = session.state
    seconds = max(state.train_seconds, 1e-9)
    peak = session.meter.peak_flops
    return {
        **session.run.info.get("totals", {}),
        "steps": state.step,
        "pairs": state.num_pairs,
        "tokens": state.num_tokens,
        "seconds": time.monotonic() - session.begun,
        "startup_seconds": session.startup_seconds,
        "reference_seconds": session.reference_seconds,
        "train_seconds": state.train_seconds,
        "eval_seconds": session.eval_seconds,
        "pairs_per_second": state.num_pairs / seconds,
        "tokens_per_second": state.num_tokens / seconds,
        **({} if peak is None else {"mfu": state.num_flops / seconds / peak}),
    }


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def _seconds_left(session: Session) -> float:
    state = session.state
    return state.train_seconds / state.step * (session.source.num_steps - state.step)
