"""What the reference pass has to do: which sequences, in which rows, on which process.

Everything here is a pure function of lengths, of what the cache has and of numbers. Rows are planned over
*all* sequences of the tables, as if the cache were empty, and of each row only what is missing is computed.
So a pass that was killed and goes on computes the rows it would have computed, with whatever number of
processes, as long as finished rows are kept whole.

Legend: G groups, a pair or the half of one; R rows; S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpo_pack.data.balance import split_over_ranks
from dpo_pack.data.bin_packing import next_fit, pack_sequences_longest_first, padded_rows
from dpo_pack.data.flops import ModelShape, causal_area, sequence_flops
from dpo_pack.data.lengths import AnyIntArray, FloatArray, IntArray
from dpo_pack.data.store import PairTable
from dpo_pack.key_index import KeyIndex, Keys
from dpo_pack.layout import Group
from dpo_pack.reference import pair_lengths
from dpo_pack.reference_cache import ReferenceCache

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupLengths:
    """Token counts of every group: a context and the completions of it that are its to compute."""

    prompt: AnyIntArray  # [G]
    completions: IntArray  # [G, (chosen, rejected)]
    shared: AnyIntArray  # [G] common prefix of the pair's two sequences, at least the prompt

    def row_tokens(self, sides: Bools, *, share_prompt: bool) -> IntArray:
        """[G]: tokens in a packed row of the sides marked in `sides` [G, 2]."""
        tokens: IntArray = ((self.prompt[:, None] + self.completions) * sides).sum(axis=1)
        if share_prompt:
            tokens -= self.shared * sides.all(axis=1)
        return tokens

    def padded_tokens(self, sides: Bools) -> IntArray:
        """[G]: tokens in a padded batch of two sequences as long as the longest of `sides` [G, 2]."""
        longest: IntArray = ((self.prompt[:, None] + self.completions) * sides).max(axis=1)
        return 2 * longest

    def flops(self, sides: Bools, *, share_prompt: bool, shape: ModelShape) -> FloatArray:
        """[G]: estimated FLOPs of a forward pass over `sides` [G, 2]."""
        ends = self.prompt[:, None] + self.completions
        is_shared = sides.all(axis=1) & share_prompt
        areas = []
        for kind in shape.attention:
            area: FloatArray = (causal_area(ends, kind.window) * sides).sum(axis=1)
            areas.append(area - causal_area(self.shared, kind.window) * is_shared)
        tokens = self.row_tokens(sides, share_prompt=share_prompt).astype(np.float64)
        scored = (self.completions * sides).sum(axis=1).astype(np.float64)
        repeated = (self.shared - self.prompt + 1) * is_shared
        return sequence_flops(
            shape,
            tokens=tokens,
            scored_tokens=scored,
            areas=areas,
            unread_positions=tokens - scored + repeated,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceWork:
    """The sequences of some tables, each once, as groups ready for rows, and which of them are missing.

    Of equal sequences the first counts. A pair that has both its sequences is one group, so the pass
    computes its prompt once.
    """

    tables: tuple[PairTable, ...]
    table_indices: npt.NDArray[np.int64]  # [G]
    pair_indices: npt.NDArray[np.int64]  # [G]
    sides: Bools  # [G, (chosen, rejected)]: the pair's sequence is the first of its kind
    missing: Bools  # [G, 2]: of those, the ones the cache lacks
    lengths: GroupLengths

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
        """The missing sequences of a group."""
        table, pair = self._pair(number)
        completions = []
        if self.missing[number, 0]:
            completions.append(table.chosen(pair))
        if self.missing[number, 1]:
            completions.append(table.rejected(pair))
        return Group(context=table.prompt(pair), completions=tuple(completions))

    def keys(self, number: int) -> Keys:
        """[1 or 2, 16]: the keys of a group's missing sequences, chosen first."""
        table, pair = self._pair(number)
        both = np.stack((table.chosen_keys[pair], table.rejected_keys[pair]))
        needed: Keys = both[self.missing[number]]
        return needed

    def row_number(self, number: int) -> int:
        """Where a group's pair is in its source, counted from 1."""
        table, pair = self._pair(number)
        return int(table.row_numbers[pair])

    def _pair(self, number: int) -> tuple[PairTable, int]:
        return self.tables[self.table_indices[number]], int(self.pair_indices[number])


def find_work(
    cache: ReferenceCache, tables: Sequence[PairTable], *, per_token: bool = False
) -> ReferenceWork:
    """What the cache lacks of the tables' sequences; `per_token`: sums alone do not count."""
    keys = np.concatenate([np.stack((t.chosen_keys, t.rejected_keys), axis=1) for t in tables])
    first = KeyIndex.of(keys.reshape(-1, 16)).first
    sides = np.zeros(2 * len(keys), dtype=np.bool_)
    missing = np.zeros(2 * len(keys), dtype=np.bool_)
    sides[first] = True
    missing[first] = ~cache.contains(keys.reshape(-1, 16)[first], per_token=per_token)
    return reference_work(tables, sides.reshape(-1, 2), missing.reshape(-1, 2))


def reference_work(tables: Sequence[PairTable], sides: Bools, missing: Bools) -> ReferenceWork:
    """The work of marked sequences: `sides` and `missing` are [all pairs of the tables, 2]."""
    sizes = [table.num_pairs for table in tables]
    lengths = [pair_lengths(table) for table in tables]
    pairs = np.flatnonzero(sides.any(axis=1))
    completions = np.stack(
        [np.concatenate([of.chosen for of in lengths]), np.concatenate([of.rejected for of in lengths])],
        axis=1,
    )
    return ReferenceWork(
        tables=tuple(tables),
        table_indices=np.repeat(np.arange(len(tables)), sizes)[pairs],
        pair_indices=np.concatenate([np.arange(size) for size in sizes])[pairs],
        sides=sides[pairs],
        missing=missing[pairs],
        lengths=GroupLengths(
            prompt=np.concatenate([of.prompt for of in lengths])[pairs].astype(np.int64),
            completions=completions[pairs].astype(np.int64),
            shared=np.concatenate([of.shared for of in lengths])[pairs].astype(np.int64),
        ),
    )


def plan_rows(
    lengths: GroupLengths,
    sides: Bools,
    missing: Bools,
    *,
    token_budget: int,
    is_packed: bool,
    share_prompt: bool,
    shape: ModelShape,
    rank: int = 0,
    num_ranks: int = 1,
    in_lockstep: bool = False,
) -> tuple[list[IntArray], list[IntArray]]:
    """(rows of this rank, idle rows), arrays of groups: costliest first, so that running out of memory shows
    at once.

    Ranks that compute `in_lockstep` need as many rows each; one with a row less computes the cheapest of all
    for nothing. A row is one of those that *all* sequences (`sides`) would be packed in, without the groups
    that have nothing missing: rows do not depend on which other rows are finished, nor on ranks. Rows are
    spread over ranks by estimated FLOPs.
    """
    if is_packed:
        whole = lengths.row_tokens(sides, share_prompt=share_prompt)
        planned = pack_sequences_longest_first(whole, token_budget)
    else:
        planned = padded_rows(lengths.padded_tokens(sides), token_budget)
    flops = lengths.flops(missing, share_prompt=share_prompt and is_packed, shape=shape)
    is_open = np.asarray(missing.any(axis=1))
    rows = [row[is_open[row]] for row in planned]
    rows = [row for row in rows if len(row)]
    costs = np.array([flops[row].sum() for row in rows], dtype=np.float64)
    mine = split_over_ranks(costs, num_ranks, equal_counts=in_lockstep)[rank]
    num_idle = -(-len(rows) // num_ranks) - len(mine) if in_lockstep else 0
    idle = [rows[int(costs.argmin())]] * num_idle if num_idle else []
    return [rows[number] for number in mine[np.argsort(-costs[mine], kind="stable")]], idle


def split_row(row: IntArray, tokens: AnyIntArray, token_budget: int) -> list[IntArray]:
    """The groups of a row in rows of at most `token_budget`, in their order; `tokens`: [G], of all groups."""
    return [row[positions] for positions in next_fit(np.asarray(tokens[row], dtype=np.int64), token_budget)]
