"""The reference pass: computes the log-probs that the cache lacks, without gradients.

A group is a pair, so that its prompt is computed once, or one side of a pair. A plan says which groups share
a row (a forward pass), and which rank computes it. Legend: G groups.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console

from dpo_pack.data.store import PairTable, distinct_keys, pair_lengths
from dpo_pack.model.layout import packed_row, padded_row
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.packing.bin_packing import next_fit, pack_sequences_longest_first, padded_rows, split_over_ranks
from dpo_pack.packing.lengths import Bools, IntArray, ModelShape, PairSizes, pair_flops
from dpo_pack.reference.cache import FrozenReference, ReferenceCache, sequence_table
from dpo_pack.system.console import shown
from dpo_pack.system.errors import ModelError, is_out_of_memory
from dpo_pack.system.files import add_to_json, read_json
from dpo_pack.system.machine import host_copies, release_memory
from dpo_pack.system.ranks import every_rank_says

# Longer rows are not faster on an accelerator. FlashAttention takes at most 65,535 sequences, and kernels of
# 32-bit counts fewer than 2^31 elements: with rows of this length, layers may be up to 16,383 wide.
LARGEST_TOKEN_BUDGET = 2**17
# How many rows a device has in its queue while the host reads the results of an earlier row; else none.
ROWS_BEHIND = {"cuda": 1}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceWork:
    """The groups that rows consist of, and which of their sequences the cache lacks. A group can be one side
    of a pair, because of equal sequences only the first one is in a group."""

    table: PairTable  # [G] the pair of each group
    sides: Bools  # [G, (chosen, rejected)] True if this is the first of equal sequences
    missing: Bools  # [G, 2] True if `sides` is True and the cache lacks the sequence

    @staticmethod
    def of(tables: Sequence[PairTable], is_missing: Bools) -> ReferenceWork:
        """is_missing: whether the cache lacks each different sequence of the tables, in the order of keys."""
        names = [column.name for column in fields(PairTable) if column.name != "parts"]
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
        num_parts = np.array([len(table.parts) for table in tables])
        begins = np.cumsum(num_parts) - num_parts
        columns["part_indices"] = columns["part_indices"] + np.repeat(begins, [t.num_pairs for t in tables])
        table = PairTable(parts=tuple(part for table in tables for part in table.parts), **columns)
        keys = np.stack((table.chosen_keys, table.rejected_keys), axis=1)  # chosen, rejected, chosen, ...
        first, _ = distinct_keys(keys.reshape(-1, keys.shape[-1]))
        sides, missing = np.zeros((2, 2 * table.num_pairs), dtype=np.bool_)
        sides[first], missing[first] = True, is_missing
        sides, missing = sides.reshape(-1, 2), missing.reshape(-1, 2)
        pairs = np.flatnonzero(sides.any(axis=1))
        return ReferenceWork(table=table.select(pairs), sides=sides[pairs], missing=missing[pairs])


def find_work(cache: ReferenceCache, tables: Sequence[PairTable]) -> ReferenceWork:
    """Finds the sequences of which the cache lacks the log-prob."""
    return ReferenceWork.of(tables, np.isnan(FrozenReference.find(cache, tables).sums))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """The settings of a pass: how rows are built, and how often results are written to disk."""

    token_budget: int
    share_prompt: bool
    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    in_lockstep: bool = False  # True for a sharded model: all ranks compute a row at the same time
    write_every_seconds: float = 20.0
    metadata: Mapping[str, str] = field(default_factory=dict)  # a note in each part, for people who read it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassPlan:
    """The rows of this rank."""

    work: ReferenceWork
    rows: Sequence[IntArray]  # the groups of each row
    idle_rows: Sequence[IntArray]  # computed last, results unused: other ranks still compute a row
    sizes: PairSizes  # of the groups' missing sequences, padding included


def rows_without_gradients(sizes: PairSizes, token_budget: int) -> list[IntArray]:
    """Returns the rows of n pairs, as positions of their pairs; no pair waits for others of its step."""
    if sizes.pads:
        return padded_rows(sizes.tokens, token_budget)
    return pack_sequences_longest_first(sizes, token_budget)


def plan_pass(work: ReferenceWork, shape: ModelShape, settings: PassSettings, *, is_packed: bool) -> PassPlan:
    """Plans the rows of this rank, the costliest first, so that a lack of memory shows at once. Rows are
    planned over *all* sequences (`work.sides`), as if the cache were empty; then groups without a missing one
    are removed. So a pass that is started again, on any number of ranks, computes the same rows. In lockstep,
    a rank with one row less than others computes an idle one, the cheapest of all."""
    lengths, shares = pair_lengths(work.table, shape), settings.share_prompt and is_packed
    measure = partial(lengths.row_tokens, share_prompt=shares, pads=not is_packed)
    sizes = PairSizes(
        tokens=measure(sides=work.missing),
        costs=pair_flops(shape, lengths, share_prompt=shares, passes=1.0, sides=work.missing),
        beginnings=lengths.beginnings(shape, passes=1.0) if shares else None,
    )
    whole = replace(sizes, tokens=measure(sides=work.sides), pads=not is_packed)
    rows = rows_without_gradients(whole, settings.token_budget)
    is_open = np.asarray(work.missing.any(axis=1))
    rows = [row for row in (row[is_open[row]] for row in rows) if len(row)]
    costs = np.array([sizes.of_row(row).cost for row in rows], dtype=np.float64)
    mine = split_over_ranks(costs, settings.num_ranks, equal_counts=settings.in_lockstep)[settings.rank]
    num_idle = -(-len(rows) // settings.num_ranks) - len(mine) if settings.in_lockstep else 0
    return PassPlan(
        work=work,
        rows=[rows[number] for number in mine[np.argsort(-costs[mine], kind="stable")]],
        idle_rows=[rows[int(costs.argmin())]] * num_idle if num_idle else [],
        sizes=sizes,
    )


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
        settings = replace(settings, token_budget=min(every_rank_says(found)))
        console.print(f"  rows of up to {settings.token_budget:,} tokens")
    plan = plan_pass(work, shape, settings, is_packed=scorer.backend is not None)
    of_row = plan.sizes.of_row
    total = sum(of_row(row).tokens for row in plan.rows)
    with shown(console, "Reference pass", "tokens", total) as bar:
        fitted = compute_missing(
            cache, plan, scorer, settings, progress=lambda groups: bar.advance(of_row(groups).tokens)
        )
    if fitted < settings.token_budget:
        console.print(
            f"  memory ran out; rows of up to {fitted:,} tokens fit. To begin with such rows, set "
            f"reference.token_budget={fitted}"
        )
        if search is not None:
            add_to_json(search.memo_path, dict[str, int], {search.key: fitted})


@torch.no_grad()
def _largest_budget(
    work: ReferenceWork,
    scorer: CompletionLogps,
    shape: ModelShape,
    settings: PassSettings,
    search: BudgetSearch,
) -> int:
    known: int = (read_json(search.memo_path, dict[str, int]) or {}).get(search.key, 0)
    if known > 0:
        return known
    alone = replace(settings, rank=0, num_ranks=1)
    plan = plan_pass(work, shape, alone, is_packed=scorer.backend is not None)
    everything = plan.sizes.of_row(np.flatnonzero(work.missing.any(axis=1))).tokens  # no row can be longer
    budget = min(everything, LARGEST_TOKEN_BUDGET)
    while budget > 1:
        groups = np.concatenate(plan.rows)  # the costliest first
        row = groups[next_fit(plan.sizes, groups, budget)[0]]
        if search.is_exact(budget) and _try_row(work, row, scorer, settings) is not None:
            break
        budget //= 2
    if budget < everything:  # else memory was not the limit, and a larger budget may fit
        add_to_json(search.memo_path, dict[str, int], {search.key: budget})
    return budget


@torch.no_grad()
def compute_missing(
    cache: ReferenceCache,
    plan: PassPlan,
    scorer: CompletionLogps,
    settings: PassSettings,
    *,
    progress: Callable[[IntArray], None] = lambda groups: None,
) -> int:
    """Computes the plan's rows and writes them to the cache; returns the token budget that fitted in memory:
    if a row does not fit, it is halved, and all rows are split. `progress` gets the groups of each finished
    row. Raises CacheError, and ModelError if a log-prob is not finite or a pair does not fit."""
    budget, rows, written = settings.token_budget, deque(plan.rows), time.monotonic()
    computed: deque[tuple[IntArray, Callable[[], Sequence[Any]]]] = deque()  # groups, results
    finished: list[pa.Table] = []
    try:
        while rows or computed:
            if rows:
                members = rows.popleft()
                result = _try_row(plan.work, members, scorer, settings)
                if result is None:
                    budget = _halved(budget, members, plan, settings)
                    rows.appendleft(members)
                    rows = deque(row[part] for row in rows for part in next_fit(plan.sizes, row, budget))
                    continue
                computed.append((members, host_copies([result.sums, result.num_tokens])))
                if len(computed) <= ROWS_BEHIND.get(settings.device.type, 0):
                    continue
            members, results = computed.popleft()
            # One `append` adds keys and values together, so that a signal cannot come between them.
            finished.append(_finished_row(plan.work, members, results))
            progress(members)
            if time.monotonic() - written > settings.write_every_seconds:
                cache.append(pa.concat_tables(finished), settings.metadata)
                finished, written = [], time.monotonic()
                if settings.num_ranks == 1 and rows:
                    rows = _still_missing(cache, plan, rows, progress)
        for members in plan.idle_rows:
            if _try_row(plan.work, members, scorer, settings) is None:
                _halved(budget, members, plan, settings)
    finally:
        if finished:
            cache.append(pa.concat_tables(finished), settings.metadata)
    return budget


def _still_missing(
    cache: ReferenceCache, plan: PassPlan, rows: deque[IntArray], progress: Callable[[IntArray], None]
) -> deque[IntArray]:
    """Returns the rows that no other run on this cache has computed in the meantime, whole, because their
    last bits depend on that. If there is another run, they are shuffled, so that the two seldom compute the
    same row."""
    table, groups, num_seen = plan.work.table, np.concatenate(rows), len(cache.seen_parts)
    lacks = plan.work.missing[groups]
    keys = np.stack((table.chosen_keys[groups], table.rejected_keys[groups]), axis=1)[lacks]
    lacks[lacks] = np.isnan(cache.lookup(keys, only_new=True))
    if len(cache.seen_parts) == num_seen:
        return rows
    left: list[IntArray] = []
    for row, of_row in zip(rows, np.split(lacks, np.cumsum([len(row) for row in rows])[:-1]), strict=True):
        left.append(row) if of_row.any() else progress(row)
    random.Random().shuffle(left)
    return deque(left)


def _try_row(
    work: ReferenceWork, members: IntArray, scorer: CompletionLogps, settings: PassSettings
) -> RowLogps | None:
    """Returns the log-probs of the groups' missing sequences, or None if the row does not fit in memory."""
    groups = [work.table.group(int(member), work.missing[member]) for member in members]
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
    tokens = plan.sizes.of_row(members).tokens
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


def _finished_row(work: ReferenceWork, members: IntArray, results: Callable[[], Sequence[Any]]) -> pa.Table:
    sums, num_tokens = results()
    wrong = np.flatnonzero(~np.isfinite(sums))
    if len(wrong):
        group = members[np.nonzero(work.missing[members])[0][wrong[0]]]
        raise ModelError(
            f"the reference model computes a log-prob of {sums[wrong[0]]} for the pair in row "
            f"{work.table.row_numbers[group]} of its data source; check the model's weights, or set "
            "model.dtype: float32, whose numbers have a larger range"
        )
    keys = np.stack((work.table.chosen_keys[members], work.table.rejected_keys[members]), axis=1)
    return sequence_table(keys[work.missing[members]], sums, num_tokens)
