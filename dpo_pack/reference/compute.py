"""The pass that fills the reference cache: computes the log-probs that the cache lacks, without gradients."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console

from dpo_pack.model.layout import packed_row, padded_row
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.packing.bin_packing import (
    next_fit,
)
from dpo_pack.packing.flops import ModelShape
from dpo_pack.packing.lengths import IntArray
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.parts import TokenLogps, sequence_table
from dpo_pack.reference.work import PassPlan, PassSettings, ReferenceWork, plan_pass
from dpo_pack.system.console import progress_bar
from dpo_pack.system.errors import ModelError, is_out_of_memory
from dpo_pack.system.files import add_to_json, read_json
from dpo_pack.system.machine import host_copies, release_memory
from dpo_pack.system.ranks import largest_numbers

# Longer rows are not faster on CPU: the allocator does not keep blocks as large as their activations, so each
# operation maps new memory. A token takes 1.25 times as long in a row of 32,768 tokens as in one of 4,096.
CPU_TOKEN_BUDGET = 4096
# Longer rows are not faster on an accelerator. FlashAttention also takes at most 65,535 sequences or their
# parts (a dimension of CUDA's grid), and kernels that count in 32 bits take tensors of fewer than 2^31
# elements: with rows of this length, layers may be up to 16,383 wide.
LARGEST_TOKEN_BUDGET = 2**17
# Where no budget is searched, rows on an accelerator are longer than in training by this factor, because
# without gradients a layer's activations are freed after the layer.
START_FACTOR = 4


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
    """Computes this rank's part of the missing sequences. With `search`, the token budget is the largest that
    fits in memory, otherwise `settings.token_budget`. Raises CacheError, ModelError."""
    if search is not None:
        found = _largest_budget(work, scorer, shape, settings, search)
        # All ranks use the same plan, so the smallest budget decides.
        settings = replace(settings, token_budget=-int(largest_numbers(-found)[0]))
        console.print(f"  rows of up to {settings.token_budget:,} tokens")
    plan = plan_pass(work, shape, settings, is_packed=scorer.backend is not None)
    tokens = plan.row_tokens
    total = sum(int(tokens[row].sum()) for row in plan.rows)
    with progress_bar(console, "Reference pass", total, "tokens") as advance:
        fitted = compute_missing(
            cache, plan, scorer, settings, progress=lambda groups: advance(int(tokens[groups].sum()))
        )
    if fitted < settings.token_budget:
        console.print(
            f"  memory ran out; rows of up to {fitted:,} tokens fit. To begin with such rows, set "
            f"reference.token_budget={fitted}"
        )
        if search is not None:
            add_to_json(search.memo_path, dict[str, int], {search.key: fitted})


def _largest_budget(
    work: ReferenceWork,
    scorer: CompletionLogps,
    shape: ModelShape,
    settings: PassSettings,
    search: BudgetSearch,
) -> int:
    """Returns the largest of LARGEST_TOKEN_BUDGET, its half, its quarter, ... that fits in memory."""
    known: int = (read_json(search.memo_path, dict[str, int]) or {}).get(search.key, 0)
    if known > 0:
        return known
    alone = replace(settings, rank=0, num_ranks=1)
    plan = plan_pass(work, shape, alone, is_packed=scorer.backend is not None)
    everything = int(plan.row_tokens[work.missing.any(axis=1)].sum())  # no row can be longer
    budget = min(everything, LARGEST_TOKEN_BUDGET)
    while budget > 1 and not (search.is_exact(budget) and probe_row(plan, scorer, settings, budget)):
        budget //= 2
    if budget < everything:  # else memory was not the limit, and a larger budget may fit
        add_to_json(search.memo_path, dict[str, int], {search.key: budget})
    return budget


def probe_row(plan: PassPlan, scorer: CompletionLogps, settings: PassSettings, token_budget: int) -> bool:
    """Returns True if a row of `token_budget` tokens, from the plan's costliest groups, fits in memory."""
    groups = np.concatenate(plan.rows)
    row = groups[next_fit(plan.row_tokens[groups], token_budget)[0]]
    with torch.no_grad():
        return _try_row(plan.work, row, scorer, settings) is not None


@torch.no_grad()
def compute_missing(
    cache: ReferenceCache,
    plan: PassPlan,
    scorer: CompletionLogps,
    settings: PassSettings,
    *,
    progress: Callable[[IntArray], None] = lambda groups: None,
) -> int:
    """Computes the plan's rows and writes them to the cache; returns the token budget that fitted in memory.

    If a row does not fit in memory, the budget is halved, and this row and all later rows are split; ranks in
    lockstep cannot split. `progress` is called with the groups of each finished row. A killed pass loses all
    rows after the last file that it wrote to the cache. An interrupted pass (Ctrl-C) loses only rows whose
    results are still on the device (at most two). Raises CacheError if the disk refuses a file, ModelError if
    a log-prob is not finite or if a row that cannot be split does not fit in memory.
    """
    budget = settings.token_budget
    rows = deque(plan.rows)
    computed: deque[tuple[IntArray, Callable[[], Sequence[Any]]]] = deque()  # groups, results
    finished: list[pa.Table] = []
    written = time.monotonic()

    def finish_row() -> None:
        nonlocal finished, written
        members, results = computed.popleft()
        # One `append` adds keys and values together, so that a signal cannot come between them.
        finished.append(_finished_row(plan.work, members, results))
        progress(members)
        if time.monotonic() - written > settings.write_every_seconds:
            cache.append(pa.concat_tables(finished), settings.metadata)
            finished, written = [], time.monotonic()

    try:
        while rows:
            members = rows.popleft()
            result = _try_row(plan.work, members, scorer, settings)
            if result is None:
                budget = _halved(budget, members, plan, settings)
                rows.appendleft(members)
                rows = deque(row[part] for row in rows for part in next_fit(plan.row_tokens[row], budget))
                continue
            tensors = [result.sums, result.num_tokens]
            tensors += [result.token_logps.float()] if settings.per_token else []
            computed.append((members, host_copies(tensors)))
            if len(computed) > _num_rows_behind(settings.device):
                finish_row()
        while computed:
            finish_row()
        for members in plan.idle_rows:
            if _try_row(plan.work, members, scorer, settings) is None:
                _halved(budget, members, plan, settings)
    finally:
        if finished:
            cache.append(pa.concat_tables(finished), settings.metadata)
    return budget


def _try_row(
    work: ReferenceWork, members: IntArray, scorer: CompletionLogps, settings: PassSettings
) -> RowLogps | None:
    """Returns the log-probs of the groups' missing sequences, or None if the row does not fit in memory."""
    groups = [work.group(int(member)) for member in members]
    try:
        if scorer.backend is None:
            row = padded_row(groups, device=settings.device)
        else:
            row = packed_row(groups, settings.device, share_prompt=settings.share_prompt)
        result: RowLogps = scorer(row)
        return result
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    # After the except block Python has freed the traceback, which kept the row's activations in memory.
    release_memory()
    return None


def _halved(budget: int, members: IntArray, plan: PassPlan, settings: PassSettings) -> int:
    """Returns a smaller budget after a row ran out of memory. Raises ModelError if rows cannot be smaller."""
    tokens = int(plan.row_tokens[members].sum())
    if len(members) == 1:
        raise ModelError(
            f"the reference pass ran out of memory on a single pair ({tokens:,} tokens, row "
            f"{plan.work.table.row_numbers[members[0]]} of its data source); lower data.max_length, or free "
            "memory"
        )
    budget = max(1, min(budget, tokens) // 2)
    if settings.in_lockstep:  # a split would give this rank more rows than other ranks have
        raise ModelError(
            "reference.token_budget: the reference pass ran out of memory, and it cannot split the rows of a "
            f"sharded model; set reference.token_budget: {budget}"
        )
    return budget


def _num_rows_behind(device: torch.device) -> int:
    """Returns how many later rows the device has in its queue when the host reads a row's results."""
    return 1 if device.type == "cuda" else 0


def _finished_row(work: ReferenceWork, members: IntArray, results: Callable[[], Sequence[Any]]) -> pa.Table:
    """Returns the `sequence_table` of a row's groups. Raises ModelError if a log-prob is not finite."""
    sums, num_tokens, *token_logps = results()
    wrong = np.flatnonzero(~np.isfinite(sums))
    if len(wrong):
        group = members[np.nonzero(work.missing[members])[0][wrong[0]]]
        raise ModelError(
            f"the reference model computes a log-prob of {sums[wrong[0]]} for the pair in row "
            f"{work.table.row_numbers[group]} of its data source; check the model's weights, or set "
            "model.dtype: float32, whose numbers have a larger range"
        )
    tokens = TokenLogps.of_lengths(token_logps[0], num_tokens) if token_logps else None
    return sequence_table(work.keys(members), sums, num_tokens, tokens)
