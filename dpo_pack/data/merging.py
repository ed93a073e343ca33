"""Pairs of one prompt -> one group that computes the prompt, and each different completion, once.

Rankings and all-pairs data sets have many pairs of few completions. In a row such pairs become one
`layout.Group` of n completions, and an index says which of them each pair prefers and which it does not.

Legend: P pairs of a table, k pairs of a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.flops import ModelShape, group_flops
from dpo_pack.data.lengths import FloatArray, IntArray
from dpo_pack.data.store import PairTable, common_prefix_length


class GroupSize(NamedTuple):
    """What pairs of one prompt take when they are one group."""

    tokens: int
    scored_tokens: int  # of its different completions
    unread_positions: int  # tokens that predict no scored one
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptMerging:
    """What a planner needs to know of pairs that become one group when they meet in a row."""

    prompts: IntArray  # [P] equal numbers: token-identical prompts
    measure: Callable[[IntArray], GroupSize]  # of [k] pairs of one prompt

    def groups_of(self, pairs: IntArray) -> list[IntArray]:
        """`pairs` by prompt: positions in `pairs`, ascending, groups in the order of their first pair."""
        numbers = self.prompts[pairs]
        _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        if len(first) == len(pairs):
            return [np.array([position]) for position in range(len(pairs))]
        order = np.argsort(first[inverse], kind="stable")
        begins = np.flatnonzero(np.diff(first[inverse][order], prepend=-1))
        return np.split(order, begins[1:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairSizes:
    """What pairs take of a row, alone and merged. An item is a pair, or pairs of one prompt in one group."""

    tokens: IntArray  # [P] of a pair alone
    costs: FloatArray  # [P] in any unit
    merging: PromptMerging | None

    def items_of(self, pairs: IntArray, token_budget: int) -> tuple[list[IntArray], IntArray, FloatArray]:
        """The items that `pairs` make, [n] with [n] tokens and [n] costs: each is an array of pairs.

        Pairs of one prompt stay together as far as the budget goes.
        """
        if self.merging is None:
            return list(pairs[:, None]), self.tokens[pairs], self.costs[pairs]
        items = []
        for positions in self.merging.groups_of(pairs):
            group = pairs[positions]
            while len(group) > 1 and self.measure(group)[0] > token_budget:
                end = 1
                while self.measure(group[: end + 1])[0] <= token_budget:
                    end += 1
                items.append(group[:end])
                group = group[end:]
            items.append(group)
        measured = [self.measure(item) for item in items]
        tokens = np.array([tokens for tokens, _ in measured], dtype=np.int64)
        return items, tokens, np.array([cost for _, cost in measured], dtype=np.float64)

    def measure(self, group: IntArray) -> tuple[int, float]:
        """Tokens and cost of pairs of one prompt that are one group."""
        if self.merging is None or len(group) == 1:
            return int(self.tokens[group[0]]), float(self.costs[group[0]])
        size = self.merging.measure(group)
        return size.tokens, size.cost

    def groups_in(self, row: IntArray) -> list[IntArray]:
        """The pairs of a row by group, each alone where nothing is merged."""
        if self.merging is None:
            return list(row[:, None])
        return [row[positions] for positions in self.merging.groups_of(row)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedGroup:
    """The different completions of some pairs of one prompt."""

    completions: tuple[NDArray[np.int32], ...]  # token ids, in the order of appearance
    pair_completions: IntArray  # [k, (chosen, rejected)] which of `completions` each pair has


def merge_group(table: PairTable, pairs: Sequence[int]) -> MergedGroup:
    """Merge `pairs` of `table`, all of one prompt; equal completions become one."""
    numbers: dict[bytes, int] = {}
    completions: list[NDArray[np.int32]] = []

    def number_of(key: bytes, ids: NDArray[np.int32]) -> int:
        if key not in numbers:
            numbers[key] = len(completions)
            completions.append(ids)
        return numbers[key]

    pair_completions = [
        (
            number_of(table.chosen_keys[pair].tobytes(), table.chosen(pair)),
            number_of(table.rejected_keys[pair].tobytes(), table.rejected(pair)),
        )
        for pair in pairs
    ]
    return MergedGroup(
        completions=tuple(completions), pair_completions=np.array(pair_completions, dtype=np.int64)
    )


def number_prompts(table: PairTable) -> IntArray:
    """[P]: equal numbers for token-identical prompts."""
    keys = np.ascontiguousarray(table.prompt_keys).view("V16").ravel()
    _, numbers = np.unique(keys, return_inverse=True)
    return numbers.astype(np.int64)


def prompt_merging(table: PairTable, shape: ModelShape) -> PromptMerging:
    """How the pairs of a table merge; groups are measured on their token ids."""

    def measure(pairs: IntArray) -> GroupSize:
        merged = merge_group(table, pairs.tolist())
        prompt = int(table.prompt_lengths[pairs[0]])
        first = merged.completions[0]
        others = merged.completions[1:]
        shared = prompt + min((common_prefix_length(first, other) for other in others), default=0)
        lengths = [len(completion) for completion in merged.completions]
        tokens = prompt * len(lengths) + sum(lengths) - (len(lengths) - 1) * shared
        cost = group_flops(shape, prompt=prompt, completions=lengths, shared=shared)
        unread = tokens - sum(lengths) + (len(lengths) - 1) * (shared - prompt + 1)
        return GroupSize(tokens=tokens, scored_tokens=sum(lengths), unread_positions=unread, cost=cost)

    return PromptMerging(prompts=number_prompts(table), measure=measure)
