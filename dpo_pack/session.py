"""Everything of a run before its first step: data, reference log-probs, policy, optimizer, first files."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from dpo_pack import ranks
from dpo_pack.checkpoint import Identity, Place, TrainState, load_checkpoint
from dpo_pack.checkpoint_dir import drop_later_checkpoints
from dpo_pack.checkpoint_writer import CheckpointWriter
from dpo_pack.data.lengths import IntArray
from dpo_pack.data.packing_report import to_json
from dpo_pack.describe import describe_run
from dpo_pack.files import write_json_atomically, write_text_atomically
from dpo_pack.health import RunFacts
from dpo_pack.identity import run_identity
from dpo_pack.interrupts import Interruption
from dpo_pack.losses import Objective
from dpo_pack.memory_report import print_memory_estimate
from dpo_pack.models import LoadedModel
from dpo_pack.monitoring import run_facts, training_meter
from dpo_pack.moving_reference import MovingReference, check_followable
from dpo_pack.nonfinite import NonfiniteGuard
from dpo_pack.offline import OfflineSource
from dpo_pack.online.build import build_judge, build_source, build_win_rate, check_generator
from dpo_pack.online.source import OnlineSource
from dpo_pack.online.win_rate import WinRate
from dpo_pack.optim import build_optimizer, learning_rate_schedule, num_warmup_steps
from dpo_pack.prepare import (
    Prepared,
    prepare,
    prepare_data,
    prepare_moving_reference,
    prepare_policy,
    prepare_prompts,
    recipe_objective,
)
from dpo_pack.prepare_batches import inspect_recipe_packing, offline_source
from dpo_pack.prepare_reference import prepare_reference, resume_reference
from dpo_pack.recipe import Recipe
from dpo_pack.reference import FrozenReference
from dpo_pack.reference_pass import release_memory
from dpo_pack.run_dir import RunDir, begin_run, choose_checkpoint
from dpo_pack.seeding import seed_everything
from dpo_pack.selection import Selection, find_selection
from dpo_pack.start_guard import check_start
from dpo_pack.strategy import DistributedPolicy, distribute_policy
from dpo_pack.throughput import Meter, PhaseClock
from dpo_pack.trackers import start_trackers


@dataclass(slots=True, kw_only=True)
class Session:
    """One process's part of a run: what the loop works with, and where its time went."""

    prepared: Prepared
    run: RunDir
    policy: LoadedModel  # as loaded: scorer and adapter; `state.policy` is its scorer
    reference: FrozenReference | MovingReference | None  # None: the loss needs none, or the source has it
    objective: Objective
    source: OfflineSource | OnlineSource
    win_rate: WinRate | None  # of an online run with held-out prompts
    state: TrainState
    distributed_policy: DistributedPolicy  # the policy for forwards whose gradients are wanted
    guard: NonfiniteGuard
    clock: PhaseClock
    facts: RunFacts
    meter: Meter
    identity: Identity
    selection: Selection | None  # None: nothing is held out
    writer: CheckpointWriter
    place: Place  # the last one at which the run can go on
    interruption: Interruption
    begun: float  # time.monotonic()
    startup_seconds: float
    reference_seconds: float
    eval_seconds: float = 0.0
    saved: Place | None = None  # the one that the newest checkpoint is of


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a session begins with, where offline and online runs differ."""

    policy: LoadedModel
    source: OfflineSource | OnlineSource
    reference: FrozenReference | MovingReference | None
    reference_seconds: float = 0.0
    win_rate: WinRate | None = None


def start_session(
    recipe: Recipe, run: RunDir, console: Console, interruption: Interruption, *, keeps_files: bool
) -> Session:
    """Data, reference log-probs, policy, optimizer: everything before the first step."""
    begun = time.monotonic()
    seed_everything(recipe.seed)
    objective = recipe_objective(recipe)
    prepared = prepare(recipe, console, prepare_data if recipe.online is None else prepare_prompts)
    selection = find_selection(recipe, _eval_sets(prepared))
    choose_checkpoint(run, recipe, console.print)
    if not keeps_files:
        print_memory_estimate(prepared, objective)
    begin = begin_offline if recipe.online is None else begin_online
    beginning = begin(prepared, objective, run)
    policy, source, reference = beginning.policy, beginning.source, beginning.reference
    state = _new_state(recipe, policy, source)
    if isinstance(reference, MovingReference):
        check_followable(policy.scorer)
        state.reference = reference.scorer
    session = Session(
        prepared=prepared,
        run=run,
        policy=policy,
        reference=reference,
        objective=objective,
        source=source,
        win_rate=beginning.win_rate,
        state=state,
        distributed_policy=distribute_policy(policy.scorer, prepared.strategy),
        guard=NonfiniteGuard(state.optimizer, stops=recipe.train.stop_on_nonfinite, device=prepared.device),
        clock=PhaseClock(device=prepared.device),
        facts=run_facts(recipe, objective, source.num_steps, prepared.data.train),
        meter=training_meter(prepared, policy, source),
        identity=run_identity(prepared, policy, source, reference, selection),
        selection=selection,
        writer=CheckpointWriter(run.checkpoints, in_background=recipe.checkpoint.asynchronous),
        place=Place(step=0, metrics_offset=0, source=source.state_dict()),
        interruption=interruption,
        begun=begun,
        startup_seconds=0.0,
        reference_seconds=beginning.reference_seconds,
    )
    if run.checkpoint is not None:
        resumption = load_checkpoint(run.checkpoint, session.state, identity=session.identity)
        session.place = Place(
            step=session.state.step, metrics_offset=resumption.metrics_offset, source=source.state_dict()
        )
        console.print(f"Going on after step {session.state.step} of {source.num_steps} ({run.checkpoint})")
        for note in resumption.notes:
            console.print(note)
    elif isinstance(source, OfflineSource) and isinstance(reference, FrozenReference):
        _check_start(session, source)
    describe_run(prepared, policy, source)
    if keeps_files:
        with ranks.first_goes_first():  # the others find the directory as the first has made it
            if ranks.is_first():
                _write_first_files(session)
        ranks.require_shared(run.root, "output_dir")
        if recipe.logging.trackers:
            start_trackers(prepared.accelerator, recipe, _tracking_id(run))
    session.startup_seconds = time.monotonic() - begun - session.reference_seconds
    return session


def begin_offline(prepared: Prepared, objective: Objective, run: RunDir) -> Beginning:
    """The policy and the pairs of the recipe's data, with their reference log-probs."""
    recipe, console = prepared.recipe, prepared.console
    resumes = run.checkpoint is not None
    has_own_reference = recipe.reference.path is not None
    moves = recipe.reference.sync is not None
    policy = None if has_own_reference or resumes else prepare_policy(prepared)
    reference: FrozenReference | MovingReference | None = None
    reference_seconds = 0.0
    if not objective.needs_reference:
        console.print("Reference: none, the loss needs no reference")
    elif moves:
        reference = prepare_moving_reference(prepared)
        console.print("Reference: follows the policy; a second model runs live, nothing is cached")
    elif resumes:
        reference, reference_seconds = resume_reference(prepared, run.resumed_reference)
    else:
        filled = prepare_reference(prepared, None if has_own_reference else policy)
        reference_seconds = filled.seconds
        reference = FrozenReference.take(filled.cache, prepared.tables, per_token=filled.per_token)
        run.info["totals"] = {
            "reference_sequences_computed": filled.num_computed,
            "reference_sequences_cached": filled.num_cached,
        }
    if policy is None:
        release_memory()
        policy = prepare_policy(prepared)
    source = offline_source(prepared, reference if isinstance(reference, FrozenReference) else None)
    return Beginning(policy=policy, source=source, reference=reference, reference_seconds=reference_seconds)


def begin_online(prepared: Prepared, objective: Objective, run: RunDir) -> Beginning:
    """The policy, and pairs that it will write itself, see online/."""
    recipe, console = prepared.recipe, prepared.console
    check_generator(prepared)
    policy = prepare_policy(prepared)
    judge = build_judge(prepared)
    moves = objective.needs_reference and recipe.reference.sync is not None
    source = build_source(
        prepared,
        policy,
        judge,
        rollouts=run.rollouts,
        needs_reference=objective.needs_reference and not moves,
    )
    reference = "live, on the rows of each step" if objective.needs_reference else "none, the loss needs none"
    console.print(f"Reference: {reference}")
    return Beginning(
        policy=policy,
        source=source,
        reference=prepare_moving_reference(prepared) if moves else None,
        win_rate=build_win_rate(prepared, policy, judge),
    )


def _check_start(session: Session, source: OfflineSource) -> None:
    """The policy as it starts must be its cached reference, unless the recipe names another."""
    if session.prepared.recipe.reference.path is None:
        check_start(
            session.state.policy,
            source.builder,
            _first_row(source),
            dtype=session.prepared.precision.activations,
        )


def _first_row(source: OfflineSource) -> IntArray:
    """Pairs of the first step's first row, the same on every rank."""
    return next(row for rows in source.first_plan[0] for row in rows)


def _new_state(recipe: Recipe, policy: LoadedModel, source: OfflineSource | OnlineSource) -> TrainState:
    settings, num_steps = recipe.optim, source.num_steps
    optimizer = build_optimizer(
        settings.name,
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


def _eval_sets(prepared: Prepared) -> list[str]:
    """Names of what is held out, in the recipe's order."""
    if prepared.data.prompts is not None:
        return list(prepared.data.prompts.eval)
    return [held_out.name for held_out in prepared.data.eval]


def _write_first_files(session: Session) -> None:
    prepared, run = session.prepared, session.run
    is_offline = isinstance(session.source, OfflineSource)
    packing = inspect_recipe_packing(prepared.recipe, prepared.data) if is_offline else None
    begin_run(run, prepared.recipe, str(prepared.device))
    drop_later_checkpoints(run.checkpoints, session.state.step)
    write_json_atomically(run.root / "data_report.json", prepared.data.report)
    if packing is not None:
        write_text_atomically(run.root / "packing_report.json", to_json(packing))
    if isinstance(session.reference, FrozenReference):
        session.reference.save(run.reference)
    fingerprints = dict(session.identity.fingerprints)
    if isinstance(session.source, OfflineSource):
        fingerprints["packing"] = session.source.first_plan.fingerprint
    run.update(fingerprints=fingerprints)


def _tracking_id(run: RunDir) -> str:
    """What trackers know the run by, however often it goes on."""
    if "tracking_id" not in run.info:
        run.update(tracking_id=uuid.uuid4().hex[:8])
    return str(run.info["tracking_id"])


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
