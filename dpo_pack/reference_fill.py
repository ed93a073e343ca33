"""Filling the reference cache with one loaded model: the budget of a row, the pass, what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from dpo_pack.collectives import largest_over_ranks
from dpo_pack.models import CompletionLogps
from dpo_pack.reference_budget import (
    LARGEST_TOKEN_BUDGET,
    largest_token_budget,
    remember_budget,
    remembered_budget,
)
from dpo_pack.reference_cache import ReferenceCache
from dpo_pack.reference_pass import PassSettings, compute_missing, plan_pass, probe_row
from dpo_pack.reference_progress import pass_progress
from dpo_pack.reference_work import ReferenceWork


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSearch:
    """Where the largest budget that fits is remembered, and which budgets the model is exact for."""

    memo_path: Path
    key: str  # names model and device
    is_exact: Callable[[int], bool]


def fill_cache(
    cache: ReferenceCache,
    work: ReferenceWork,
    scorer: CompletionLogps,
    settings: PassSettings,
    *,
    search: BudgetSearch | None,
    console: Console,
) -> None:
    """Compute this rank's part of the missing sequences.

    With `search`, rows get the largest budget that fits in memory, `settings.token_budget` being the first
    tried; without it, `settings.token_budget`. Raises CacheError, ModelError.
    """
    if search is not None:
        found = _found_budget(work, scorer, settings, search)
        # Ranks share one plan, so the smallest device decides.
        smallest = -largest_over_ranks(torch.tensor([-found], device=settings.device))
        settings = replace(settings, token_budget=int(smallest))
        console.print(f"  rows of up to {settings.token_budget:,} tokens")
    plan = plan_pass(work, scorer, settings)
    with pass_progress(console, plan.total) as progress:
        fitted = compute_missing(cache, plan, scorer, settings, progress=progress)
    if fitted < settings.token_budget:
        console.print(
            f"  memory ran out; rows of up to {fitted:,} tokens fitted, so reference.token_budget={fitted} "
            "is what this machine takes"
        )
        if search is not None:
            remember_budget(search.memo_path, search.key, fitted)


def _found_budget(
    work: ReferenceWork, scorer: CompletionLogps, settings: PassSettings, search: BudgetSearch
) -> int:
    known = remembered_budget(search.memo_path, search.key)
    if known is not None:
        return known
    # One row of everything that is missing is as much as can be tried.
    whole = plan_pass(work, scorer, replace(settings, rank=0, num_ranks=1))
    everything = int(whole.row_tokens[work.missing.any(axis=1)].sum())
    most = min(everything, LARGEST_TOKEN_BUDGET)

    def fits(token_budget: int) -> bool:
        return search.is_exact(token_budget) and probe_row(whole, scorer, settings, token_budget)

    found = largest_token_budget(fits, start=settings.token_budget, most=most)
    if found < everything:  # else nothing has set a bound, and another pass may be longer
        remember_budget(search.memo_path, search.key, found)
    return found
