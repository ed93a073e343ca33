"""Estimates the floating-point operations (FLOPs) of a pair, a row or a step from model shape and lengths.

W weights of the model multiply every token, H weights are those of the output head, and for each attention
layer A = heads x (query/key dimension + value dimension). A forward pass costs

    2 (W + S) x tokens  +  2 H x scored tokens  +  sum over layers of 2 A x area  -  2 F x unread positions

where S are the products of a token with the states of recurrent layers (most models have none) and F is the
number of weights of the last layer's feed-forward block. That block runs only at positions that predict a
scored token (a token of a completion); the other positions are called unread.

The area of a sequence is its number of (query, key) pairs: n (n + 1) / 2 for n tokens, less with a sliding
window. A backward pass costs two forward passes (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). What
checkpointing or a chunked head repeats is not counted, as usual for model FLOPs utilisation (Chowdhery et al.
2022, arXiv 2204.02311, appendix B), nor is what memory traffic decides: norms, softmax, rotary embeddings.

Legend: P pairs. Lengths are in tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpo_pack.packing.lengths import AnyIntArray, FloatArray, GroupSize, PairLengths

# Forward passes that a training step costs; a frozen model under adapters needs no gradients of its weights.
TRAINING_PASSES, ADAPTER_PASSES = 3.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Layers that have the same kind of attention."""

    num_layers: int
    width: int  # query heads x (query/key head dimension + value head dimension)
    window: int | None  # keys that a query sees, the last one at its own position; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that decide its FLOPs; model/shape.py reads them off the architecture."""

    token_weights: float  # weights that multiply every token: only active experts, without the head
    head_weights: int  # hidden size x vocabulary, tied to the embedding or not
    attention: tuple[AttentionKind, ...]
    last_block_weights: float = 0.0  # of the last feed-forward block; 0 if that block runs at every position
    state_products: float = 0.0  # products of a token with the states of recurrent layers
    # fp32 numbers of a token that recurrent layers keep for the backward pass; counts in memory only
    kept_numbers: float = 0.0


def causal_area(lengths: AnyIntArray, window: int | None) -> FloatArray:
    """Returns the number of (query, key) pairs of causal attention over sequences of `lengths`, [n] -> [n].

    The queries from position a to position b of a sequence have area(b) - area(a) such pairs.
    """
    n = lengths.astype(np.float64)
    if window is None:
        window = int(n.max(initial=0))
    full: FloatArray = np.minimum(n, window)
    area: FloatArray = full * (full + 1) / 2 + (n - full) * window
    return area


def sequence_flops(
    shape: ModelShape,
    *,
    tokens: FloatArray,
    scored_tokens: FloatArray,
    areas: Sequence[FloatArray],
    unread_positions: FloatArray | float = 0.0,
) -> FloatArray:
    """Returns the FLOPs of one forward pass over each of n sequences or rows, [n].

    tokens, scored_tokens, unread_positions: [n]. areas: one [n] for each kind of attention.
    """
    flops = 2.0 * (shape.token_weights + shape.state_products) * tokens
    flops += 2.0 * shape.head_weights * scored_tokens
    flops -= 2.0 * shape.last_block_weights * unread_positions
    for kind, area in zip(shape.attention, areas, strict=True):
        flops += 2.0 * kind.num_layers * kind.width * area
    return flops


def pair_flops(
    shape: ModelShape, lengths: PairLengths, *, share_prompt: bool, passes: float = TRAINING_PASSES
) -> FloatArray:
    """Returns the FLOPs of each pair in a packed row, [P]. With `share_prompt`, common prefixes count once.

    Pairs of a row do not attend to each other, so a row, a rank or a step costs the sum over its pairs.
    """
    chosen = lengths.prompt.astype(np.int64) + lengths.chosen
    rejected = lengths.prompt.astype(np.int64) + lengths.rejected
    areas = []
    for kind in shape.attention:
        area = causal_area(chosen, kind.window) + causal_area(rejected, kind.window)
        areas.append(area - causal_area(lengths.shared, kind.window) if share_prompt else area)
    return passes * sequence_flops(
        shape,
        tokens=lengths.row_tokens(share_prompt=share_prompt).astype(np.float64),
        scored_tokens=lengths.completion_tokens().astype(np.float64),
        areas=areas,
        unread_positions=unread_positions(lengths, share_prompt=share_prompt),
    )


def unread_positions(lengths: PairLengths, *, share_prompt: bool) -> FloatArray:
    """Returns, for each pair in a packed row, how many tokens predict no scored token, [P]."""
    unread = lengths.row_tokens(share_prompt=share_prompt) - lengths.completion_tokens()
    if share_prompt:  # a shared position predicts a token of both completions
        unread = unread + lengths.shared - lengths.prompt + 1
    return unread.astype(np.float64)


def group_size(
    shape: ModelShape,
    *,
    prompt: int,
    completions: Sequence[int],
    shared: int,
    passes: float = TRAINING_PASSES,
) -> GroupSize:
    """Returns the size of one prompt with several completions; `shared` first tokens are computed once."""
    ends, once = prompt + np.array(completions, dtype=np.int64), np.array([shared])
    repeats, scored = len(completions) - 1, sum(completions)
    tokens = int(ends.sum()) - repeats * shared
    areas = [
        causal_area(ends, kind.window).sum() - repeats * causal_area(once, kind.window)
        for kind in shape.attention
    ]
    (forward,) = sequence_flops(
        shape,
        tokens=np.array([tokens], dtype=np.float64),
        scored_tokens=np.array([scored], dtype=np.float64),
        areas=areas,
        unread_positions=float(tokens - scored + repeats * (shared - prompt + 1)),
    )
    return GroupSize(tokens=tokens, cost=passes * float(forward))


def padded_flops(
    shape: ModelShape,
    longest: AnyIntArray,
    num_sequences: AnyIntArray,
    *,
    scored_tokens: AnyIntArray | None = None,
    passes: float = TRAINING_PASSES,
) -> float:
    """Returns the FLOPs of n right-padded batches, all together.

    longest: [n] the longest sequence of each batch. num_sequences, scored_tokens: [n]. Every position runs
    through the layers, and through the head if `scored_tokens` is None.
    """
    tokens = longest.astype(np.float64) * num_sequences
    forward = sequence_flops(
        shape,
        tokens=tokens,
        scored_tokens=tokens if scored_tokens is None else scored_tokens.astype(np.float64),
        areas=[num_sequences * causal_area(longest, kind.window) for kind in shape.attention],
    )
    return passes * float(forward.sum())
