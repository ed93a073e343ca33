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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dpo_pack.checkpoint import (
    TrainState,
    drop_later_checkpoints,
    load_checkpoint,
    save_checkpoint,
    seed_everything,
)
from dpo_pack.console import TrainingLines, format_count, format_seconds, progress_bar
from dpo_pack.data.packing_report import to_json
from dpo_pack.errors import RunError
from dpo_pack.evaluate import evaluate_pairs
from dpo_pack.export import export_model
from dpo_pack.files import write_json_atomically, write_text_atomically
from dpo_pack.interrupts import Interrupted, Interruption, interruptible
from dpo_pack.losses import LossOptions, weighted_sum
from dpo_pack.metrics import averages, row_sums, zero_sums
from dpo_pack.models import LoadedModel
from dpo_pack.optim import adamw, learning_rate_schedule, num_warmup_steps
from dpo_pack.prepare import (
    Prepared,
    inspect_recipe_packing,
    loss_options,
    offline_source,
    prepare,
    prepare_policy,
    prepare_reference,
    reference_token_budget,
    release_memory,
    row_builder,
)
from dpo_pack.recipe import Recipe, check_environment
from dpo_pack.reference import FrozenReference
from dpo_pack.run_dir import RunDir, begin_run, find_run
from dpo_pack.sources import GlobalBatch, OfflineSource, split_pairs
from dpo_pack.trackers import MetricsLog, start_trackers, track

# Nats that a token's log-prob of about 1 nat may differ by between two computations of the same thing.
NOISE_PER_TOKEN = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss: (name in LOSSES, weight) of each term, and their options."""

    terms: Sequence[tuple[str, float]]
    options: LossOptions


@dataclass(slots=True, kw_only=True)
class Session:
    """One process's part of a run: what the loop works with, and where its time went."""

    prepared: Prepared
    run: RunDir
    policy: LoadedModel
    reference: FrozenReference
    objective: Objective
    source: OfflineSource
    state: TrainState
    metrics_offset: int
    begun: float  # time.monotonic()
    startup_seconds: float
    reference_seconds: float
    eval_seconds: float = 0.0


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


def start_session(recipe: Recipe, run: RunDir, console: Console, *, keeps_files: bool) -> Session:
    """Data, reference log-probs, policy, optimizer: everything before the first step."""
    begun = time.monotonic()
    seed_everything(recipe.seed)
    prepared = prepare(recipe, console)
    resumes = run.checkpoint is not None
    has_own_reference = recipe.reference.path is not None
    policy = None if has_own_reference and not resumes else prepare_policy(prepared)
    reference_seconds = 0.0
    if resumes:
        reference = FrozenReference.load(run.resumed_reference)
    else:
        filled = prepare_reference(prepared, None if has_own_reference else policy)
        reference_seconds = filled.seconds
        reference = FrozenReference.take(filled.cache, prepared.tables)
        run.info["totals"] = {
            "reference_sequences_computed": filled.num_computed,
            "reference_sequences_cached": filled.num_cached,
        }
    if policy is None:
        release_memory()
        policy = prepare_policy(prepared)
    source = offline_source(prepared, reference.of(prepared.data.train))
    session = Session(
        prepared=prepared,
        run=run,
        policy=policy,
        reference=reference,
        objective=Objective(terms=recipe.loss.terms, options=loss_options(recipe)),
        source=source,
        state=_new_state(recipe, policy, source),
        metrics_offset=0,
        begun=begun,
        startup_seconds=0.0,
        reference_seconds=reference_seconds,
    )
    if resumes:
        assert run.checkpoint is not None
        session.metrics_offset = load_checkpoint(run.checkpoint, session.state, identity=_identity(session))
        console.print(f"Going on after step {session.state.step} of {source.num_steps} ({run.checkpoint})")
    elif not has_own_reference:
        check_start(session)
    _describe(session)
    if keeps_files:
        _write_first_files(session)
    session.startup_seconds = time.monotonic() - begun - reference_seconds
    return session


@torch.no_grad()
def check_start(session: Session) -> None:
    """Before the first step the policy is the reference, so their log-probs may differ by noise only.

    Compares the first row with its cached values. The noise floor is the dtype's, or what another order of
    the same pairs in the row changes, where that is more. Raises RunError with the likely causes.
    """
    pairs = session.source.first_plan[0][0][0]
    builder, policy = session.source.builder, session.state.policy
    row = builder.build(pairs)
    output = policy(row.row)
    sums = output.sums.view(-1, 2)  # [P, (chosen, rejected)]
    turned = policy(builder.build(pairs[::-1].copy()).row).sums.view(-1, 2).flip(0)
    reference = torch.stack((row.reference_chosen, row.reference_rejected), dim=1)
    difference = (sums - reference).abs()
    # Errors of tokens are independent, so a sequence's grows with the root of its length.
    tokens = output.num_tokens.view(-1, 2)
    allowed = NOISE_PER_TOKEN[session.prepared.precision.activations] * tokens.sqrt()
    allowed = torch.maximum(allowed * (sums / tokens).abs().clamp(min=1.0), 10 * (turned - sums).abs().max())
    if not bool((difference <= allowed).all()):
        worst = int((difference - allowed).nan_to_num(torch.inf).argmax())
        measured, noise = float(difference.flatten()[worst]), float(allowed.flatten()[worst])
        raise RunError(
            f"the policy at step 0 is not its cached reference: a log-prob differs by {measured:.3g} nats, "
            f"noise explains {noise:.2g}; likely causes: dropout or router noise is on, the model directory "
            "changed while it was read, or other code filled the cache (run with another reference.cache_dir "
            "to compute it again)"
        )


def run_steps(session: Session, interruption: Interruption) -> None:
    """The training loop. Saves a checkpoint when one is due and when the run is interrupted."""
    recipe, state = session.prepared.recipe, session.state
    lines = TrainingLines(session.prepared.console, num_steps=session.source.num_steps)
    with MetricsLog(session.run.metrics, offset=session.metrics_offset) as log, interruption.deferred():
        if state.step == 0:
            evaluate(session, log)
        begun = time.monotonic()
        for batch in session.source:
            record = optimizer_step(session, batch)
            seconds = time.monotonic() - begun
            state.train_seconds += seconds
            if state.step % recipe.logging.every_steps == 0:
                record |= {
                    "tokens_per_second": batch.num_tokens / seconds,
                    "pairs_per_second": batch.num_pairs / seconds,
                    "seconds": seconds,
                }
                log.write(record)
                track(session.prepared.accelerator, record)
                lines.show(record, seconds_left=_seconds_left(session))
            if _is_due(state.step, recipe.train.eval_every_steps) or state.step == session.source.num_steps:
                evaluate(session, log)
            if _is_due(state.step, recipe.checkpoint.every_steps) or interruption.signum is not None:
                checkpoint(session, log)
            if interruption.signum is not None:
                raise Interrupted(interruption.signum)
            begun = time.monotonic()  # the next step's time has its batch's layout in it


def optimizer_step(session: Session, batch: GlobalBatch) -> dict[str, Any]:
    """Gradients of the whole global batch, clipped; one AdamW step; the step's metrics."""
    state, recipe = session.state, session.prepared.recipe
    sums = train_step(session, batch)
    max_norm = recipe.optim.max_grad_norm
    parameters = [p for p in state.policy.parameters() if p.grad is not None]
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, torch.inf if max_norm is None else max_norm)
    learning_rate = float(state.scheduler.get_last_lr()[0])
    if torch.isfinite(grad_norm):
        state.optimizer.step()
    elif recipe.train.stop_on_nonfinite:
        raise RunError(_nonfinite_message(session, batch))
    else:
        session.prepared.console.print(f"Step {state.step + 1}: gradients are not finite, no update made")
    state.scheduler.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.num_pairs += batch.num_pairs
    state.num_tokens += batch.num_tokens
    return {
        "split": "train",
        "step": state.step,
        "epoch": batch.epoch,
        **averages(sums),
        "grad_norm": float(grad_norm),
        "learning_rate": learning_rate,
        "pairs": batch.num_pairs,
        "rows": batch.num_rows,
        "tokens": batch.num_tokens,
    }


def train_step(session: Session, batch: GlobalBatch) -> Tensor:
    """One forward and one backward a row; leaves the gradient of the step's loss in the parameters.

    Returns the rows' metric sums, see metrics.py.
    """
    objective, policy = session.objective, session.state.policy
    sums = zero_sums(session.prepared.device)
    for row in batch.rows:
        output = policy(row.row)  # [S] summed completion log-probs
        policy_logps, reference_logps = split_pairs(output, row)  # [P] each side
        losses = weighted_sum(objective.terms, policy_logps, reference_logps, objective.options)
        losses = losses * row.weights  # [P]
        # Over all rows this adds up to the mean over the step's pairs: no row's mean is ever averaged.
        (losses.sum() / batch.num_pairs).backward()
        sums += row_sums(output, policy_logps, reference_logps, losses, beta=objective.options.beta)
    return sums


def evaluate(session: Session, log: MetricsLog) -> None:
    """Metrics of every held-out set, into the log, the trackers and the state."""
    prepared, begun = session.prepared, time.monotonic()
    for held_out in prepared.data.eval:
        builder = row_builder(prepared, held_out.pairs, session.reference.of(held_out.pairs))
        with progress_bar(
            prepared.console, f"Evaluating {held_out.name}", held_out.pairs.num_pairs, "pairs"
        ) as bar:
            metrics = evaluate_pairs(
                session.state.policy,
                builder,
                terms=session.objective.terms,
                options=session.objective.options,
                token_budget=reference_token_budget(prepared.recipe),
                progress=bar,
            )
        session.state.evaluation[held_out.name] = metrics
        record = {"split": "eval", "source": held_out.name, "step": session.state.step, **metrics}
        record["pairs"] = held_out.pairs.num_pairs
        log.write(record)
        track(prepared.accelerator, record)
        prepared.console.print(
            f"  held out ({held_out.name}) after step {session.state.step}: "
            f"reward accuracy {metrics['rewards/accuracies']:.3f}, margin {metrics['rewards/margins']:.4f}, "
            f"loss {metrics['loss']:.4f}"
        )
    session.eval_seconds += time.monotonic() - begun


def checkpoint(session: Session, log: MetricsLog) -> None:
    """Save the full state, so that the run can go on from here as if it had never stopped."""
    path = save_checkpoint(
        session.run.checkpoints,
        session.state,
        metrics_offset=log.offset,
        identity=_identity(session),
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
    run.update(status="finished", totals=totals(session), evaluation=state.evaluation)
    rate = state.num_pairs / max(state.train_seconds, 1e-9)
    prepared.console.print(
        f"Done: {state.step} steps, {state.num_pairs:,} pairs in {format_seconds(state.train_seconds)} "
        f"({rate:,.1f} pairs/s). Model: {run.model}; metrics: {run.metrics}"
    )


def totals(session: Session) -> dict[str, Any]:
    """`run.json`'s totals: `train_seconds` and rates of the whole run, other seconds of this process."""
    state = session.state
    seconds = max(state.train_seconds, 1e-9)
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
    }


def _new_state(recipe: Recipe, policy: LoadedModel, source: OfflineSource) -> TrainState:
    settings, num_steps = recipe.optim, source.num_steps
    optimizer = adamw(
        policy.scorer,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    scheduler = learning_rate_schedule(
        optimizer,
        settings.schedule,
        num_steps=num_steps,
        warmup_steps=num_warmup_steps(
            num_steps, warmup_ratio=settings.warmup_ratio, warmup_steps=settings.warmup_steps
        ),
        min_lr_ratio=settings.min_lr_ratio,
    )
    return TrainState(policy=policy.scorer, optimizer=optimizer, scheduler=scheduler, source=source)


def _identity(session: Session) -> dict[str, str]:
    """What a checkpoint must share with the run that goes on from it."""
    return {
        "data": session.prepared.data.fingerprint,
        "plan": session.source.steps_fingerprint,
        "reference": session.reference.fingerprint,
    }


def _write_first_files(session: Session) -> None:
    prepared, run = session.prepared, session.run
    packing = inspect_recipe_packing(prepared.recipe, prepared.data)
    begin_run(run, prepared.recipe, str(prepared.device))
    drop_later_checkpoints(run.checkpoints, session.state.step)
    write_json_atomically(run.root / "data_report.json", prepared.data.report)
    write_text_atomically(run.root / "packing_report.json", to_json(packing))
    session.reference.save(run.reference)
    run.update(fingerprints=_identity(session) | {"packing": session.source.first_plan.fingerprint})
    if prepared.recipe.logging.trackers:
        start_trackers(prepared.accelerator, prepared.recipe)


def _describe(session: Session) -> None:
    """What will run, before it runs."""
    prepared, source = session.prepared, session.source
    recipe, console = prepared.recipe, prepared.console
    num_parameters = sum(p.numel() for p in session.policy.scorer.parameters())
    precision = str(prepared.precision.parameters).removeprefix("torch.")
    if prepared.precision.autocast is not None:
        precision += f" with {str(prepared.precision.autocast).removeprefix('torch.')} autocast"
    attention = session.policy.attention
    loss = " + ".join(f"{weight:g} {name}" if weight != 1 else name for name, weight in recipe.loss.terms)
    console.print(
        f"Policy: {recipe.model.path}, {format_count(num_parameters)} parameters, {precision} on "
        f"{prepared.device}; attention: {attention.name} ({attention.reason})"
    )
    console.print(
        f"Training: {source.num_steps:,} steps of {recipe.packing.pairs_per_step} pairs, "
        f"{recipe.packing.mode} rows of up to {recipe.packing.token_budget:,} tokens; "
        f"loss {loss}, beta {recipe.loss.beta:g}, lr {recipe.optim.lr:g} {recipe.optim.schedule}"
    )
    oversize = source.first_plan.oversize_pairs
    if len(oversize):
        longest = int(source.first_plan.row_tokens[oversize].max())
        console.print(
            f"Note: {len(oversize):,} pairs exceed packing.token_budget ({recipe.packing.token_budget:,}) "
            f"and get a row of their own, the longest of {longest:,} tokens; nothing is cut"
        )


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def _seconds_left(session: Session) -> float:
    state = session.state
    return state.train_seconds / state.step * (session.source.num_steps - state.step)


def _nonfinite_message(session: Session, batch: GlobalBatch) -> str:
    rows = session.prepared.data.train.row_numbers
    numbers = sorted(int(rows[pair]) for row in batch.rows for pair in row.pair_indices)
    return (
        f"step {session.state.step + 1}: loss or gradient is not finite, and no update was made; lower "
        f"optim.lr, or look at the step's rows of data.train ({', '.join(map(str, numbers[:10]))}"
        f"{', ...' if len(numbers) > 10 else ''})"
    )
