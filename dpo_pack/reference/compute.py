"""The pass that fills the reference cache: it computes the log-probs that the cache lacks, without gradients.

A plan says which sequences share a row (what one forward pass computes), and which rank computes the row. It
depends only on lengths, on the keys in the cache and on settings. The cache gets whole rows.

Legend: G groups (pairs, or one side of a pair) that rows consist of.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch

from dpo_pack.model.layout import layout_row, packed_row, padded_row
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.packing.bin_packing import (
    next_fit,
    pack_sequences_longest_first,
    padded_rows,
    split_over_ranks,
)
from dpo_pack.packing.flops import ModelShape
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.parts import TokenLogps, sequence_table
from dpo_pack.reference.work import ReferenceWork
from dpo_pack.system.errors import ModelError, is_out_of_memory
from dpo_pack.system.memory import HostCopies, release_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """The settings of a pass: how rows are built, and how often results are written to disk."""

    token_budget: int
    share_prompt: bool
    device: torch.device
    per_token: bool = False  # also keep the log-prob of each token, which some losses need
    rank: int = 0
    num_ranks: int = 1
    in_lockstep: bool = False  # True for a sharded model: all ranks compute a row at the same time
    write_every_seconds: float = 20.0
    metadata: Mapping[str, str] = field(default_factory=dict)  # a note in each part, for people who read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """The size of one row, or of all rows of a pass."""

    num_sequences: int
    num_pairs: int  # pairs with a sequence to compute
    num_tokens: int  # tokens that are computed; a shared prompt counts once
    flops: float  # estimated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassPlan:
    """The rows of this rank, with their tokens and FLOPs."""

    work: ReferenceWork
    rows: Sequence[IntArray]  # the groups of each row
    idle_rows: Sequence[IntArray]  # computed last, results unused: other ranks still compute a row
    row_tokens: IntArray  # [G] tokens as `token_budget` counts them, padding included
    tokens: IntArray  # [G] tokens that a forward pass computes, without padding
    flops: FloatArray  # [G] estimated

    def amount(self, groups: IntArray) -> Amount:
        return Amount(
            num_sequences=int(self.work.missing[groups].sum()),
            num_pairs=len(groups),
            num_tokens=int(self.tokens[groups].sum()),
            flops=float(self.flops[groups].sum()),
        )

    @property
    def total(self) -> Amount:
        return self.amount(np.concatenate([np.zeros(0, dtype=np.int64), *self.rows]))


def plan_pass(work: ReferenceWork, shape: ModelShape, settings: PassSettings, *, is_packed: bool) -> PassPlan:
    """Plans the rows of this rank. The costliest row is first, so that a lack of memory shows at once.

    Rows are planned over *all* sequences of the tables (`work.sides`), as if the cache were empty; then
    groups without a missing sequence are removed. So a row depends neither on which other rows are finished
    nor on the number of ranks, and a pass that is started again after a kill computes the same rows.

    Rows are divided over ranks by their FLOPs, which are estimated from the `shape` of the model. Ranks in
    lockstep must compute the same number of rows: a rank with one row less also computes an idle row, the
    cheapest of all rows.
    """
    lengths, missing, is_padded = work.lengths, work.missing, not is_packed
    shares = settings.share_prompt and is_packed
    flops = lengths.flops(missing, share_prompt=shares, shape=shape)
    build_rows = pack_sequences_longest_first if is_packed else padded_rows
    is_open = np.asarray(missing.any(axis=1))
    whole = lengths.row_tokens(work.sides, share_prompt=shares, is_padded=is_padded)
    rows = [row[is_open[row]] for row in build_rows(whole, settings.token_budget)]
    rows = [row for row in rows if len(row)]
    costs = np.array([flops[row].sum() for row in rows], dtype=np.float64)
    mine = split_over_ranks(costs, settings.num_ranks, equal_counts=settings.in_lockstep)[settings.rank]
    num_idle = -(-len(rows) // settings.num_ranks) - len(mine) if settings.in_lockstep else 0
    return PassPlan(
        work=work,
        rows=[rows[number] for number in mine[np.argsort(-costs[mine], kind="stable")]],
        idle_rows=[rows[int(costs.argmin())]] * num_idle if num_idle else [],
        row_tokens=lengths.row_tokens(missing, share_prompt=shares, is_padded=is_padded),
        tokens=lengths.row_tokens(missing, share_prompt=shares),
        flops=flops,
    )


def split_row(row: IntArray, tokens: IntArray, token_budget: int) -> list[IntArray]:
    """Splits a row, in order, into rows within `token_budget`. `tokens` [G] has the tokens of all groups."""
    return [row[positions] for positions in next_fit(tokens[row], token_budget)]


@torch.no_grad()
def compute_missing(
    cache: ReferenceCache,
    plan: PassPlan,
    scorer: CompletionLogps,
    settings: PassSettings,
    *,
    progress: Callable[[Amount], None] = lambda row: None,
) -> int:
    """Computes the plan's rows and writes them to the cache; returns the token budget that fitted in memory.

    If a row does not fit in memory, the budget is halved, and this row and all later rows are split; ranks in
    lockstep cannot split. `progress` is called with each finished row. A killed pass loses all rows after the
    last file that it wrote to the cache. An interrupted pass (Ctrl-C) loses only rows whose results are still
    on the device (at most two). Raises CacheError if the disk refuses a file, ModelError if a log-prob is
    not finite or if a row that cannot be split does not fit in memory.
    """
    budget = settings.token_budget
    rows = deque(plan.rows)
    computed: deque[tuple[IntArray, HostCopies]] = deque()  # the groups of a row, and their results
    finished: list[pa.Table] = []
    written = time.monotonic()

    def finish_row() -> None:
        nonlocal finished, written
        members, results = computed.popleft()
        # One `append` adds keys and values together, so that a signal cannot come between them.
        finished.append(_finished_row(plan.work, members, results))
        progress(plan.amount(members))
        if time.monotonic() - written > settings.write_every_seconds:
            cache.append(pa.concat_tables(finished), settings.metadata)
            finished, written = [], time.monotonic()

    try:
        while rows:
            members = rows.popleft()
            result = _try_row(plan.work, members, scorer, settings)
            if result is None:
                budget = _halved(budget, members, plan)
                if settings.in_lockstep:
                    raise _cannot_split(budget)
                rows = deque(
                    part for row in (members, *rows) for part in split_row(row, plan.row_tokens, budget)
                )
                continue
            computed.append((members, _copies(result, settings)))
            if len(computed) > _num_rows_behind(settings.device):
                finish_row()
        while computed:
            finish_row()
        for members in plan.idle_rows:
            if _try_row(plan.work, members, scorer, settings) is None:
                raise _cannot_split(_halved(budget, members, plan))
    finally:
        if finished:
            cache.append(pa.concat_tables(finished), settings.metadata)
    return budget


def probe_row(plan: PassPlan, scorer: CompletionLogps, settings: PassSettings, token_budget: int) -> bool:
    """Returns True if a row of `token_budget` tokens, from the plan's costliest groups, fits in memory."""
    groups = np.concatenate(plan.rows)
    row = split_row(groups, plan.row_tokens, token_budget)[0]
    with torch.no_grad():
        return _try_row(plan.work, row, scorer, settings) is not None


def _try_row(
    work: ReferenceWork, members: IntArray, scorer: CompletionLogps, settings: PassSettings
) -> RowLogps | None:
    """Returns the log-probs of the groups' missing sequences, or None if the row does not fit in memory."""
    groups = [work.group(int(member)) for member in members]
    try:
        if scorer.backend is None:
            row = padded_row(groups, device=settings.device)
        else:
            row = packed_row(layout_row(groups, share_prompt=settings.share_prompt), settings.device)
        result: RowLogps = scorer(row)
        return result
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    # After the except block Python has freed the traceback, which kept the row's activations in memory.
    release_memory()
    return None


def _halved(budget: int, members: IntArray, plan: PassPlan) -> int:
    """Returns a smaller budget after a row ran out of memory. Raises ModelError if no row can be smaller."""
    tokens = int(plan.row_tokens[members].sum())
    if len(members) == 1:
        raise ModelError(
            f"the reference pass ran out of memory on a single pair ({tokens:,} tokens, row "
            f"{plan.work.row_number(int(members[0]))} of its data source); lower data.max_length, or free "
            "memory"
        )
    return max(1, min(budget, tokens) // 2)


def _cannot_split(budget: int) -> ModelError:
    """Returns the error for a sharded model: a split would give this rank more rows than other ranks have."""
    return ModelError(
        "reference.token_budget: the reference pass ran out of memory, and it cannot split the rows of a "
        f"sharded model; set reference.token_budget: {budget}"
    )


def _num_rows_behind(device: torch.device) -> int:
    """Returns how many later rows the device has in its queue when the host reads a row's results."""
    return 1 if device.type == "cuda" else 0


def _copies(result: RowLogps, settings: PassSettings) -> HostCopies:
    tensors = [result.sums, result.num_tokens]
    return HostCopies.begin([*tensors, result.token_logps.float()] if settings.per_token else tensors)


def _finished_row(work: ReferenceWork, members: IntArray, results: HostCopies) -> pa.Table:
    """Returns the `sequence_table` of a row's groups. Raises ModelError if a log-prob is not finite."""
    keys = [work.keys(int(member)) for member in members]
    sums, num_tokens, *token_logps = results.read()
    wrong = np.flatnonzero(~np.isfinite(sums))
    if len(wrong):
        group = int(np.repeat(members, [len(of_group) for of_group in keys])[wrong[0]])
        raise ModelError(
            f"the reference model computes a log-prob of {sums[wrong[0]]} for the pair in row "
            f"{work.row_number(group)} of its data source; check the model's weights, or set model.dtype: "
            "float32, whose numbers have a larger range"
        )
    tokens = TokenLogps.of_lengths(token_logps[0], num_tokens) if token_logps else None
    return sequence_table(np.concatenate(keys), sums, num_tokens, tokens)
