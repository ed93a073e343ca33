"""Merges the pairs of one prompt into a group. A group computes the prompt and each completion only once.

The planner asks `TableMerging` which pairs of a row merge and how large the groups are.

Legend: P pairs of a table, k pairs of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpo_pack.data.store import PairTable, distinct_keys, pair_lengths
from dpo_pack.packing.lengths import (
    TRAINING_PASSES,
    CutGroup,
    Group,
    GroupSize,
    IntArray,
    ModelShape,
    common_prefix_length,
    group_size,
)

# So many sizes are kept, because the planner, the report and the code that builds rows ask for them again.
REMEMBERED_GROUPS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableMerging:
    """Merges the pairs of a table; implements the planner's `PromptMerging`. `prompt_merging` makes it."""

    table: PairTable
    prompts: IntArray  # [P] prompt numbers: token-identical prompts have the same number
    tokens: IntArray  # [P] tokens of a row that has only this pair
    size_of: Callable[[tuple[int, ...]], GroupSize]

    def groups_of(self, pairs: IntArray) -> list[IntArray]:
        """Groups `pairs` by prompt, or each alone where that takes fewer tokens, because the pairs share
        longer beginnings. Returns ascending positions in `pairs`; the first pair's group is first."""
        _, first, inverse = np.unique(self.prompts[pairs], return_index=True, return_inverse=True)
        if len(first) == len(pairs):
            return [np.array([position]) for position in range(len(pairs))]
        order = np.argsort(first[inverse], kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(first[inverse][order])) + 1)
        saving: list[IntArray] = []
        for positions in groups:
            group = pairs[positions]
            saves = len(group) == 1 or self.measure(group).tokens < self.tokens[group].sum()
            saving += [positions] if saves else list(positions[:, None])
        return saving

    def measure(self, pairs: IntArray) -> GroupSize:
        """Returns the size of one group of [k] pairs of one prompt, computed from their token ids."""
        return self.size_of(tuple(pairs.tolist()))

    def cut(self, pairs: IntArray, token_budget: int) -> list[CutGroup]:
        """Splits `pairs` of one prompt, in order, into groups within the budget, or of a longer pair, counted
        as if each shared only what all begin with, as groups do that are joined again in a row."""
        table = self.table
        prompt = int(table.prompt_lengths[pairs[0]])
        shared = _shared_length(merge_group(table, pairs.tolist())[0])
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
        group, _ = merge_group(table, pairs)
        size = group_size(
            shape,
            prompt=len(group.context),
            completions=[len(completion) for completion in group.completions],
            shared=_shared_length(group),
            passes=passes,
        )
        tower = shape.image_flops * np.count_nonzero(group.context == shape.image_token)
        return size._replace(cost=size.cost + tower)

    return TableMerging(
        table=table,
        prompts=distinct_keys(table.prompt_keys)[1],
        tokens=pair_lengths(table).row_tokens(share_prompt=True),
        size_of=size_of,
    )


def merge_group(table: PairTable, pairs: Sequence[int]) -> tuple[Group, IntArray]:
    """Merges `pairs` of one prompt. Returns the group and, for each pair, [k, (chosen, rejected)] positions
    in its completions, of which equal ones are one, in the order of their first pairs."""
    numbers: dict[bytes, int] = {}
    read: list[Group] = []  # of one completion each
    pair_completions = np.zeros((len(pairs), 2), dtype=np.int64)
    for position, pair in enumerate(pairs):
        for side, keys in enumerate((table.chosen_keys, table.rejected_keys)):
            number = numbers.setdefault(keys[pair].tobytes(), len(read))
            if number == len(read):
                read.append(table.group(pair, (side == 0, side == 1)))
            pair_completions[position, side] = number
    completions = tuple(one.completions[0] for one in read)
    return Group(context=read[0].context, completions=completions, images=read[0].images), pair_completions


def _shared_length(group: Group) -> int:
    """Returns the tokens of the prompt plus those of the common beginning of all completions."""
    completions = group.completions
    return len(group.context) + (common_prefix_length(completions) if len(completions) > 1 else 0)
