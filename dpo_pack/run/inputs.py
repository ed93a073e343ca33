"""All that a run needs before its first step: `prepare_run` gets it, in order, and prints what it does.

Four words for the model. Its `facts` are what is known without weights. A `LoadedModel` has the weights, and
the `scorer` in it computes the log-probs of a row with them. The `policy` is the scorer of the model that is
trained, as all ranks run it together. `dpopack doctor` does a part of this: `prove_and_measure`.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from typing import Any

from accelerate.utils import set_seed
from rich.console import Console

from dpo_pack.model.parallel import DistributedPolicy, distribute_policy
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.online.win_rate import WinRate
from dpo_pack.proofs import ProofOutcome
from dpo_pack.recipe.load import Recipe
from dpo_pack.reference.cache import FrozenReference
from dpo_pack.run.checkpoint import load_checkpoint, run_identity
from dpo_pack.run.log import RunLog, describe_policy, describe_training
from dpo_pack.run.memory_estimate import (
    largest_row,
    memory_report,
    print_measured_memory,
    print_memory_report,
    stays_gathered,
)
from dpo_pack.run.models import Setup, load_and_prove
from dpo_pack.run.pairs import exact_reference, offline_source, prepare_reference, resume_reference
from dpo_pack.run.rollouts import build_online, check_generator, online_reference
from dpo_pack.run.run_dir import RunDir, choose_checkpoint
from dpo_pack.run.setup import autocast_advice, load_moving_reference, load_proved, prepare
from dpo_pack.run.state import Criterion, Identity, TrainState, find_criterion, new_state
from dpo_pack.system import ranks
from dpo_pack.system.console import shown
from dpo_pack.system.machine import release_memory
from dpo_pack.training.batches import BatchSource, OfflineSource
from dpo_pack.training.references import CachedReference, Reference, check_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run trains with, from `prepare_run`."""

    setup: Setup  # the recipe, its data, and what is known of models and machine without weights
    planned: OfflineSource | None  # the source of batches of an offline run; an online run has no plan
    loaded: LoadedModel  # the model that is trained
    policy: DistributedPolicy
    reference: Reference
    frozen: FrozenReference | None  # the reference log-probs that the run keeps in `output_dir`
    win_rate: WinRate | None  # of an online run with held-out prompts
    criterion: Criterion | None  # how evaluations are compared; None if nothing is held out
    state: TrainState  # of step 0, or of the checkpoint from which the run resumes
    identity: Identity
    log: RunLog  # writes the run's lines, pairs and totals


def prepare_run(recipe: Recipe, run: RunDir, console: Console) -> Inputs:
    """Gets a run ready for its next step. It writes into caches only, sets `run.checkpoint` to the newest
    checkpoint that is not damaged, and `run.info["totals"]` to what the reference pass computed. Every rank
    must call it. Raises a DpoPackError."""
    begun = time.monotonic()
    set_seed(recipe.seed)
    setup = prepare(recipe, console, takes_prompts=True)  # models' facts, tokenizer, data
    criterion = find_criterion(recipe, list(setup.data.eval_prompts or setup.data.eval))
    if goes_on := bool(run.info or run.checkpoint):
        choose_checkpoint(run, recipe.checkpoint.resume, console.print)
    planned = None if recipe.online is not None else offline_source(setup)
    describe_training(setup, planned)
    for line in () if goes_on else autocast_advice(setup.policy_facts):
        console.print(line)
    plan = None if planned is None else planned.first_plan
    gathers_once = setup.strategy.shards and stays_gathered(setup, plan)
    source: BatchSource
    frozen, win_rate, seconds = None, None, 0.0
    if planned is not None:
        source = planned
        loaded, reference, frozen, seconds = _offline_models(setup, planned, run)
    else:
        check_generator(setup)
        loaded = load_proved(setup)
        source, win_rate = build_online(setup, loaded, directory=run.rollouts)
        if win_rate is not None:
            win_rate.begin()
        reference = online_reference(setup, loaded)
    describe_policy(setup, loaded)
    state = new_state(recipe.optim, loaded.scorer, source, reference.moving, console)
    policy = distribute_policy(loaded.scorer, setup.strategy, setup.accelerator, stays_gathered=gathers_once)
    identity = run_identity(setup, loaded, source, criterion, frozen)
    offset = 0
    if run.checkpoint is not None:
        offset, notes = load_checkpoint(run.checkpoint, state, identity=identity)
        going_on = f"Going on after step {state.step} of {source.num_steps} ({run.checkpoint})"
        for line in (going_on, *notes):
            console.print(line)
    log = RunLog(setup, run, state, offset=offset, begun=begun, reference_seconds=seconds)
    release_memory()
    return Inputs(
        setup=setup,
        planned=planned,
        loaded=loaded,
        policy=policy,
        reference=reference,
        frozen=frozen,
        win_rate=win_rate,
        criterion=criterion,
        state=state,
        identity=identity,
        log=log,
    )


def _offline_models(
    setup: Setup, planned: OfflineSource, run: RunDir
) -> tuple[LoadedModel, Reference, FrozenReference | None, float]:
    """Returns policy, reference, the log-probs that the run keeps in a file, the seconds of their pass."""
    recipe, console = setup.recipe, setup.console
    dtype = setup.policy_facts.precision.activations
    # Another reference computes first and is freed, so two models are in memory only if both are needed.
    loaded = load_proved(setup) if recipe.reference.path is None else None
    frozen, filled, moving, exact, seconds = None, None, None, None, 0.0
    if not setup.objective.needs_reference:
        console.print("Reference: none, the loss needs no reference")
    elif recipe.reference.sync is not None:
        moving = load_moving_reference(setup)
        console.print("Reference: follows the policy; a second model runs live, nothing is cached")
    elif run.checkpoint is not None:
        owner = run.checkpoint.resolve().parents[1]  # the run that wrote it, possibly in another `output_dir`
        frozen, filled = resume_reference(setup, planned, loaded, owner / run.reference.name)
    else:
        trained, *held_out = setup.tables
        filled = prepare_reference(setup, loaded, tables=[trained.select(planned.needed_pairs), *held_out])
        frozen, run.info["totals"] = replace(filled.values, num_steps=planned.num_steps), {}
    if filled is not None:
        seconds, totals = filled.seconds, run.info.setdefault("totals", {})
        for name, number in (("computed", filled.num_computed), ("cached", filled.num_cached)):
            key = f"reference_sequences_{name}"
            totals[key] = totals.get(key, 0) + number
    if dtype.itemsize < 4 and moving is None:
        exact = exact_reference(setup, loaded, frozen)
    if loaded is None:
        release_memory()
        loaded = load_proved(setup)
    if frozen is not None:
        log_probs = ranks.of_node(functools.partial(frozen.of, setup.data.train, planned.needed_pairs))
        planned.builder = replace(planned.builder, reference=log_probs)
        # The proof compares made-up rows with each other. This compares the run's first row with what the
        # reference pass computed or the cache had: dropout, changed files, values of another release show.
        if recipe.reference.path is None and run.checkpoint is None:
            first_row = next(row for rows in planned.first_plan.pack_step(0) for row in rows)
            check_start(loaded.scorer, setup.policy_facts, planned.builder, first_row)
    reference = moving or CachedReference(lookup=None if frozen is None else frozen.of, exact=exact)
    return loaded, reference, frozen, seconds


def prove_and_measure(recipe: Recipe, console: Console) -> tuple[ProofOutcome, dict[str, Any]]:
    """Loads what a run has in memory, without reference log-probs, and proves again that the policy's rows
    are exact. Prints and returns the memory of a step, estimated and on CUDA also measured. The caller checks
    the outcome. It writes into caches only. Every rank must call it."""
    set_seed(recipe.seed)
    setup = prepare(recipe, console, takes_prompts=True)
    planned = None if recipe.online is not None else offline_source(setup)
    plan = None if planned is None else planned.first_plan
    describe_training(setup, planned)
    gathers_once = setup.strategy.shards and stays_gathered(setup, plan)
    memory = memory_report(setup, plan)
    print_memory_report(memory, console)
    if planned is None:
        check_generator(setup)
    facts = setup.policy_facts
    with shown(console, f"Loading {facts.label}, and proving that its rows are exact"):
        loaded, outcome = load_and_prove(
            facts, device=setup.device, strategy=setup.strategy, adds_adapter=True, again=True
        )
    for note in loaded.notes:
        console.print(note)
    describe_policy(setup, loaded)
    if not all(proof.passed for proof in outcome.proofs):
        return outcome, memory
    reference: Reference = CachedReference(lookup=None)
    source: BatchSource
    if planned is None:
        source, _ = build_online(setup, loaded, directory=recipe.output_dir)
        reference = online_reference(setup, loaded)
    else:
        source = planned
        if recipe.reference.sync is not None:
            reference = load_moving_reference(setup)
    state = new_state(recipe.optim, loaded.scorer, source, reference.moving, console)
    if setup.device.type == "cuda" and planned is not None:
        policy = distribute_policy(
            loaded.scorer, setup.strategy, setup.accelerator, stays_gathered=gathers_once
        )
        row = planned.builder.build(largest_row(planned.first_plan, rank=ranks.rank())).row
        memory["measured"] = print_measured_memory(policy, state.optimizer, row, setup.device, console)
    return outcome, memory
