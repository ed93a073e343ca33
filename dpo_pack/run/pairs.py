"""What a command makes of a recipe's pairs: rows, global batches, reference log-probs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import dpo_pack
from dpo_pack.data.store import PairTable, longest_sequence
from dpo_pack.model.config import check_lengths
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.reference.cache import FrozenReference, ReferenceCache, model_digest, namespace_digest
from dpo_pack.reference.compute import BudgetSearch, PassSettings, ReferenceWork, fill_cache
from dpo_pack.run.models import Setup
from dpo_pack.run.setup import load_proved
from dpo_pack.system import ranks
from dpo_pack.system.console import format_rate, format_seconds
from dpo_pack.system.errors import CacheError, UnsupportedModelError
from dpo_pack.system.process import counted
from dpo_pack.training.batches import OfflineSource, RowBuilder
from dpo_pack.training.references import CachedReference, Reference


def row_builder(
    setup: Setup, table: PairTable, reference: Reference | None = None, *, is_trained: bool = False
) -> RowBuilder:
    """Returns a builder of rows from the table's pairs, with the log-probs that `reference` has for them."""
    return RowBuilder(
        table=table,
        reference=None if reference is None else reference.known(table),
        is_packed=setup.policy_facts.is_packed,
        share_prompt=setup.recipe.shares_prompts,
        device=setup.device,
        counts_copies=is_trained and setup.policy_facts.balance is not None,
    )


def offline_source(setup: Setup) -> OfflineSource:
    """Returns the source of global batches. Its first epoch is planned; it has no reference log-probs yet."""
    recipe, data, facts = setup.recipe, setup.data, setup.policy_facts
    builder = row_builder(setup, data.train, is_trained=True)
    return OfflineSource(
        builder=builder,
        token_budget=setup.token_budget,
        pairs_per_step=recipe.packing.pairs_per_step,
        sizes=builder.sizes(facts.shape),
        source_weights=data.source_weights,
        epochs=recipe.train.epochs,
        max_steps=recipe.train.max_steps,
        shuffle=recipe.data.shuffle,
        seed=recipe.seed,
        equal_rows=setup.strategy.shards,
    )


# ------------------------------------------------------------------------ reference log-probs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """The result of a pass that computes reference log-probs."""

    cache: ReferenceCache
    values: FrozenReference  # the log-probs of all pairs that were asked for
    num_computed: int  # sequences that the pass computed
    num_cached: int  # sequences that the cache had before
    seconds: float


def resume_reference(
    setup: Setup, planned: OfflineSource, loaded: LoadedModel | None, frozen: Path
) -> tuple[FrozenReference, ReferencePass | None]:
    """Returns a resumed run's reference log-probs and, if its file `frozen` lacked pairs, their pass: of
    other held-out pairs, and of steps that the run did not have. `loaded`: see `prepare_reference`. Raises
    CacheError."""
    reference = ranks.of_node(lambda: FrozenReference.load(frozen))
    trained, *tables = setup.tables
    if (reference.num_steps or planned.num_steps) < planned.num_steps:
        reference.of(trained, planned.pairs_of_steps(reference.num_steps))  # else the file is of other pairs
        tables.insert(0, reference.lacking(trained.select(planned.needed_pairs)))
    lacking = [table for table in map(reference.lacking, tables) if table.num_pairs]
    if not any(ranks.every_rank_says(bool(lacking))):
        return reference, None
    lacks = "lacks log-probs of new steps or of other held-out pairs"
    now = namespace_digest(setup.reference_facts.namespace)
    _refuse_another_model(reference.namespace, now, f"{frozen} {lacks}")
    filled = prepare_reference(setup, loaded, tables=lacking)
    return reference.joined(filled.values), filled


def _refuse_another_model(then: str, now: str, what: str, more: str = ", its precision or a release") -> None:
    """Raises CacheError if what is computed now would be of another model than `then`; "": not known."""
    if then not in ("", now):
        why = f"the reference model{more} has changed since the run began"
        raise CacheError(f"output_dir: {what}, and {why}; put it back, or use another output_dir")


# `train.eval_precision: auto` adds at most this part to the training. To count it, a token takes so many
# times as long in fp32 as in 16 bits; a step is as long as three passes. A set has at least so many pairs.
_SMALL_PART, _FLOAT32_COST, _STEP_PASSES, _FEWEST_PAIRS = 0.1, {"cuda": 16.0, "cpu": 4.0}, 3.0, 64


def exact_tables(setup: Setup) -> dict[str, PairTable] | None:
    """Returns the held-out pairs, by set, if they are evaluated in fp32 and the training computes in less;
    else None. It returns the same pairs every time."""
    recipe, held_out = setup.recipe, setup.data.eval
    is_exact = setup.policy_facts.precision.activations.itemsize >= 4
    if is_exact or not held_out or setup.strategy.shards or recipe.train.eval_precision == "training":
        return None
    if recipe.train.eval_precision == "float32":
        return dict(held_out)
    num_steps = recipe.train.epochs * setup.data.train.num_pairs / recipe.packing.pairs_per_step
    num_steps = min(num_steps, recipe.train.max_steps or num_steps)
    num_passes = 3 + num_steps // (recipe.train.eval_every_steps or math.inf)  # start, end, reference
    num_pairs = _SMALL_PART * _STEP_PASSES * num_steps * recipe.packing.pairs_per_step
    num_pairs /= num_passes * _FLOAT32_COST[setup.device.type]
    share = num_pairs / max(1, sum(table.num_pairs for table in held_out.values()))
    tables = {}
    for name, table in held_out.items():
        order = np.random.default_rng(recipe.seed).permutation(table.num_pairs)
        tables[name] = table.select(np.sort(order[: max(_FEWEST_PAIRS, int(share * table.num_pairs))]))
    return tables


def exact_reference(
    setup: Setup, loaded: LoadedModel | None = None, kept: FrozenReference | None = None
) -> Reference | None:
    """Returns the reference in fp32 of the pairs of `exact_tables`, or None. It computes now, because later
    the starting weights are gone. `loaded`: see `prepare_reference`. Raises CacheError, also if the model is
    another than that of the log-probs that the run has `kept`."""
    tables = list((exact_tables(setup) or {}).values())
    if not tables:
        return None
    if not setup.objective.needs_reference:
        return CachedReference(lookup=None)
    if kept is not None:
        now = model_digest(setup.reference_facts.namespace)
        _refuse_another_model(kept.model, now, "held-out pairs are evaluated in float32", "")
    return CachedReference(lookup=prepare_reference(setup, loaded, tables=tables, in_float32=True).values.of)


def prepare_reference(
    setup: Setup,
    loaded: LoadedModel | None = None,
    *,
    tables: Sequence[PairTable] | None = None,
    in_float32: bool = False,
) -> ReferencePass:
    """Computes every log-prob that the cache lacks for the pairs (or `tables`); `in_float32` under keys of
    their own. A reference that is not `loaded` is loaded if one is missing, and freed. Raises CacheError."""
    facts, console = setup.reference_facts, setup.console
    if in_float32:
        facts = replace(facts, precision=facts.precision.in_float32)
    tables = setup.tables if tables is None else tables
    cache = ReferenceCache(facts.cache_dir, facts.namespace, used_by=facts.label)
    values = ranks.of_node(lambda: FrozenReference.find(cache, tables))
    has_all = all(ranks.every_rank_says(not np.isnan(values.sums).any()))
    # All ranks use the list of rank 0. A rank that looks later could find more sequences in the cache.
    is_missing = np.zeros(0, dtype=np.bool_) if has_all else ranks.first_says(np.isnan(values.sums))
    num_cached = len(values.keys) - (todo := int(is_missing.sum()))
    pairs = counted(sum(table.num_pairs for table in tables), f"{'held-out ' * in_float32}pair")
    console.print(
        f"Reference log-probs of {pairs}{' in float32' * in_float32}: "
        f"{num_cached:,} of {num_cached + todo:,} different sequences cached"
        f"{f', {todo:,} to compute' if todo else ''}"
        f"{f' (cache: {facts.cache_dir})' if num_cached else ''}"
    )
    num_computed, seconds = 0, 0.0
    if todo:
        begun = time.monotonic()
        work = ReferenceWork.of(tables, is_missing)
        num_computed = _compute_missing(setup, cache, facts, work, loaded)
        seconds = time.monotonic() - begun
        rate = format_rate(num_computed / max(seconds, 1e-9), digits=0)
        others = f"; another run computed {todo - num_computed:,}" if num_computed < todo else ""
        console.print(
            f"Reference pass: {counted(num_computed, 'sequence')} in {format_seconds(seconds)}, "
            f"{rate} sequences/s{others}"
        )
    if not has_all:
        values = ranks.of_node(lambda: FrozenReference.find(cache, tables, whole=True))
    num_cached += todo - num_computed  # with what another run computed meanwhile
    return ReferencePass(
        cache=cache, values=values, num_computed=num_computed, num_cached=num_cached, seconds=seconds
    )


def _compute_missing(
    setup: Setup, cache: ReferenceCache, facts: ModelFacts, work: ReferenceWork, loaded: LoadedModel | None
) -> int:
    """Returns how many sequences all ranks have computed."""
    token_budget, is_exact = setup.reference_token_budget, facts.precision != setup.reference_facts.precision
    cache.check_writable()
    loaded = loaded or load_proved(setup, setup.reference_facts)
    settings = PassSettings(
        token_budget=token_budget,
        share_prompt=setup.recipe.packing.share_prompt,
        device=setup.device,
        rank=ranks.rank(),
        num_ranks=ranks.num_ranks(),
        in_lockstep=setup.strategy.shards,
        metadata={
            "origin": f"dpo-pack {dpo_pack.__version__}",
            "attention": "sdpa" if is_exact else loaded.attention.name,
            "device": setup.device.type,
            "token_budget": str(token_budget),
        },
    )
    searches = setup.recipe.reference.token_budget == "auto" and setup.device.type == "cuda"
    # A sharded model computes only on all ranks together, so nothing is tried on it.
    search = _budget_search(setup, facts) if searches and not setup.strategy.shards else None
    with loaded.as_reference(), loaded.scorer.in_float32() if is_exact else contextlib.nullcontext():
        fill_cache(cache, work, loaded.scorer, facts.shape, settings, search=search, console=setup.console)
    of_ranks = ranks.every_rank_says((cache.named_parts, cache.num_added))
    cache.named_parts.update(*(names for names, _ in of_ranks))  # all ranks' files are read next
    return sum(number for _, number in of_ranks)


def _budget_search(setup: Setup, model: ModelFacts) -> BudgetSearch:
    recipe, properties = setup.recipe, torch.cuda.get_device_properties(setup.device)
    beginning = max(int(table.beginning_lengths.max(initial=0)) for table in setup.tables)
    setting = {
        "model": model.namespace,
        "device": [properties.name, properties.total_memory],
        "rows": [recipe.model.attention, recipe.packing.mode, recipe.packing.share_prompt],
        "beginning": beginning.bit_length(),  # the longer, the more keys for each token of a row
    }
    longest = longest_sequence(setup.tables)

    def is_exact(token_budget: int) -> bool:
        if not model.is_packed:
            return True
        try:
            check_lengths(model.config, longest_sequence=longest, longest_row=token_budget)
        except UnsupportedModelError:
            return False
        return True

    return BudgetSearch(
        memo_path=model.cache_dir / "reference_budgets.json", key=namespace_digest(setting), is_exact=is_exact
    )
