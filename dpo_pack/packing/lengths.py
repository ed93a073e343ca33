"""The tokens of a pair in a row (one forward pass), alone or merged with other pairs of the same prompt.

Legend: P pairs of the data set, k pairs of one prompt. Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
AnyIntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One context and the completions that continue it. A pair is a group of two, the chosen one first.

    `context` is [C] token ids, C >= 1: its last token predicts the first token of each completion.
    `completions` are one or more [L_i] arrays of token ids, L_i >= 1.
    """

    context: AnyIntArray
    completions: tuple[AnyIntArray, ...]
    # [L_i] the weight of each token in the sum of its completion's log-probs; None: all weights are 1. Only
    # of pairs on their way to a store: `PairTable.token_weights` reads the weights of a pair in a store.
    weights: tuple[npt.NDArray[np.float32], ...] | None = None


def common_prefix_length(sequences: Sequence[AnyIntArray]) -> int:
    """Returns the number of leading tokens that are the same in all `sequences` ([L_i] each)."""
    shortest = min(len(sequence) for sequence in sequences)
    first = sequences[0][:shortest]
    for other in sequences[1:]:
        differs = np.flatnonzero(first != other[: len(first)])
        if len(differs):
            first = first[: differs[0]]
    return len(first)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLengths:
    """Token counts of P pairs: four integer arrays [P]."""

    prompt: AnyIntArray
    chosen: AnyIntArray
    rejected: AnyIntArray
    shared: AnyIntArray  # of the longest common prefix of prompt + chosen and prompt + rejected

    def __post_init__(self) -> None:
        shapes = {a.shape for a in (self.prompt, self.chosen, self.rejected, self.shared)}
        assert len(shapes) == 1, f"lengths of different numbers of pairs: {shapes}"

    def select(self, pairs: AnyIntArray) -> PairLengths:
        """Returns the lengths of `pairs`, in the order of `pairs`."""
        prompt, chosen, rejected = self.prompt[pairs], self.chosen[pairs], self.rejected[pairs]
        return PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=self.shared[pairs])

    def row_tokens(self, *, share_prompt: bool) -> IntArray:
        """Returns each pair's tokens in a packed row, [P]. If `share_prompt`, common prefixes count once."""
        both = 2 * self.prompt.astype(np.int64) + self.chosen + self.rejected
        return both - self.shared if share_prompt else both

    def padded_tokens(self) -> IntArray:
        """Returns each pair's tokens when it is alone in a padded row, [P]: twice its longer sequence."""
        return 2 * (self.prompt.astype(np.int64) + np.maximum(self.chosen, self.rejected))

    def completion_tokens(self) -> IntArray:
        """Returns each pair's scored tokens, [P]: the output head computes logits for these tokens only."""
        return self.chosen.astype(np.int64) + self.rejected


class GroupSize(NamedTuple):
    """Tokens and cost of k pairs of one prompt as one group, which computes the prompt only once."""

    tokens: int
    cost: float


class CutGroup(NamedTuple):
    """One part of a group that exceeds the token budget; see `PromptMerging.cut`."""

    pairs: IntArray
    tokens: int


class PromptMerging(Protocol):
    """Merges the pairs of one prompt in a row into one group; data/merging.py implements this protocol."""

    @property
    def prompts(self) -> IntArray:
        """[P] numbers; two are equal if the tokens of their prompts are equal."""

    def groups_of(self, pairs: IntArray) -> list[IntArray]:
        """Returns each group's positions in `pairs`. Pairs that take fewer tokens unmerged stay separate."""

    def measure(self, pairs: IntArray) -> GroupSize:
        """Returns the size of one group of [k] pairs of one prompt."""

    def cut(self, pairs: IntArray, token_budget: int) -> list[CutGroup]:
        """Cuts [k] pairs of one prompt into groups within the budget.

        Groups that meet in a row become one group again, which takes at most the sum of their `tokens`.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Items:
    """The n items that bin packers pack. An item is a single pair, or a group of pairs of one prompt."""

    pairs: IntArray
    groups: list[IntArray] | None  # [n] the pairs of each item; None: every pair is an item
    tokens: IntArray  # [n]
    costs: FloatArray  # [n]

    def row(self, positions: IntArray | list[int]) -> IntArray:
        """Returns the pairs of the items at `positions`."""
        if self.groups is None:
            return self.pairs[positions]
        return np.concatenate([self.groups[position] for position in positions])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairSizes:
    """The sizes of pairs, in tokens and in cost; its methods measure rows of these pairs."""

    tokens: IntArray  # [P] of a pair alone
    costs: FloatArray  # [P] of a pair alone, in any unit
    merging: PromptMerging | None
    pads: bool = False  # padded rows: every pair takes as many tokens as the longest pair of its row

    def items_of(self, pairs: IntArray, token_budget: int) -> Items:
        """Returns the items of `pairs`. Pairs of one prompt stay one item if the item fits the budget."""
        if self.merging is None:
            return Items(pairs=pairs, groups=None, tokens=self.tokens[pairs], costs=self.costs[pairs])
        groups: list[CutGroup] = []
        for group in self.groups_in(pairs):
            tokens = self._measure(group).tokens
            fits = len(group) == 1 or tokens <= token_budget
            groups += [CutGroup(group, tokens)] if fits else self.merging.cut(group, token_budget)
        return Items(
            pairs=pairs,
            groups=[group.pairs for group in groups],
            tokens=np.array([group.tokens for group in groups], dtype=np.int64),
            costs=np.array([self._measure(group.pairs).cost for group in groups], dtype=np.float64),
        )

    def groups_in(self, row: IntArray) -> list[IntArray]:
        """Returns the pairs of each group of a row. Without merging every pair is a group."""
        if self.merging is None:
            return list(row[:, None])
        return [row[positions] for positions in self.merging.groups_of(row)]

    def tokens_in(self, row: IntArray) -> int:
        """Returns how many tokens a forward pass over the row computes, padding included."""
        if self.merging is not None:
            return sum(self._measure(group).tokens for group in self.groups_in(row))
        tokens = self.tokens[row]
        return int(len(row) * tokens.max() if self.pads else tokens.sum())

    def cost_of(self, row: IntArray) -> float:
        """Returns the cost of the row in the unit of `costs`."""
        if self.merging is not None:
            return sum(self._measure(group).cost for group in self.groups_in(row))
        costs = self.costs[row]
        return float(len(row) * costs.max() if self.pads else costs.sum())

    def _measure(self, group: IntArray) -> GroupSize:
        if self.merging is None or len(group) == 1:
            return GroupSize(tokens=int(self.tokens[group[0]]), cost=float(self.costs[group[0]]))
        return self.merging.measure(group)
