"""Pairs of one prompt -> one group that computes the prompt, and each different completion, once.

Rankings and all-pairs data sets have many pairs of few completions. In a row such pairs become one
`layout.Group` of n completions, and an index says which of them each pair prefers and which it does not.

Legend: P pairs of a table, k pairs of a group.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.flops import TRAINING_PASSES, ModelShape, group_flops
from dpo_pack.data.lengths import FloatArray, IntArray, PairLengths
from dpo_pack.data.store import PairTable, common_prefix_length

# The planner asks for a group's size several times, then the report or the builder of rows does.
REMEMBERED_GROUPS = 4096


class CutGroup(NamedTuple):
    """A part of a group that exceeds the token budget."""

    pairs: IntArray
    tokens: int  # to count with, see `cut_group`


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
    tokens: IntArray  # [P] of a pair alone
    measure: Callable[[IntArray], GroupSize]  # of [k] pairs of one prompt
    cut: Callable[[IntArray, int], list[CutGroup]]  # of those and a token budget that they exceed

    def groups_of(self, pairs: IntArray) -> list[IntArray]:
        """`pairs` by prompt: positions in `pairs`, ascending, groups in the order of their first pair.

        A group shares only what all of its completions begin with. Where its pairs, each with a longer
        beginning of its own, take fewer tokens apart, they are groups of one.
        """
        numbers = self.prompts[pairs]
        _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        if len(first) == len(pairs):
            return [np.array([position]) for position in range(len(pairs))]
        order = np.argsort(first[inverse], kind="stable")
        begins = np.flatnonzero(np.diff(first[inverse][order], prepend=-1))
        groups = np.split(order, begins[1:])
        return [part for group in groups for part in self._saving(pairs[group], group)]

    def _saving(self, group: IntArray, positions: IntArray) -> Iterable[IntArray]:
        saves = len(group) == 1 or self.measure(group).tokens < self.tokens[group].sum()
        return [positions] if saves else positions[:, None]


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
        items: list[tuple[IntArray, int, float]] = []
        for positions in self.merging.groups_of(pairs):
            group = pairs[positions]
            tokens, cost = self.measure(group)
            if len(group) == 1 or tokens <= token_budget:
                items.append((group, tokens, cost))
            else:
                cut = self.merging.cut(group, token_budget)
                items += [(part.pairs, part.tokens, self.measure(part.pairs)[1]) for part in cut]
        item_tokens = np.array([tokens for _, tokens, _ in items], dtype=np.int64)
        costs = np.array([cost for _, _, cost in items], dtype=np.float64)
        return [group for group, _, _ in items], item_tokens, costs

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


def shared_length(table: PairTable, pair: int, completions: Sequence[NDArray[np.int32]]) -> int:
    """Tokens of the prompt of `pair` and what all of its `completions` begin with."""
    first, *others = completions
    return int(table.prompt_lengths[pair]) + min(
        (common_prefix_length(first, other) for other in others), default=0
    )


def cut_group(table: PairTable, pairs: IntArray, token_budget: int) -> list[CutGroup]:
    """`pairs` of one prompt, in their order, in groups within the budget; one that exceeds it is alone.

    Groups that meet in a row are one group again, so each counts as if it shared only what all of `pairs`
    do: together they take no more than the sum.
    """
    prompt = int(table.prompt_lengths[pairs[0]])
    shared = shared_length(table, int(pairs[0]), merge_group(table, pairs.tolist()).completions)
    keys_lengths = ((table.chosen_keys, table.chosen_lengths), (table.rejected_keys, table.rejected_lengths))
    groups: list[CutGroup] = []
    begin, tokens, seen = 0, shared, set[bytes]()
    for position, pair in enumerate(pairs.tolist()):
        tails = {keys[pair].tobytes(): prompt + int(lengths[pair]) - shared for keys, lengths in keys_lengths}
        more = sum(tail for key, tail in tails.items() if key not in seen)
        if position > begin and tokens + more > token_budget:
            groups.append(CutGroup(pairs=pairs[begin:position], tokens=tokens))
            begin, tokens, seen, more = position, shared, set(), sum(tails.values())
        tokens += more
        seen |= tails.keys()
    return [*groups, CutGroup(pairs=pairs[begin:], tokens=tokens)]


def prompt_merging(table: PairTable, shape: ModelShape, *, passes: float = TRAINING_PASSES) -> PromptMerging:
    """How the pairs of a table merge; groups are measured on their token ids. `passes`: see flops.py."""

    @lru_cache(maxsize=REMEMBERED_GROUPS)
    def size_of(pairs: tuple[int, ...]) -> GroupSize:
        merged = merge_group(table, pairs)
        prompt = int(table.prompt_lengths[pairs[0]])
        shared = shared_length(table, pairs[0], merged.completions)
        lengths = [len(completion) for completion in merged.completions]
        tokens = prompt * len(lengths) + sum(lengths) - (len(lengths) - 1) * shared
        cost = group_flops(shape, prompt=prompt, completions=lengths, shared=shared, passes=passes)
        unread = tokens - sum(lengths) + (len(lengths) - 1) * (shared - prompt + 1)
        return GroupSize(tokens=tokens, scored_tokens=sum(lengths), unread_positions=unread, cost=cost)

    lengths = PairLengths(
        prompt=table.prompt_lengths,
        chosen=table.chosen_lengths,
        rejected=table.rejected_lengths,
        shared=table.shared_lengths,
    )
    return PromptMerging(
        prompts=number_prompts(table),
        tokens=lengths.row_tokens(share_prompt=True),
        measure=lambda pairs: size_of(tuple(pairs.tolist())),
        cut=partial(cut_group, table),
    )
