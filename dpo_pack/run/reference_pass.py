"""The reference stage of a run: it computes the reference log-probs that the cache lacks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import dpo_pack
from dpo_pack.data.store import PairTable
from dpo_pack.model.config import check_rows
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.reference.cache import ReferenceCache, namespace_digest
from dpo_pack.reference.compute import BudgetSearch, PassSettings, fill_cache, find_work
from dpo_pack.reference.frozen import FrozenReference
from dpo_pack.run.models import ModelFacts
from dpo_pack.run.setup import Setup, check_data, load_proved, longest_sequence
from dpo_pack.system import ranks
from dpo_pack.system.console import format_seconds
from dpo_pack.system.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """The result of a pass that computes reference log-probs: the cache, numbers of sequences, the time."""

    cache: ReferenceCache
    tables: Sequence[PairTable]  # the pairs whose log-probs the cache now has
    per_token: bool  # whether the loss needs a log-prob for each token
    num_computed: int  # sequences that the pass computed
    num_cached: int  # sequences that the cache had before
    seconds: float

    def values(self) -> FrozenReference:
        """Returns the log-probs of all sequences of `tables`. Raises CacheError if the cache has lost one."""
        return FrozenReference.take(self.cache, self.tables, per_token=self.per_token)


def resume_reference(setup: Setup, frozen: Path) -> tuple[FrozenReference, float]:
    """Returns the reference log-probs of a resumed run, and the seconds of the reference pass.

    `frozen` is the file of reference log-probs that the run wrote when it began. Only held-out pairs that the
    file lacks need a reference pass. Raises CacheError if the file is missing or damaged.
    """
    per_token = setup.recipe.loss.ld_alpha is not None
    reference = FrozenReference.load(frozen, per_token=per_token)
    lacking = [pairs for pairs in setup.data.eval.values() if not reference.covers(pairs)]
    if not ranks.any_rank(bool(lacking)):
        return reference, 0.0
    filled = prepare_reference(setup, tables=lacking)
    return reference.joined(filled.values()), filled.seconds


def prepare_reference(
    setup: Setup, policy: LoadedModel | None = None, *, tables: Sequence[PairTable] | None = None
) -> ReferencePass:
    """Computes every reference log-prob that the cache lacks for the recipe's pairs (or for `tables`).

    If the starting policy is the reference and the caller has loaded it, the caller passes it as `policy`.
    Otherwise this function loads the reference if something is missing, and frees it before it returns.
    """
    facts, console = setup.reference_facts, setup.console
    if facts is not setup.policy_facts:
        check_data(setup, facts)
    tables = setup.tables if tables is None else tables
    cache = ReferenceCache(facts.cache_dir, facts.namespace, used_by=facts.label)
    per_token = setup.recipe.loss.ld_alpha is not None  # LD-DPO weights tokens; sums are not enough
    work = find_work(cache, tables, per_token=per_token)
    # All ranks use the list of rank 0. A rank that looks later could find more sequences in the cache.
    work = replace(work, missing=ranks.first_says(work.missing))
    todo = int(work.missing.sum())
    num_cached = int(work.sides.sum()) - todo
    console.print(
        f"Reference log-probs of {sum(table.num_pairs for table in tables):,} pairs: "
        f"{num_cached:,} of {num_cached + todo:,} different sequences cached"
        f"{f', {todo:,} to compute' if todo else ''}"
        f"{f' (cache: {facts.cache_dir})' if num_cached else ''}"
    )
    seconds = 0.0
    if todo:
        begun = time.monotonic()
        cache.check_writable()
        loaded = policy or load_proved(setup, facts)
        keeps_tokens = per_token or any(table.has_token_weights.any() for table in tables)
        settings = _pass_settings(setup, loaded, per_token=keeps_tokens)
        search = _budget_search(setup, facts)
        with loaded.as_reference():
            fill_cache(cache, work, loaded.scorer, facts.shape, settings, search=search, console=console)
        for names in ranks.every_rank_says(cache.named_parts):  # all ranks' files are read next
            cache.named_parts |= names
        seconds = time.monotonic() - begun
        rate = todo / max(seconds, 1e-9)
        console.print(f"Reference pass: {todo:,} sequences in {format_seconds(seconds)}, {rate:,.0f}/s")
    return ReferencePass(
        cache=cache,
        tables=tables,
        per_token=per_token,
        num_computed=todo,
        num_cached=num_cached,
        seconds=seconds,
    )


def _pass_settings(setup: Setup, loaded: LoadedModel, *, per_token: bool) -> PassSettings:
    token_budget = setup.reference_token_budget
    return PassSettings(
        token_budget=token_budget,
        share_prompt=setup.recipe.packing.share_prompt,
        device=setup.device,
        per_token=per_token,
        rank=ranks.rank(),
        num_ranks=ranks.num_ranks(),
        in_lockstep=setup.strategy.shards,
        metadata={
            "origin": f"dpo-pack {dpo_pack.__version__}",
            "attention": loaded.attention.name,
            "device": setup.device.type,
            "token_budget": str(token_budget),
        },
    )


def _budget_search(setup: Setup, model: ModelFacts) -> BudgetSearch | None:
    """Returns the search for the largest token budget that fits into memory; None if nothing is searched.

    A search needs `reference.token_budget: auto`, a CUDA device and a model without shards.
    """
    recipe, device = setup.recipe, setup.device
    if recipe.reference.token_budget != "auto" or device.type != "cuda" or setup.strategy.shards:
        return None  # a sharded model computes only on all ranks together
    properties = torch.cuda.get_device_properties(device)
    setting = {
        "model": model.namespace,
        "device": [properties.name, properties.total_memory],
        "rows": [recipe.model.attention, recipe.packing.mode, recipe.packing.share_prompt],
    }
    longest = longest_sequence(setup.tables)

    def is_exact(token_budget: int) -> bool:
        if not model.is_packed:
            return True
        try:
            check_rows(model.config, longest_sequence=longest, longest_row=token_budget)
        except UnsupportedModelError:
            return False
        return True

    return BudgetSearch(
        memo_path=model.cache_dir / "reference_budgets.json",
        key=namespace_digest(setting),
        is_exact=is_exact,
    )
