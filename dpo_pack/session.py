"""Everything of a run before its first step: data, reference log-probs, policy, optimizer, first files."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console

from dpo_pack.checkpoint import (
    TrainState,
    drop_later_checkpoints,
    load_checkpoint,
    seed_everything,
)
from dpo_pack.console import format_count
from dpo_pack.data.packing_report import to_json
from dpo_pack.files import write_json_atomically, write_text_atomically
from dpo_pack.health import RunFacts
from dpo_pack.losses import Objective
from dpo_pack.models import LoadedModel
from dpo_pack.monitoring import run_facts, training_meter
from dpo_pack.moving_reference import MovingReference
from dpo_pack.nonfinite import NonfiniteGuard
from dpo_pack.online.build import build_judge, build_source, build_win_rate
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
from dpo_pack.prepare_reference import prepare_reference
from dpo_pack.recipe import Recipe
from dpo_pack.recipe_models import base_fingerprint, needs_token_logps, policy_model
from dpo_pack.reference import FrozenReference
from dpo_pack.reference_pass import release_memory
from dpo_pack.run_dir import RunDir, begin_run
from dpo_pack.sources import OfflineSource
from dpo_pack.start_guard import check_start
from dpo_pack.throughput import Meter, PhaseClock
from dpo_pack.trackers import start_trackers


@dataclass(slots=True, kw_only=True)
class Session:
    """One process's part of a run: what the loop works with, and where its time went."""

    prepared: Prepared
    run: RunDir
    policy: LoadedModel
    reference: FrozenReference | MovingReference | None  # None: the loss needs none, or the source has it
    objective: Objective
    source: OfflineSource | OnlineSource
    win_rate: WinRate | None  # of an online run with held-out prompts
    state: TrainState
    guard: NonfiniteGuard
    clock: PhaseClock
    facts: RunFacts
    meter: Meter
    metrics_offset: int
    begun: float  # time.monotonic()
    startup_seconds: float
    reference_seconds: float
    eval_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a session begins with, where offline and online runs differ."""

    policy: LoadedModel
    source: OfflineSource | OnlineSource
    reference: FrozenReference | MovingReference | None
    reference_seconds: float = 0.0
    win_rate: WinRate | None = None


def start_session(recipe: Recipe, run: RunDir, console: Console, *, keeps_files: bool) -> Session:
    """Data, reference log-probs, policy, optimizer: everything before the first step."""
    begun = time.monotonic()
    seed_everything(recipe.seed)
    objective = recipe_objective(recipe)
    prepared = prepare(recipe, console, prepare_data if recipe.online is None else prepare_prompts)
    resumes = run.checkpoint is not None
    begin = begin_offline if recipe.online is None else begin_online
    beginning = begin(prepared, objective, run)
    policy, source, reference = beginning.policy, beginning.source, beginning.reference
    state = _new_state(recipe, policy, source)
    if isinstance(reference, MovingReference):
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
        guard=NonfiniteGuard(state.optimizer, stops=recipe.train.stop_on_nonfinite, device=prepared.device),
        clock=PhaseClock(device=prepared.device),
        facts=run_facts(recipe, objective, source.num_steps, prepared.data.train),
        meter=training_meter(prepared, policy, source),
        metrics_offset=0,
        begun=begun,
        startup_seconds=0.0,
        reference_seconds=beginning.reference_seconds,
    )
    if resumes:
        assert run.checkpoint is not None
        session.metrics_offset = load_checkpoint(
            run.checkpoint, session.state, identity=run_identity(session)
        )
        console.print(f"Going on after step {session.state.step} of {source.num_steps} ({run.checkpoint})")
    elif isinstance(source, OfflineSource) and isinstance(reference, FrozenReference):
        _check_start(session, source)
    _describe(session)
    if keeps_files:
        _write_first_files(session)
    session.startup_seconds = time.monotonic() - begun - session.reference_seconds
    return session


def begin_offline(prepared: Prepared, objective: Objective, run: RunDir) -> Beginning:
    """The policy and the pairs of the recipe's data, with their reference log-probs."""
    recipe, console = prepared.recipe, prepared.console
    resumes = run.checkpoint is not None
    has_own_reference = recipe.reference.path is not None
    moves = recipe.reference.sync is not None
    policy = None if has_own_reference and not resumes else prepare_policy(prepared)
    reference: FrozenReference | MovingReference | None = None
    reference_seconds = 0.0
    if not objective.needs_reference:
        console.print("Reference: none, the loss needs no reference")
    elif moves:
        reference = prepare_moving_reference(prepared)
        console.print("Reference: follows the policy; a second model runs live, nothing is cached")
    elif resumes:
        reference = FrozenReference.load(run.resumed_reference, per_token=needs_token_logps(recipe))
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
            source.first_plan[0][0][0],
            dtype=session.prepared.precision.activations,
        )


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


def run_identity(session: Session) -> dict[str, str]:
    """What a checkpoint must share with the run that goes on from it."""
    identity = {
        "data": session.prepared.data.fingerprint,
        "plan": session.source.steps_fingerprint,
        "reference": _reference_identity(session.reference),
    }
    if session.policy.adapter is not None:  # its checkpoints hold the adapter alone
        source = policy_model(session.prepared.recipe)
        identity["base model"] = base_fingerprint(source, session.prepared.cache_dir)
    return identity


def _reference_identity(reference: FrozenReference | MovingReference | None) -> str:
    match reference:
        case FrozenReference():
            return reference.fingerprint
        case MovingReference():
            return "moving"
        case None:
            return "none"


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
    fingerprints = run_identity(session)
    if isinstance(session.source, OfflineSource):
        fingerprints["packing"] = session.source.first_plan.fingerprint
    run.update(fingerprints=fingerprints)
    if prepared.recipe.logging.trackers:
        start_trackers(prepared.accelerator, prepared.recipe)


def _describe(session: Session) -> None:
    """What will run, before it runs."""
    prepared, source = session.prepared, session.source
    recipe, console = prepared.recipe, prepared.console
    parameters = list(session.policy.scorer.parameters())
    size = f"{format_count(sum(p.numel() for p in parameters))} parameters"
    if session.policy.adapter is not None:
        num_trained = sum(p.numel() for p in parameters if p.requires_grad)
        size += f", of which the adapter's {format_count(num_trained)} are trained"
    precision = str(prepared.precision.parameters).removeprefix("torch.")
    if prepared.precision.autocast is not None:
        precision += f" with {str(prepared.precision.autocast).removeprefix('torch.')} autocast"
    attention = session.policy.attention
    loss = " + ".join(f"{weight:g} {name}" if weight != 1 else name for name, weight in recipe.loss.terms)
    console.print(
        f"Policy: {recipe.model.path}, {size}, {precision} on "
        f"{prepared.device}; attention: {attention.name} ({attention.reason})"
    )
    console.print(
        f"Training: {source.num_steps:,} steps of {_step_size(recipe)}, "
        f"{recipe.packing.mode} rows of up to {recipe.packing.token_budget:,} tokens; "
        f"loss {loss}, beta {recipe.loss.beta:g}, lr {recipe.optim.lr:g} {recipe.optim.schedule}"
    )
    if recipe.packing.share_prompt and not recipe.shares_prompts:
        console.print("Note: prompts are not shared, because model.lora.dropout is above 0")
    if isinstance(source, OnlineSource):
        return
    oversize = source.first_plan.oversize_pairs
    if len(oversize):
        longest = int(source.first_plan.row_tokens[oversize].max())
        console.print(
            f"Note: {len(oversize):,} pairs exceed packing.token_budget ({recipe.packing.token_budget:,}) "
            f"and get a row of their own, the longest of {longest:,} tokens; nothing is cut"
        )


def _step_size(recipe: Recipe) -> str:
    packing = recipe.packing
    return f"{packing.rows_per_step} rows" if packing.scope == "epoch" else f"{packing.pairs_per_step} pairs"
