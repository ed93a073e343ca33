"""Finds the work of the reference pass: the sequences whose log-probs the cache lacks, in groups.

Legend: G groups; a group is a pair or one side of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpo_pack.data.store import PairTable
from dpo_pack.model.layout import Group
from dpo_pack.packing.flops import ModelShape, causal_area, sequence_flops
from dpo_pack.packing.lengths import AnyIntArray, FloatArray, IntArray
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.key_index import KeyIndex, Keys

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupLengths:
    """The token counts of every group's pair: its prompt, both completions and their common prefix."""

    prompt: AnyIntArray  # [G]
    completions: IntArray  # [G, (chosen, rejected)]
    shared: AnyIntArray  # [G] common prefix of the pair's two sequences, at least the prompt

    def row_tokens(self, sides: Bools, *, share_prompt: bool, is_padded: bool = False) -> IntArray:
        """Returns [G]: the tokens, in a row, of each group's sides that are True in `sides` [G, 2].

        With `is_padded`, a group counts as two sequences that are padded to its longest True side.
        """
        lengths = (self.prompt[:, None] + self.completions) * sides
        tokens: IntArray = 2 * lengths.max(axis=1) if is_padded else lengths.sum(axis=1)
        if share_prompt and not is_padded:
            tokens -= self.shared * sides.all(axis=1)
        return tokens

    def flops(self, sides: Bools, *, share_prompt: bool, shape: ModelShape) -> FloatArray:
        """Returns [G]: estimated FLOPs of a forward pass over the sides that are True in `sides` [G, 2]."""
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
    """The groups that rows consist of, and which of their sequences the cache lacks.

    A group is a pair, so that its prompt is computed once. Of equal sequences in the tables only the first
    one is in a group, so a group can also be one side of a pair.
    """

    tables: tuple[PairTable, ...]
    table_indices: npt.NDArray[np.int64]  # [G]
    pair_indices: npt.NDArray[np.int64]  # [G]
    sides: Bools  # [G, (chosen, rejected)] True if this is the first of equal sequences
    missing: Bools  # [G, 2] True if `sides` is True and the cache lacks the sequence
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

    @property
    def all_keys(self) -> Keys:
        """The keys of each group's pair, [G, (chosen, rejected), 16]."""
        tables = enumerate(self.tables)
        pairs = [(table, self.pair_indices[self.table_indices == number]) for number, table in tables]
        both = [np.stack((table.chosen_keys[of], table.rejected_keys[of]), axis=1) for table, of in pairs]
        return np.concatenate(both)

    def group(self, number: int) -> Group:
        """Returns a group with its missing sequences only."""
        table, pair = self._pair(number)
        both = zip(self.missing[number], (table.chosen(pair), table.rejected(pair)), strict=True)
        completions = tuple(completion for is_missing, completion in both if is_missing)
        return Group(context=table.prompt(pair), completions=completions)

    def keys(self, number: int) -> Keys:
        """Returns [1 or 2, 16] keys of a group's missing sequences; the chosen one is first."""
        table, pair = self._pair(number)
        both = np.stack((table.chosen_keys[pair], table.rejected_keys[pair]))
        needed: Keys = both[self.missing[number]]
        return needed

    def row_number(self, number: int) -> int:
        """Returns the number of the row, counted from 1, that a group's pair has in its data source."""
        table, pair = self._pair(number)
        return int(table.row_numbers[pair])

    def _pair(self, number: int) -> tuple[PairTable, int]:
        return self.tables[self.table_indices[number]], int(self.pair_indices[number])


def find_work(
    cache: ReferenceCache, tables: Sequence[PairTable], *, per_token: bool = False
) -> ReferenceWork:
    """Finds the sequences that the cache lacks, or with `per_token` those without per-token values in it.

    Sequences in pairs whose tokens have weights need per-token values in any case.
    """
    keys = np.concatenate([np.stack((t.chosen_keys, t.rejected_keys), axis=1) for t in tables])
    keys = keys.reshape(-1, 16)  # chosen, rejected, chosen, ...
    first = KeyIndex.of(keys).first
    is_first, is_missing = np.zeros((2, len(keys)), dtype=np.bool_)
    is_first[first] = True
    unique = keys[first]
    needs_tokens = np.full(len(unique), per_token) | (KeyIndex.of(weighted_keys(tables)).find(unique) >= 0)
    is_missing[first[needs_tokens]] = ~cache.contains(unique[needs_tokens], per_token=True)
    is_missing[first[~needs_tokens]] = ~cache.contains(unique[~needs_tokens], per_token=False)
    sides, missing = is_first.reshape(-1, 2), is_missing.reshape(-1, 2)
    pairs = np.flatnonzero(sides.any(axis=1))
    sizes = [table.num_pairs for table in tables]

    return ReferenceWork(
        tables=tuple(tables),
        table_indices=np.repeat(np.arange(len(tables)), sizes)[pairs],
        pair_indices=np.concatenate([np.arange(size) for size in sizes])[pairs],
        sides=sides[pairs],
        missing=missing[pairs],
        lengths=GroupLengths(
            prompt=np.concatenate([table.prompt_lengths for table in tables])[pairs].astype(np.int64),
            completions=np.concatenate(
                [np.stack((t.chosen_lengths, t.rejected_lengths), axis=1) for t in tables]
            )[pairs].astype(np.int64),
            shared=np.concatenate([table.shared_lengths for table in tables])[pairs].astype(np.int64),
        ),
    )


def weighted_keys(tables: Sequence[PairTable]) -> Keys:
    """Returns keys of the sequences in pairs whose tokens have weights: their sums do not suffice."""
    sides = [
        side[table.has_token_weights] for table in tables for side in (table.chosen_keys, table.rejected_keys)
    ]
    return np.concatenate(sides)
