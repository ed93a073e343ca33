"""Divides a row into pieces for recurrent layers, copies tokens to the pieces and back, and convolves.

A *piece* is a series of consecutive tokens of the row through which one state moves: the shared part of a
group (the tokens that all its sequences, a pair, begin with), the tail of a sequence (its other tokens), or a
whole sequence that shares nothing. Shared parts and whole sequences are *roots*: their state starts from
zero. A tail starts from the final state of its group's root. The row that layout.py shows (prompt `1 2`,
chosen `7 8 9`, rejected `7 5`) has three pieces:

    row position    0  1  2 | 3  4 | 5
    piece           root    | tail | tail      both tails start from the root's final state

Each piece is cut into chunks of a fixed number of tokens, the last one filled up with zeros. The work that
needs no state is done for all chunks of the row at once. Then the states move: through the first chunks of
all roots together, then through their second chunks, and so on. After the roots the tails follow.

Legend: T tokens of the row, N chunks, C tokens of a chunk, D channels and w tokens of a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from dpo_pack.model.attention.segments import Gather, RowSegments, make_gather
from dpo_pack.packing.lengths import IntArray


@dataclass(eq=False, slots=True, kw_only=True)
class RowPieces:
    """The pieces of a row (defined above: roots, then tails), each cut into chunks.

    Order of the chunks: the first chunk of every root, the second chunk of every root that has one, and so
    on; then the chunks of the tails in the same order. So a chunk comes after the chunk from whose final
    state it starts.
    """

    chunk: int  # C
    to_chunks: Gather  # from the row's T tokens to the N * C tokens of the chunks
    to_row: Gather  # from the chunks back to the row
    root_steps: tuple[int, ...]  # how many roots have a first chunk, a second chunk, ...; never increases
    tail_steps: tuple[int, ...]  # the same for tails
    to_tails: Gather | None  # from the roots' final states to the tails' first; None if the row has no tails


def row_pieces(segments: RowSegments, chunk: int) -> RowPieces:
    """Returns the row's pieces, cut into chunks of `chunk` tokens. Computed once for all layers."""
    return segments.once(("pieces", chunk), lambda: _make_pieces(segments, chunk))


def _make_pieces(segments: RowSegments, chunk: int) -> RowPieces:
    roots, tails, parents = _find_pieces(segments)
    root_places, root_steps = _chunks(roots, chunk)
    tail_places, tail_steps = _chunks(tails, chunk)
    positions = np.concatenate((root_places, tail_places))  # [N * C], row positions, -1 for none
    device = segments.cu_seqlens_q.device
    return RowPieces(
        chunk=chunk,
        to_chunks=make_gather(positions, sum(segments.query_lengths), device),
        to_row=_back_to_row(positions, segments),
        root_steps=root_steps,
        tail_steps=tail_steps,
        to_tails=make_gather(parents, len(roots), device) if tails else None,
    )


def _find_pieces(
    segments: RowSegments,
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], IntArray]:
    """Returns (roots, tails, the index of each tail's root). A piece is (first row position, length).

    The longest pieces come first, so that the pieces which have a further chunk are always the first ones.
    """
    roots: list[tuple[int, int]] = []
    tails: list[tuple[int, int, int]] = []  # the third number is the index in `roots`
    start = 0
    for queries, keys, shared in _lengths(segments):
        if queries == keys:
            roots.append((start, shared or queries))
            if 0 < shared < queries:
                tails.append((start + shared, queries - shared, len(roots) - 1))
        else:
            tails.append((start, queries, len(roots) - 1))
        start += queries
    order = sorted(range(len(roots)), key=lambda number: -roots[number][1])
    rank = {number: place for place, number in enumerate(order)}
    tails.sort(key=lambda tail: -tail[1])
    return (
        [roots[number] for number in order],
        [(first, length) for first, length, _ in tails],
        np.asarray([rank[root] for _, _, root in tails], dtype=np.int64),
    )


def _back_to_row(positions: IntArray, segments: RowSegments) -> Gather:
    """Returns the gather from entries to the row. `positions`: each entry's row position, -1 for padding."""
    places = np.empty(sum(segments.query_lengths), dtype=np.int64)
    places[positions[positions >= 0]] = np.flatnonzero(positions >= 0)
    return make_gather(places, len(positions), segments.cu_seqlens_q.device)


@dataclass(eq=False, slots=True, kw_only=True)
class PieceBatch:
    """All roots or all tails of a row, for a kernel that moves states through whole pieces."""

    take: Gather  # from the row's T tokens to `num_lines` lines
    num_lines: int  # a line for each piece, filled up with zeros; or 1: all pieces, one after another
    starts: Tensor | None  # [pieces + 1] int64, where each piece of one line starts, then where the last ends


@dataclass(eq=False, slots=True, kw_only=True)
class WholePieces:
    """The pieces of a row as batches: the roots, then the tails if the row has any."""

    batches: tuple[PieceBatch, ...]
    to_tails: Gather | None  # from the roots' final states to the tails' first
    to_row: Gather  # from the entries of all batches to the row


def whole_pieces(segments: RowSegments, *, padded: bool) -> WholePieces:
    """Returns the row's whole pieces: padded to one length, or one after another. Computed once."""
    return segments.once(("whole pieces", padded), lambda: _make_whole(segments, padded=padded))


def _make_whole(segments: RowSegments, *, padded: bool) -> WholePieces:
    roots, tails, parents = _find_pieces(segments)
    device, num_tokens = segments.cu_seqlens_q.device, sum(segments.query_lengths)
    batches, positions = [], []
    for pieces in filter(None, (roots, tails)):
        lengths = [length for _, length in pieces]
        places, _ = _chunks(pieces, max(lengths))  # the first piece is the longest: a chunk for each piece
        starts = None
        if not padded:
            places = places[places >= 0]
            starts = torch.tensor([0, *np.cumsum(lengths)], device=device)
        take = make_gather(places, num_tokens, device)
        batches.append(PieceBatch(take=take, num_lines=len(pieces) if padded else 1, starts=starts))
        positions.append(places)
    return WholePieces(
        batches=tuple(batches),
        to_tails=make_gather(parents, len(roots), device) if tails else None,
        to_row=_back_to_row(np.concatenate(positions), segments),
    )


def _lengths(segments: RowSegments) -> zip[tuple[int, int, int]]:
    """Yields (number of queries, number of keys, number of shared tokens) of each segment."""
    return zip(segments.query_lengths, segments.key_lengths, segments.shared_lengths, strict=True)


def _chunks(pieces: Sequence[tuple[int, int]], chunk: int) -> tuple[IntArray, tuple[int, ...]]:
    """Cuts pieces into chunks of `chunk` tokens. Returns two values.

    The first has the row position of each token of the chunks, -1 at the zeros that fill up a chunk. The
    second says how many pieces have a first chunk, how many have a second chunk, and so on.
    """
    places: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    steps: list[int] = []
    longest = max((length for _, length in pieces), default=0)
    for begin in range(0, longest, chunk):
        reached = np.asarray([piece for piece in pieces if piece[1] > begin], dtype=np.int64)
        offsets = begin + np.arange(chunk)
        inside = offsets[None] < reached[:, 1:]
        places.append(np.where(inside, reached[:, :1] + offsets[None], -1).ravel())
        steps.append(len(reached))
    return np.concatenate(places), tuple(steps)


def row_history(segments: RowSegments, width: int) -> tuple[Gather, Gather]:
    """Returns two gathers for a convolution over `width` tokens: from the row to a longer row, and back.

    A segment holds the tokens that one sequence adds to the row. In front of each segment the longer row has
    the `width - 1` inputs before its first token: zeros if the segment begins its sequence, otherwise the
    last inputs of the part that the sequence shares.
    """
    return segments.once(("history", width), lambda: _make_history(segments, width))


def _make_history(segments: RowSegments, width: int) -> tuple[Gather, Gather]:
    inputs: list[IntArray] = []
    outputs: list[IntArray] = []
    before = np.arange(1 - width, 0)  # offsets of the inputs before a token
    start = num_inputs = shared_end = 0
    for queries, keys, shared in _lengths(segments):
        if queries == keys:
            shared_end = start + shared
            history = np.full(width - 1, -1)
        else:
            history = np.where(before >= -shared, shared_end + before, -1)
        own = np.arange(start, start + queries)
        inputs += [history, own]
        outputs.append(num_inputs + width - 1 + np.arange(queries))
        start += queries
        num_inputs += width - 1 + queries
    device = segments.cu_seqlens_q.device
    return (
        make_gather(np.concatenate(inputs), start, device),
        make_gather(np.concatenate(outputs), num_inputs, device),
    )


def row_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    row_segments: RowSegments,
    **unused: Any,
) -> Tensor:
    """Computes the causal convolution of each sequence of a row: [1, D, T], [D, w], [D] or None -> [1, D, T].

    If a sequence shares its first tokens with another, the convolution of its own tokens also covers these.
    """
    with_history, to_row = row_history(row_segments, weight.shape[-1])
    inputs = with_history(hidden_states.squeeze(0).T)  # [E, D]
    longer = F.conv1d(
        inputs.T[None].to(weight.dtype),
        weight[:, None],
        bias,
        padding=weight.shape[-1] - 1,
        groups=len(weight),
    )
    out = to_row(longer[0, :, : len(inputs)].T).T[None]
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)
