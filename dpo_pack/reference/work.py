"""Finds the work of the reference pass: the sequences whose log-probs the cache lacks, and rows of them.

A group is a pair, so that its prompt is computed once, or one side of a pair. A row is what one forward pass
computes. A plan says which groups share a row, and which rank computes the row. It depends only on lengths,
on the keys in the cache and on settings.

Legend: G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch

from dpo_pack.data.store import PairTable
from dpo_pack.packing.bin_packing import pack_sequences_longest_first, padded_rows, split_over_ranks
from dpo_pack.packing.flops import ModelShape, causal_area, sequence_flops
from dpo_pack.packing.lengths import FloatArray, Group, IntArray
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.parts import KeyIndex, Keys

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceWork:
    """The groups that rows consist of, and which of their sequences the cache lacks.

    Of equal sequences only the first one is in a group, so a group can be one side of a pair.
    """

    table: PairTable  # [G] the pair of each group
    sides: Bools  # [G, (chosen, rejected)] True if this is the first of equal sequences
    missing: Bools  # [G, 2] True if `sides` is True and the cache lacks the sequence

    @property
    def num_unique(self) -> int:
        return int(self.sides.sum())

    @property
    def num_missing(self) -> int:
        return int(self.missing.sum())

    @property
    def num_cached(self) -> int:
        return self.num_unique - self.num_missing

    def group(self, number: int) -> Group:
        """Returns a group with its missing sequences only."""
        return self.table.group(number, self.missing[number].tolist())

    def keys(self, groups: IntArray) -> Keys:
        """Returns the [n, 16] keys of the groups' missing sequences; of a group, the chosen one is first."""
        both = np.stack((self.table.chosen_keys[groups], self.table.rejected_keys[groups]), axis=1)
        missing: Keys = both[self.missing[groups]]
        return missing

    @property
    def completion_lengths(self) -> IntArray:
        """The tokens of both completions of each group's pair, [G, (chosen, rejected)]."""
        return np.stack((self.table.chosen_lengths, self.table.rejected_lengths), axis=1).astype(np.int64)

    def row_tokens(self, sides: Bools, *, share_prompt: bool, is_padded: bool = False) -> IntArray:
        """Returns [G]: the tokens, in a row, of each group's sides that are True in `sides` [G, 2].

        With `is_padded`, a group counts as two sequences that are padded to its longest True side.
        """
        lengths = (self.table.prompt_lengths[:, None] + self.completion_lengths) * sides
        tokens: IntArray = 2 * lengths.max(axis=1) if is_padded else lengths.sum(axis=1)
        if share_prompt and not is_padded:
            tokens -= self.table.shared_lengths * sides.all(axis=1)
        return tokens

    def flops(self, sides: Bools, *, share_prompt: bool, shape: ModelShape) -> FloatArray:
        """Returns [G]: estimated FLOPs of a forward pass over the sides that are True in `sides` [G, 2]."""
        prompts, completions = self.table.prompt_lengths, self.completion_lengths
        shared = self.table.shared_lengths
        is_shared = sides.all(axis=1) & share_prompt
        areas = []
        for kind in shape.attention:
            area: FloatArray = (causal_area(prompts[:, None] + completions, kind.window) * sides).sum(axis=1)
            areas.append(area - causal_area(shared, kind.window) * is_shared)
        tokens = self.row_tokens(sides, share_prompt=share_prompt).astype(np.float64)
        scored = (completions * sides).sum(axis=1).astype(np.float64)
        unread = tokens - scored + (shared - prompts + 1) * is_shared
        return sequence_flops(
            shape, tokens=tokens, scored_tokens=scored, areas=areas, unread_positions=unread
        )


def find_sequences(table: PairTable, *, per_token: bool = False) -> tuple[KeyIndex, Bools]:
    """Returns an index of the sequences of all pairs (chosen, rejected, chosen, ...), and for each different
    sequence whether its per-token values are needed: all with `per_token`, else where tokens have weights."""
    index = KeyIndex.of(np.stack((table.chosen_keys, table.rejected_keys), axis=1))
    needs_tokens = np.full(len(index), per_token)
    needs_tokens[index.inverse[np.repeat(table.has_token_weights, 2)]] = True
    return index, needs_tokens


def find_work(
    cache: ReferenceCache, tables: Sequence[PairTable], *, per_token: bool = False
) -> ReferenceWork:
    """Finds the sequences of which the cache lacks what a run needs, see `find_sequences`."""
    table = join_tables(tables)
    index, needs_tokens = find_sequences(table, per_token=per_token)
    sums = np.empty(len(index))
    for needs in (True, False):
        these = needs_tokens == needs
        sums[these] = cache.lookup(index.keys[these], per_token=needs)
    sides, missing = np.zeros((2, 2 * table.num_pairs), dtype=np.bool_)
    sides[index.first] = True
    missing[index.first] = np.isnan(sums)
    sides, missing = sides.reshape(-1, 2), missing.reshape(-1, 2)
    pairs = np.flatnonzero(sides.any(axis=1))
    return ReferenceWork(table=table.select(pairs), sides=sides[pairs], missing=missing[pairs])


def join_tables(tables: Sequence[PairTable]) -> PairTable:
    """Makes one table of all pairs, one table after another."""
    names = [column.name for column in fields(PairTable) if column.name != "stores"]
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
    num_stores = np.array([len(table.stores) for table in tables], dtype=np.int16)
    begins = np.cumsum(num_stores) - num_stores
    columns["source_indices"] = columns["source_indices"] + np.repeat(begins, [t.num_pairs for t in tables])
    return PairTable(stores=tuple(store for table in tables for store in table.stores), **columns)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassPlan:
    """The rows of this rank."""

    work: ReferenceWork
    rows: Sequence[IntArray]  # the groups of each row
    idle_rows: Sequence[IntArray]  # computed last, results unused: other ranks still compute a row
    row_tokens: IntArray  # [G] tokens of each group, padding included


def plan_pass(work: ReferenceWork, shape: ModelShape, settings: PassSettings, *, is_packed: bool) -> PassPlan:
    """Plans the rows of this rank. The costliest row is first, so that a lack of memory shows at once.

    Rows are planned over *all* sequences of the tables (`work.sides`), as if the cache were empty; then
    groups without a missing sequence are removed. So a row depends neither on which other rows are finished
    nor on the number of ranks, and a pass that is started again after a kill computes the same rows.

    Rows are divided over ranks by their FLOPs, which are estimated from the `shape` of the model. Ranks in
    lockstep must compute the same number of rows: a rank with one row less also computes an idle row, the
    cheapest of all rows.
    """
    missing, is_padded, shares = work.missing, not is_packed, settings.share_prompt and is_packed
    flops = work.flops(missing, share_prompt=shares, shape=shape)
    build_rows = pack_sequences_longest_first if is_packed else padded_rows
    is_open = np.asarray(missing.any(axis=1))
    whole = work.row_tokens(work.sides, share_prompt=shares, is_padded=is_padded)
    rows = [row[is_open[row]] for row in build_rows(whole, settings.token_budget)]
    rows = [row for row in rows if len(row)]
    costs = np.array([flops[row].sum() for row in rows], dtype=np.float64)
    mine = split_over_ranks(costs, settings.num_ranks, equal_counts=settings.in_lockstep)[settings.rank]
    num_idle = -(-len(rows) // settings.num_ranks) - len(mine) if settings.in_lockstep else 0
    return PassPlan(
        work=work,
        rows=[rows[number] for number in mine[np.argsort(-costs[mine], kind="stable")]],
        idle_rows=[rows[int(costs.argmin())]] * num_idle if num_idle else [],
        row_tokens=work.row_tokens(missing, share_prompt=shares, is_padded=is_padded),
    )
