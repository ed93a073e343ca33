"""What a pair, a row or a step costs, in floating-point operations, from the model's shape and lengths.

Per forward pass, with W weights that multiply every token, H weights of the output head, and for each
attention layer heads x (query/key dimension + value dimension) = A:

    2 W x tokens  +  2 H x scored tokens  +  sum over layers of 2 A x area  -  2 F x unread positions

where F are the weights of the last layer's feed-forward block, which runs only where a scored token is
predicted.

A sequence of n tokens has the causal area n (n + 1) / 2: the number of (query, key) pairs, fewer with a
sliding window. A backward pass costs two forward passes (Kaplan et al. 2020, arXiv 2001.08361, section 2.1),
so training counts three; what checkpointing or a chunked head computes again is not counted, as usual for
model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Norms, softmax, rotary
embeddings and the gather of shared keys and values are left out: they are bytes more than FLOPs.

Legend: P pairs. Lengths are in tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpo_pack.data.lengths import AnyIntArray, FloatArray, PairLengths

# Forward passes that one step of training is worth; without gradients it is 1, and with a frozen model
# under small adapters 2, because no gradient of the weights is computed.
TRAINING_PASSES = 3.0
ADAPTER_PASSES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Layers whose attention is alike."""

    num_layers: int
    width: int  # query heads x (query/key head dimension + value head dimension)
    window: int | None  # keys a query sees, itself included; None: all before it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides its FLOPs. From a config: `dpo_pack.model_shape.model_shape`."""

    token_weights: float  # weights that multiply every token: of experts the active ones, without the head
    head_weights: int  # hidden size x vocabulary, tied to the embedding or not
    attention: tuple[AttentionKind, ...]
    last_block_weights: float = 0.0  # of the last feed-forward block, where positions are left out of it


def causal_area(lengths: AnyIntArray, window: int | None) -> FloatArray:
    """(query, key) pairs of causal attention over sequences of `lengths`, [n] -> [n].

    As the first queries see fewer keys, the queries from position a to b have area(b) - area(a).
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
    """Of one forward pass: [n] tokens, [n] scored tokens and, for each of `shape.attention`, [n] areas.

    unread_positions: [n] tokens that predict no scored one.
    """
    flops = 2.0 * shape.token_weights * tokens + 2.0 * shape.head_weights * scored_tokens
    flops -= 2.0 * shape.last_block_weights * unread_positions
    for kind, area in zip(shape.attention, areas, strict=True):
        flops += 2.0 * kind.num_layers * kind.width * area
    return flops


def pair_flops(
    shape: ModelShape, lengths: PairLengths, *, share_prompt: bool, passes: float = TRAINING_PASSES
) -> FloatArray:
    """FLOPs of each pair in a packed row, [P]; with `share_prompt` its common prefix is computed once.

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
    """[P]: tokens of each pair in a packed row that predict no scored one."""
    unread = lengths.row_tokens(share_prompt=share_prompt) - lengths.completion_tokens()
    if share_prompt:  # one hidden state predicts what both completions begin with
        unread = unread + lengths.shared - lengths.prompt + 1
    return unread.astype(np.float64)


def group_flops(
    shape: ModelShape,
    *,
    prompt: int,
    completions: Sequence[int],
    shared: int,
    passes: float = TRAINING_PASSES,
) -> float:
    """FLOPs of one prompt with several completions whose `shared` leading tokens are computed once."""
    ends = np.asarray([prompt + completion for completion in completions], dtype=np.int64)
    once = np.asarray([shared], dtype=np.int64)
    repeats = len(completions) - 1
    areas = [
        np.asarray([causal_area(ends, kind.window).sum()]) - repeats * causal_area(once, kind.window)
        for kind in shape.attention
    ]
    tokens = np.asarray([ends.sum() - repeats * shared], dtype=np.float64)
    scored = np.asarray([sum(completions)], dtype=np.float64)
    unread = tokens - scored + repeats * (shared - prompt + 1)
    forward = sequence_flops(shape, tokens=tokens, scored_tokens=scored, areas=areas, unread_positions=unread)
    return passes * float(forward[0])


def padded_flops(
    shape: ModelShape, longest: AnyIntArray, num_sequences: AnyIntArray, *, passes: float = TRAINING_PASSES
) -> float:
    """FLOPs of right-padded batches: [n] their longest sequence and [n] how many sequences each has.

    Every position runs through the layers and the head; attention is counted causal over padded lengths.
    """
    tokens = longest.astype(np.float64)
    areas = [causal_area(longest, kind.window) for kind in shape.attention]
    each = sequence_flops(shape, tokens=tokens, scored_tokens=tokens, areas=areas)
    return passes * float((num_sequences * each).sum())


def step_flops(
    shape: ModelShape,
    lengths: PairLengths,
    pairs: AnyIntArray,
    *,
    share_prompt: bool,
    passes: float = TRAINING_PASSES,
) -> float:
    """FLOPs of a step, over all ranks: `pairs` are positions in `lengths`, a copy counting again."""
    return float(pair_flops(shape, lengths.select(pairs), share_prompt=share_prompt, passes=passes).sum())
