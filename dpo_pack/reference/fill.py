"""Fills the reference cache with a loaded model: finds how long rows can be, and computes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.flops import ModelShape
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import Amount, PassSettings, compute_missing, plan_pass, probe_row
from dpo_pack.reference.work import ReferenceWork
from dpo_pack.system.console import format_seconds
from dpo_pack.system.files import add_to_json, read_json
from dpo_pack.system.progress import progress_bar
from dpo_pack.system.ranks import largest_over_ranks

# Longer rows are not faster on CPU: the allocator does not keep blocks as large as their activations, so each
# operation maps new memory. A token takes 1.25 times as long in a row of 32,768 tokens as in one of 4,096.
CPU_TOKEN_BUDGET = 4096
# The search for a budget stops here, because longer rows are not faster. FlashAttention also takes at most
# 65,535 sequences or their parts (a dimension of CUDA's grid), and kernels that count in 32 bits take tensors
# of fewer than 2^31 elements: with rows of this length, layers may be up to 16,383 wide.
LARGEST_TOKEN_BUDGET = 2**17
# On an accelerator the search begins with rows that are longer than in training by this factor, because
# without gradients a layer's activations are freed after the layer.
START_FACTOR = 4

# After so many seconds, the time of the first rows gives an estimate for all other rows.
ESTIMATE_AFTER_SECONDS = 3.0
_Memo = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSearch:
    """The settings of a search for the largest token budget."""

    memo_path: Path  # the file that holds the results of earlier searches
    key: str  # of a result in this file; a hash of model, device and kind of rows
    is_exact: Callable[[int], bool]  # whether the model computes rows of this many tokens exactly


def fill_cache(
    cache: ReferenceCache,
    work: ReferenceWork,
    scorer: CompletionLogps,
    shape: ModelShape,
    settings: PassSettings,
    *,
    search: BudgetSearch | None,
    console: Console,
) -> None:
    """Computes this rank's part of the missing sequences.

    With `search`, the token budget of rows is the largest that fits in memory; the search begins with
    `settings.token_budget`. Without `search`, it is `settings.token_budget`. Raises CacheError, ModelError.
    """
    if search is not None:
        found = _found_budget(work, scorer, shape, settings, search)
        # All ranks use the same plan, so the smallest budget decides.
        smallest = -largest_over_ranks(torch.tensor([-found], device=settings.device))
        settings = replace(settings, token_budget=int(smallest))
        console.print(f"  rows of up to {settings.token_budget:,} tokens")
    plan = plan_pass(work, shape, settings, is_packed=scorer.backend is not None)
    with pass_progress(console, plan.total) as progress:
        fitted = compute_missing(cache, plan, scorer, settings, progress=progress)
    if fitted < settings.token_budget:
        console.print(
            f"  memory ran out; rows of up to {fitted:,} tokens fit. To begin with such rows, set "
            f"reference.token_budget={fitted}"
        )
        if search is not None:
            remember_budget(search.memo_path, search.key, fitted)


def _found_budget(
    work: ReferenceWork,
    scorer: CompletionLogps,
    shape: ModelShape,
    settings: PassSettings,
    search: BudgetSearch,
) -> int:
    known = remembered_budget(search.memo_path, search.key)
    if known is not None:
        return known
    # No row can be longer than a row with all missing sequences.
    alone = replace(settings, rank=0, num_ranks=1)
    whole = plan_pass(work, shape, alone, is_packed=scorer.backend is not None)
    everything = int(whole.row_tokens[work.missing.any(axis=1)].sum())
    most = min(everything, LARGEST_TOKEN_BUDGET)

    def fits(token_budget: int) -> bool:
        return search.is_exact(token_budget) and probe_row(whole, scorer, settings, token_budget)

    found = largest_token_budget(fits, start=settings.token_budget, most=most)
    if found < everything:  # else memory was not the limit, and a larger budget may fit
        remember_budget(search.memo_path, search.key, found)
    return found


def largest_token_budget(fits: Callable[[int], bool], *, start: int, most: int) -> int:
    """Returns the largest token budget that fits in memory, among `most` and start x 2^k below `most`.

    The search doubles `start` while that fits, or halves it until it fits. The result is at least 1.
    """
    budget = min(start, most)
    if fits(budget):
        while budget < most and fits(min(2 * budget, most)):
            budget = min(2 * budget, most)
        return budget
    while budget > 1:
        budget //= 2
        if fits(budget):
            break
    return budget


def remembered_budget(memo_path: Path, key: str) -> int | None:
    """Returns the token budget that an earlier search wrote into the file for this key, or None."""
    budget: int | None = (read_json(memo_path, _Memo) or {}).get(key)
    return None if budget is None or budget < 1 else budget


def remember_budget(memo_path: Path, key: str, budget: int) -> None:
    """Writes the token budget of this key into the file, if the file is writable."""
    add_to_json(memo_path, _Memo, {key: budget})


@contextmanager
def pass_progress(
    console: Console, total: Amount, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Amount], None]]:
    """Yields a function that must be called with each finished row. Shows how far the pass is.

    The remaining time is estimated by FLOPs, because later rows are shorter. A few seconds after the start, a
    line with this time is printed once.
    """
    begun, has_estimated, flops = clock(), False, 0.0
    with progress_bar(console, "Reference pass", total.num_pairs, "pairs") as advance:

        def finish_row(row: Amount) -> None:
            nonlocal has_estimated, flops
            flops += row.flops
            seconds = clock() - begun
            if not has_estimated and flops < total.flops and seconds > ESTIMATE_AFTER_SECONDS:
                has_estimated = True
                left = format_seconds(seconds * (total.flops - flops) / max(flops, 1e-9))
                console.print(f"  the rest will take about {left}")
            advance(row.num_pairs)

        yield finish_row
