"""Prepares a run for its first step: data, reference log-probs, policy, optimizer, first files."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from dpo_pack.losses import Objective
from dpo_pack.model.parallel import DistributedPolicy, distribute_policy
from dpo_pack.model.routing import RouterBalance
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.online.win_rate import WinRate
from dpo_pack.packing.lengths import PairSizes
from dpo_pack.packing.report import to_json
from dpo_pack.proofs.first_step import check_start
from dpo_pack.recipe.load import Recipe, source_names
from dpo_pack.reference.frozen import FrozenReference
from dpo_pack.run.batches import offline_source, packing_report, trained_pair_sizes
from dpo_pack.run.checkpoint.directory import drop_later_checkpoints
from dpo_pack.run.checkpoint.state import Identity, TrainState, load_checkpoint
from dpo_pack.run.checkpoint.writer import CheckpointWriter
from dpo_pack.run.describe import describe_run
from dpo_pack.run.evaluation import Evaluator
from dpo_pack.run.memory_estimate import (
    largest_row,
    print_measured_memory,
    print_memory_estimate,
    stays_gathered,
)
from dpo_pack.run.online import build_online, check_generator, live_reference
from dpo_pack.run.prepare import (
    Prepared,
    load_moving_reference,
    load_policy,
    prepare,
    prepare_data,
    prepare_prompts,
    print_columns_not_read,
    recipe_objective,
)
from dpo_pack.run.recording import Recorder, Seconds, initial_loss
from dpo_pack.run.reference_stage import prepare_reference, resume_reference
from dpo_pack.run.run_dir import RunDir, begin_run, choose_checkpoint
from dpo_pack.run.samples import Sampler
from dpo_pack.run.saving import Saver, run_identity
from dpo_pack.run.selection import find_selection
from dpo_pack.system import ranks
from dpo_pack.system.console import keep_log
from dpo_pack.system.files import write_json_atomically, write_text_atomically
from dpo_pack.system.interrupts import Interruption
from dpo_pack.system.memory import release_memory
from dpo_pack.system.progress import TrainingLines
from dpo_pack.system.seeding import seed_everything
from dpo_pack.training.batches import BatchSource
from dpo_pack.training.health import RunFacts
from dpo_pack.training.nonfinite import NonfiniteGuard
from dpo_pack.training.offline import OfflineSource
from dpo_pack.training.optim import build_optimizer, learning_rate_schedule, num_warmup_steps
from dpo_pack.training.pair_log import PairLog
from dpo_pack.training.references import CachedReference, Reference, check_followable
from dpo_pack.training.throughput import Meter, PhaseClock, device_peak
from dpo_pack.training.trackers import start_trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The objects that a training step uses."""

    state: TrainState  # weights, optimizer, schedule, counters: all that a checkpoint holds
    policy: DistributedPolicy  # runs the policy on all ranks, for forward passes that need gradients
    reference: Reference
    objective: Objective
    guard: NonfiniteGuard
    clock: PhaseClock
    interruption: Interruption
    max_grad_norm: float | None
    seed: int
    balance: RouterBalance | None = None  # the load-balancing loss of a mixture of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """This process's part of a run that is ready for its next step: four objects, each with one task."""

    run: RunDir
    learner: Learner  # takes the steps
    evaluator: Evaluator  # evaluates the policy on the held-out sets
    recorder: Recorder  # writes and prints the results of steps and evaluations
    saver: Saver  # saves the state from which the run can resume

    @property
    def state(self) -> TrainState:
        return self.learner.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The objects at the start of a run that offline and online runs create in different ways."""

    policy: LoadedModel
    source: BatchSource
    reference: Reference
    sizes: PairSizes  # tokens and FLOPs of each pair; the meter adds them up
    peak_flops: float | None  # of this device, per second; None if no MFU is reported
    frozen: FrozenReference | None = None  # reference log-probs to write to `output_dir`
    reference_seconds: float = 0.0
    win_rate: WinRate | None = None


def start_session(
    recipe: Recipe, run: RunDir, console: Console, interruption: Interruption, *, is_dry: bool
) -> Session:
    """Prepares data, reference log-probs, policy and optimizer for the first step, or loads a checkpoint.

    A dry run prints the memory that the run needs, and writes nothing into `output_dir`.
    """
    seconds = Seconds(begun=time.monotonic())
    seed_everything(recipe.seed)
    objective = recipe_objective(recipe)
    prepared = prepare(recipe, console, prepare_data if recipe.online is None else prepare_prompts)
    print_columns_not_read(prepared.data, console)
    selection = find_selection(recipe, prepared.eval_names)
    choose_checkpoint(run, recipe, console.print)
    pairs = None if recipe.online is not None else _planned_pairs(prepared)
    first_plan = None if pairs is None else pairs.first_plan
    if is_dry:
        print_memory_estimate(prepared, objective, first_plan)
    gathers_once = stays_gathered(prepared, objective, first_plan)
    if pairs is None:
        beginning = begin_online(prepared, objective, run)
    else:
        beginning = begin_offline(prepared, objective, run, pairs)
    policy, source, reference = beginning.policy, beginning.source, beginning.reference
    seconds.reference = beginning.reference_seconds
    state = _new_state(recipe, beginning)
    learner = Learner(
        state=state,
        policy=distribute_policy(
            policy.scorer, prepared.strategy, prepared.accelerator, stays_gathered=gathers_once
        ),
        reference=reference,
        objective=objective,
        guard=NonfiniteGuard(stops=recipe.train.stop_on_nonfinite, device=prepared.device),
        clock=PhaseClock(device=prepared.device),
        interruption=interruption,
        max_grad_norm=recipe.optim.max_grad_norm,
        seed=recipe.seed,
        balance=prepared.policy_facts.balance,
    )
    identity = run_identity(
        prepared, policy, source, selection, moves=reference.moving is not None, frozen=beginning.frozen
    )
    sampler = Sampler(prepared, policy.scorer, run.samples)
    metrics_offset = _load_checkpoint(run, state, identity, console)
    recorder = _recorder(prepared, run, learner, beginning, seconds, metrics_offset)
    describe_run(prepared, policy, first_plan, num_steps=source.num_steps)
    if is_dry:
        _measure_memory(prepared, learner, pairs)
    else:
        with ranks.first_goes_first():  # the other ranks go on when rank 0 has written the files
            if ranks.is_first():
                _write_first_files(prepared, run, state, identity, pairs, beginning.frozen)
                if recorder.pairs is not None:
                    recorder.pairs.cut_after(state.step)
                sampler.cut_after(state.step)
        ranks.require_shared(run.root, "output_dir")
        if recipe.logging.trackers:
            mlflow_run = start_trackers(
                prepared.accelerator,
                recipe.model_dump(mode="json"),
                trackers=recipe.logging.trackers,
                directory=recipe.output_dir / "trackers",
                name=recipe.logging.run_name or recipe.output_dir.name,
                run_id=_tracking_id(run),
                goes_on=run.has_own_checkpoint,
                mlflow_run=run.info.get("mlflow_run") if run.has_own_checkpoint else None,
            )
            if mlflow_run is not None:
                run.update(mlflow_run=mlflow_run)
    saver = Saver(
        recipe=recipe,
        run=run,
        state=state,
        policy=policy,
        tokenizer=prepared.tokenizer,
        identity=identity,
        selection=selection,
        recorder=recorder,
        writer=CheckpointWriter(run.checkpoints, in_background=recipe.checkpoint.asynchronous),
    )
    evaluator = Evaluator(
        prepared=prepared,
        reference=reference,
        objective=objective,
        win_rate=beginning.win_rate,
        selection=selection,
        interruption=interruption,
        every_steps=recipe.train.eval_every_steps,
        sampler=sampler,
    )
    seconds.startup = time.monotonic() - seconds.begun - seconds.reference
    return Session(run=run, learner=learner, evaluator=evaluator, recorder=recorder, saver=saver)


def _planned_pairs(prepared: Prepared) -> OfflineSource:
    """Returns the source of the recipe's pairs, without reference log-probs. Its first epoch is planned."""
    return offline_source(
        prepared.recipe,
        prepared.data,
        prepared.policy_facts.shape,
        device=prepared.device,
        equal_rows=prepared.strategy.shards,
        counts_copies=prepared.policy_facts.balance is not None,
    )


def begin_offline(prepared: Prepared, objective: Objective, run: RunDir, source: OfflineSource) -> Beginning:
    """Loads the policy, and gets the reference log-probs of the recipe's pairs."""
    recipe, console, train = prepared.recipe, prepared.console, prepared.data.train
    resumes = run.checkpoint is not None
    policy_is_reference = recipe.reference.path is None
    policy = load_policy(prepared) if policy_is_reference and not resumes else None
    frozen: FrozenReference | None = None
    moving: Reference | None = None
    seconds = 0.0
    if not objective.needs_reference:
        console.print("Reference: none, the loss needs no reference")
    elif recipe.reference.sync is not None:
        moving = load_moving_reference(prepared)
        console.print("Reference: follows the policy; a second model runs live, nothing is cached")
    elif resumes:
        frozen, seconds = resume_reference(prepared, run.resumed_reference)
    else:
        filled = prepare_reference(prepared, policy)
        frozen, seconds = filled.values(), filled.seconds
        run.info["totals"] = {
            "reference_sequences_computed": filled.num_computed,
            "reference_sequences_cached": filled.num_cached,
        }
    if policy is None:
        release_memory()
        policy = load_policy(prepared)
    reference = moving or CachedReference(values=frozen)
    if frozen is not None:
        source.use_reference(frozen.of(train))
        if policy_is_reference and not resumes:
            first_row = next(row for rows in source.first_plan.pack_step(0) for row in rows)
            check_start(policy.scorer, source.builder, first_row, dtype=prepared.precision.activations)
    return Beginning(
        policy=policy,
        source=source,
        reference=reference,
        sizes=trained_pair_sizes(prepared, source, trains_adapter=policy.adapter is not None),
        peak_flops=device_peak(prepared.device, policy.scorer.compute_dtype),
        frozen=frozen,
        reference_seconds=seconds,
    )


def begin_online(prepared: Prepared, objective: Objective, run: RunDir) -> Beginning:
    """Loads the policy, and builds the source of pairs, which are made from the policy's own completions."""
    check_generator(prepared)
    policy = load_policy(prepared)
    source, win_rate = build_online(prepared, policy, rollouts=run.rollouts)
    if objective.needs_reference:
        reference: Reference = live_reference(prepared, policy)
        prepared.console.print("Reference: live, on the rows of each step")
    else:
        reference = CachedReference(values=None)
        prepared.console.print("Reference: none, the loss needs no reference")
    unknown = np.zeros(prepared.data.train.num_pairs, dtype=np.int64)  # the pairs do not exist yet
    return Beginning(
        policy=policy,
        source=source,
        reference=reference,
        sizes=PairSizes(tokens=unknown, costs=unknown.astype(np.float64), merging=None),
        peak_flops=None,  # generation and judges take most of an online run's time
        win_rate=win_rate,
    )


def _new_state(recipe: Recipe, beginning: Beginning) -> TrainState:
    settings, policy, num_steps = recipe.optim, beginning.policy.scorer, beginning.source.num_steps
    if beginning.reference.moving is not None:
        check_followable(policy, beginning.reference.moving)
    optimizer = build_optimizer(
        settings.name,
        policy,
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
    return TrainState(
        policy=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        source=beginning.source,
        reference=beginning.reference.moving,
    )


def _recorder(
    prepared: Prepared, run: RunDir, learner: Learner, beginning: Beginning, seconds: Seconds, offset: int
) -> Recorder:
    recipe, train, num_steps = prepared.recipe, prepared.data.train, beginning.source.num_steps
    loss_names = [name for name, _ in recipe.loss.terms]
    return Recorder(
        prepared=prepared,
        console=prepared.console,
        run=run,
        every_steps=recipe.logging.every_steps,
        lines=TrainingLines(prepared.console, num_steps=num_steps),
        clock=learner.clock,
        meter=Meter(sizes=beginning.sizes, peak_flops=beginning.peak_flops),
        facts=RunFacts(
            num_steps=num_steps,
            beta=recipe.loss.beta,
            initial_loss=initial_loss(learner.objective, train, loss_names),
            router_aux_coef=0.0 if learner.balance is None else learner.balance.coefficient,
        ),
        guard=learner.guard,
        pairs=PairLog(
            directory=run.pairs,
            table=train,
            source_names=source_names(recipe.data.train),
            beta=recipe.loss.beta,
            has_reference=learner.objective.needs_reference,
        )
        if recipe.logging.pairs
        else None,
        seconds=seconds,
        offset=offset,
    )


def _load_checkpoint(run: RunDir, state: TrainState, identity: Identity, console: Console) -> int:
    """Loads the run's checkpoint, if any, into `state`; returns how many bytes of metrics.jsonl to keep."""
    if run.checkpoint is None:
        return 0
    metrics_offset, notes = load_checkpoint(run.checkpoint, state, identity=identity)
    console.print(f"Going on after step {state.step} of {state.source.num_steps} ({run.checkpoint})")
    for note in notes:
        console.print(note)
    # A run that resumes from a checkpoint in another directory begins a new metrics.jsonl.
    return metrics_offset if run.has_own_checkpoint else 0


def _measure_memory(prepared: Prepared, learner: Learner, pairs: OfflineSource | None) -> None:
    """On CUDA, prints the peak memory of a forward and backward pass of the largest row. Changes nothing."""
    if prepared.device.type == "cuda" and pairs is not None:
        row = pairs.builder.build(largest_row(pairs.first_plan, rank=ranks.rank())).row
        print_measured_memory(learner.policy, learner.state.optimizer, row, prepared.device, prepared.console)


def _write_first_files(
    prepared: Prepared,
    run: RunDir,
    state: TrainState,
    identity: Identity,
    pairs: OfflineSource | None,
    frozen: FrozenReference | None,
) -> None:
    fingerprints, packing = dict(identity.fingerprints), None
    if pairs is not None:
        fingerprints["packing"] = pairs.first_plan.fingerprint
        packing = packing_report(prepared.recipe, prepared.data, prepared.policy_facts.shape, pairs)
    begin_run(run, prepared.recipe, str(prepared.device))
    keep_log(prepared.console, run.root / "console.log")
    drop_later_checkpoints(run.checkpoints, state.step)
    write_json_atomically(run.root / "data_report.json", prepared.data.report)
    if packing is not None:
        write_text_atomically(run.root / "packing_report.json", to_json(packing))
    if frozen is not None:
        frozen.save(run.reference)
    run.update(fingerprints=fingerprints)


def _tracking_id(run: RunDir) -> str:
    """Returns the id of the run for trackers. It stays the same each time the run resumes."""
    if "tracking_id" not in run.info:
        run.update(tracking_id=uuid.uuid4().hex[:8])
    return str(run.info["tracking_id"])
