"""Merges the pairs of one prompt into a group. A group computes the prompt and each completion only once.

Rankings and all-pairs data sets have many pairs of few completions. In a row (the pairs of one forward pass)
such pairs become one `layout.Group` of n completions, and an index says which two of them a pair has. The
planner, which fills rows, asks `TableMerging` which pairs merge and how large the groups are; `merge_group`
makes a group.

Legend: P pairs of a table, k pairs of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.store import PairTable, common_prefix_length, key_values, pair_lengths
from dpo_pack.packing.lengths import TRAINING_PASSES, CutGroup, GroupSize, IntArray, ModelShape, group_size

# So many sizes are kept, because the planner, the report and the code that builds rows ask for them again.
REMEMBERED_GROUPS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedGroup:
    """The different completions of some pairs of one prompt."""

    completions: tuple[NDArray[np.int32], ...]  # token ids, in the order of their first pairs
    pair_completions: IntArray  # [k, (chosen, rejected)] positions in `completions`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableMerging:
    """Merges the pairs of a table; implements the planner's `PromptMerging`. `prompt_merging` makes it."""

    table: PairTable
    prompts: IntArray  # [P] prompt numbers: token-identical prompts have the same number
    tokens: IntArray  # [P] tokens of a row that has only this pair
    size_of: Callable[[tuple[int, ...]], GroupSize]

    def groups_of(self, pairs: IntArray) -> list[IntArray]:
        """Groups `pairs` by prompt. Returns ascending positions in `pairs`; the first pair's group is first.

        A group computes once what all its completions begin with. The two completions of a pair may have a
        longer common beginning. So if separate pairs take fewer tokens, each pair becomes a group.
        """
        _, first, inverse = np.unique(self.prompts[pairs], return_index=True, return_inverse=True)
        if len(first) == len(pairs):
            return [np.array([position]) for position in range(len(pairs))]
        order = np.argsort(first[inverse], kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(first[inverse][order])) + 1)
        return [part for positions in groups for part in self._saving(pairs[positions], positions)]

    def _saving(self, group: IntArray, positions: IntArray) -> Iterable[IntArray]:
        saves = len(group) == 1 or self.measure(group).tokens < self.tokens[group].sum()
        return [positions] if saves else positions[:, None]

    def measure(self, pairs: IntArray) -> GroupSize:
        """Returns the size of one group of [k] pairs of one prompt, computed from their token ids."""
        return self.size_of(tuple(pairs.tolist()))

    def cut(self, pairs: IntArray, token_budget: int) -> list[CutGroup]:
        """Splits `pairs` of one prompt, in order, into groups within the budget. A longer pair is a group.

        Groups that come into the same row are joined again, and then share only what all their completions
        begin with. So each group is counted as if it shared only the common beginning of all `pairs`. Then
        a joined group never has more tokens than the sum of the counts.
        """
        table = self.table
        prompt = int(table.prompt_lengths[pairs[0]])
        shared = shared_length(table, int(pairs[0]), merge_group(table, pairs.tolist()).completions)
        sides = ((table.chosen_keys, table.chosen_lengths), (table.rejected_keys, table.rejected_lengths))
        groups: list[CutGroup] = []
        begin, tokens, seen = 0, shared, set[bytes]()
        for position, pair in enumerate(pairs.tolist()):
            tails = {keys[pair].tobytes(): prompt + int(lengths[pair]) - shared for keys, lengths in sides}
            more = sum(tail for key, tail in tails.items() if key not in seen)
            if position > begin and tokens + more > token_budget:
                groups.append(CutGroup(pairs=pairs[begin:position], tokens=tokens))
                begin, tokens, seen, more = position, shared, set(), sum(tails.values())
            tokens += more
            seen |= tails.keys()
        return [*groups, CutGroup(pairs=pairs[begin:], tokens=tokens)]


def prompt_merging(table: PairTable, shape: ModelShape, *, passes: float = TRAINING_PASSES) -> TableMerging:
    """Prepares the merging of a table's pairs. A group costs the FLOPs of `passes` forward passes."""

    @lru_cache(maxsize=REMEMBERED_GROUPS)
    def size_of(pairs: tuple[int, ...]) -> GroupSize:
        merged = merge_group(table, pairs)
        prompt = int(table.prompt_lengths[pairs[0]])
        shared = shared_length(table, pairs[0], merged.completions)
        lengths = [len(completion) for completion in merged.completions]
        return group_size(shape, prompt=prompt, completions=lengths, shared=shared, passes=passes)

    _, prompts = np.unique(key_values(table.prompt_keys), return_inverse=True)
    return TableMerging(
        table=table,
        prompts=prompts.astype(np.int64),
        tokens=pair_lengths(table).row_tokens(share_prompt=True),
        size_of=size_of,
    )


def merge_group(table: PairTable, pairs: Sequence[int]) -> MergedGroup:
    """Merges `pairs` of `table`, which have the same prompt; equal completions become one."""
    numbers: dict[bytes, int] = {}
    completions: list[NDArray[np.int32]] = []
    pair_completions = np.zeros((len(pairs), 2), dtype=np.int64)
    sides = ((table.chosen_keys, table.chosen), (table.rejected_keys, table.rejected))
    for position, pair in enumerate(pairs):
        for side, (keys, read) in enumerate(sides):
            number = numbers.setdefault(keys[pair].tobytes(), len(completions))
            if number == len(completions):
                completions.append(read(pair))
            pair_completions[position, side] = number
    return MergedGroup(completions=tuple(completions), pair_completions=pair_completions)


def shared_length(table: PairTable, pair: int, completions: Sequence[NDArray[np.int32]]) -> int:
    """Returns the tokens of the prompt of `pair` plus those of the common beginning of all `completions`."""
    first, *others = completions
    return int(table.prompt_lengths[pair]) + min(
        (common_prefix_length(first, other) for other in others), default=0
    )
