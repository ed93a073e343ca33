"""Groups of token ids, and sizes of pairs: tokens in a row, and operations (FLOPs).

W weights of the model multiply every token, H weights are those of the output head, and for each attention
layer A = heads x (query/key dimension + value dimension). A forward pass costs

    2 (W + S) x tokens  +  2 H x scored tokens  +  sum over layers of 2 A x area  -  2 F x unread positions

where S are the products of a token with the states of recurrent layers, and F the weights of the last layer's
feed-forward block, which runs only at positions that predict a scored token (a token of a completion); the
others are unread.

The area of a sequence is its number of (query, key) pairs: n (n + 1) / 2 for n tokens, less with a sliding
window. A backward pass costs two forward passes (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). What is
computed again, or decided by memory traffic, is not counted, as usual for model FLOPs utilisation (Chowdhery
et al. 2022, arXiv 2204.02311, appendix B). The frozen tower of a vision-language model adds one forward pass
over the images of each prompt in the row. A beginning that several pairs of a row have in common is computed
once; their tokens attend to it all the same.

Legend: P pairs of the data set. Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
AnyIntArray = npt.NDArray[np.integer[Any]]
Numbers = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

# Forward passes that a training step costs; a frozen model under adapters needs no gradients of its weights.
TRAINING_PASSES, ADAPTER_PASSES = 3.0, 2.0
_AT_ONCE = 2**14  # pairs whose FLOPs are counted together, in the processor's cache


# ---- Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One context and the completions that continue it; a pair is a group of two, the chosen one first."""

    context: AnyIntArray  # [C] token ids, C >= 1: its last token predicts the first of each completion
    completions: tuple[AnyIntArray, ...]  # one or more, [L_i] token ids each, L_i >= 1
    # [L_i] whether each token's log-prob is in the sum of its completion, at least one is; None: all are
    scored: tuple[Bools, ...] | None = None
    # Functions that read the context's images, [H, W, 3] RGB, in the order of their placeholders.
    images: tuple[Callable[[], npt.NDArray[np.uint8]], ...] = ()
    beginning: int = 0  # the context's first tokens that other groups may begin with, too, before any image


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
    """Token counts of P pairs: four integer arrays [P]; and what the images of their prompts cost."""

    prompt: AnyIntArray
    chosen: AnyIntArray
    rejected: AnyIntArray
    shared: AnyIntArray  # of the longest common prefix of prompt + chosen and prompt + rejected
    tower: FloatArray | float = 0.0  # [P] FLOPs of the tower for a prompt's images
    beginning: AnyIntArray | int = 0  # [P] which pairs' prompts begin alike; 0: no other one's
    common: AnyIntArray | int = 0  # [P] the tokens that these have in common

    def select(self, pairs: AnyIntArray) -> PairLengths:
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        shape = self.prompt.shape
        return PairLengths(**{name: np.broadcast_to(of, shape)[pairs] for name, of in columns.items()})

    def row_tokens(
        self, *, share_prompt: bool = False, pads: bool = False, sides: Bools | None = None
    ) -> IntArray:
        """Returns each pair's tokens in a packed row, [P]. With `share_prompt`, common prefixes count once.
        pads: alone in a padded row, twice its longest sequence. sides: [P, (chosen, rejected)] whether the
        row has this sequence of the pair; default: it has both."""
        chosen: IntArray = self.chosen.astype(np.int64) + self.prompt
        rejected: IntArray = self.rejected.astype(np.int64) + self.prompt
        if sides is not None:
            chosen, rejected = chosen * sides[:, 0], rejected * sides[:, 1]
        tokens: IntArray = 2 * np.maximum(chosen, rejected) if pads else chosen + rejected
        if share_prompt and not pads:
            tokens -= self.shared if sides is None else self.shared * sides.all(axis=1)
        return tokens

    def beginnings(self, shape: ModelShape | None, *, passes: float) -> Beginnings | None:
        """Returns what pairs save in a row whose earlier pairs have the same beginning, in FLOPs (without a
        `shape` in tokens); None if no two have the same."""
        if not np.any(self.beginning):
            return None
        keys, tokens = np.asarray(self.beginning), np.asarray(self.common, dtype=np.int64)
        costs = tokens.astype(np.float64)
        if shape is not None:
            areas = [causal_area(tokens, kind.window) for kind in shape.attention]
            costs = passes * sequence_flops(shape, tokens, np.zeros(len(tokens)), areas, tokens)
        return Beginnings(keys=keys, tokens=tokens, costs=costs)

    def completion_tokens(self) -> IntArray:
        """Returns each pair's scored tokens, [P]."""
        return self.chosen.astype(np.int64) + self.rejected


class Beginnings(NamedTuple):
    """What pairs have in common with others, from `PairLengths.beginnings`."""

    keys: IntArray  # [P] equal if two pairs begin alike; 0: with no other one
    tokens: IntArray  # [P]
    costs: FloatArray  # [P]

    def repeats(self, row: IntArray) -> IntArray:
        """Returns those pairs of a row that have the beginning of an earlier one."""
        row = row[self.keys[row].argsort(kind="stable")]
        keys = self.keys[row]
        again: IntArray = row[1:][(keys[1:] == keys[:-1]) & (keys[1:] != 0)]
        return again


class RowSize(NamedTuple):
    """Tokens and cost of a row."""

    tokens: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairSizes:
    """The sizes of pairs, in tokens and in cost, and of rows of them."""

    tokens: IntArray  # [P] of a pair alone
    costs: FloatArray  # [P] of a pair alone, in any unit
    pads: bool = False  # padded rows: every pair takes as many tokens as the longest pair of its row
    beginnings: Beginnings | None = None  # None: rows share none

    def of_row(self, row: IntArray) -> RowSize:
        """Returns the tokens that a forward pass over the row computes, padding included, and its cost."""
        tokens, costs = self.tokens[row], self.costs[row]
        if self.pads:
            return RowSize(tokens=int(len(row) * tokens.max()), cost=float(len(row) * costs.max()))
        if self.beginnings is None:
            return RowSize(tokens=int(tokens.sum()), cost=float(costs.sum()))
        repeats = self.beginnings.repeats(row)
        fewer, cheaper = (values[repeats].sum() for values in self.beginnings[1:])
        return RowSize(tokens=int(tokens.sum() - fewer), cost=float(costs.sum() - cheaper))


# ---- FLOPs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Layers that have the same kind of attention."""

    num_layers: int
    width: int  # query heads x (query/key head dimension + value head dimension)
    window: int | None  # keys that a query sees, the last one at its own position; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that decide its FLOPs; model/facts.py reads them off the architecture."""

    token_weights: float  # weights that multiply every token: only active experts, without the head
    head_weights: int  # hidden size x vocabulary, tied to the embedding or not
    attention: tuple[AttentionKind, ...]
    last_block_weights: float = 0.0  # of the last feed-forward block; 0 if that block runs at every position
    state_products: float = 0.0  # products of a token with the states of recurrent layers
    # fp32 numbers of a token that recurrent layers keep for the backward pass; counts in memory only
    kept_numbers: float = 0.0
    image_token: int = -1  # the placeholder of images
    image_flops: float = 0.0  # of the tower for each placeholder


def causal_area(lengths: AnyIntArray, window: int | None) -> FloatArray:
    """Returns the (query, key) pairs of causal attention over sequences of `lengths`, [n] -> [n]."""
    n = lengths.astype(np.float64)
    if window is None:
        window = int(n.max(initial=0))
    full: FloatArray = np.minimum(n, window)
    area: FloatArray = full * (full + 1) / 2 + (n - full) * window
    return area


def sequence_flops(
    shape: ModelShape, tokens: Numbers, scored: Numbers, areas: Sequence[FloatArray], unread: Numbers
) -> FloatArray:
    """Returns the FLOPs of one forward pass over each of n sequences or rows, [n]. tokens, scored, unread:
    [n]. areas: one [n] for each kind of attention."""
    flops: FloatArray = 2.0 * (shape.token_weights + shape.state_products) * tokens
    flops += 2.0 * shape.head_weights * scored
    flops -= 2.0 * shape.last_block_weights * unread
    for kind, area in zip(shape.attention, areas, strict=True):
        flops += 2.0 * kind.num_layers * kind.width * area
    return flops


def pair_flops(
    shape: ModelShape,
    lengths: PairLengths,
    *,
    share_prompt: bool,
    passes: float = TRAINING_PASSES,
    sides: Bools | None = None,
) -> FloatArray:
    """Returns the FLOPs of each pair in a packed row, [P]. Pairs of a row do not attend to each other, so a
    row, a rank or a step costs the sum over its pairs. share_prompt, sides: see `PairLengths.row_tokens`."""
    flops = np.empty(len(lengths.prompt))
    for begin in range(0, len(flops), _AT_ONCE):
        block = np.arange(begin, min(begin + _AT_ONCE, len(flops)))
        part = lengths.select(block)
        completions = np.stack((part.chosen, part.rejected), axis=1).astype(np.int64)
        is_there = np.ones(completions.shape, dtype=np.bool_) if sides is None else sides[block]
        repeats: IntArray = np.where(is_there.all(axis=1), int(share_prompt), 0)  # of the shared tokens
        ends = part.prompt.astype(np.int64)[:, None] + completions
        tokens = (ends * is_there).sum(axis=1) - repeats * part.shared
        scored = (completions * is_there).sum(axis=1)
        areas: list[FloatArray] = [
            (causal_area(ends, kind.window) * is_there).sum(axis=1)
            - causal_area(part.shared, kind.window) * repeats
            for kind in shape.attention
        ]
        # A shared position predicts a token of all completions.
        unread = tokens - scored + repeats * (part.shared - part.prompt + 1)
        forward = sequence_flops(shape, tokens, scored, areas, unread)
        flops[block] = passes * forward + part.tower * (is_there.sum(axis=1) - repeats)
    return flops


def pair_sizes(
    lengths: PairLengths,
    shape: ModelShape | None = None,
    *,
    share_prompt: bool,
    pads: bool = False,
    passes: float = TRAINING_PASSES,
) -> PairSizes:
    """Returns the sizes of pairs. Costs are FLOPs, without a `shape` or in padded rows tokens."""
    tokens = lengths.row_tokens(share_prompt=share_prompt, pads=pads)
    costs = tokens.astype(np.float64)
    if shape is not None and not pads:
        costs = pair_flops(shape, lengths, share_prompt=share_prompt, passes=passes)
    common = lengths.beginnings(shape, passes=passes) if share_prompt and not pads else None
    return PairSizes(tokens=tokens, costs=costs, pads=pads, beginnings=common)


def padded_flops(
    shape: ModelShape, longest: AnyIntArray, num_sequences: AnyIntArray, *, scored: IntArray | None = None
) -> float:
    """Returns the FLOPs of training n right-padded batches, all together. longest: [n] the longest sequence
    of each. num_sequences, scored: [n]; scored None: every position runs through the head."""
    tokens = longest.astype(np.float64) * num_sequences
    read: Numbers = tokens if scored is None else scored
    areas: list[FloatArray] = [num_sequences * causal_area(longest, kind.window) for kind in shape.attention]
    forward = sequence_flops(shape, tokens, read, areas, np.zeros(len(tokens)))
    return TRAINING_PASSES * float(forward.sum())
