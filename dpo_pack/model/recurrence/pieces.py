"""Divides a row into pieces for recurrent layers, and copies tokens to the pieces and back.

A *piece* is a series of consecutive tokens of the row through which one state moves: the shared part of a
group (the tokens that all its sequences, a pair, begin with), the tail of a sequence (its other tokens), or a
whole sequence that shares nothing. Shared parts and whole sequences are *roots*: their state starts from
zero. A tail starts from the final state of its group's root. The row that layout.py shows (prompt `1 2`,
chosen `7 8 9`, rejected `7 5`) has three pieces:

    row position    0  1  2 | 3  4 | 5
    piece           root    | tail | tail      both tails start from the root's final state
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpo_pack.model.attention.segments import Gather, RowSegments, make_gather, on_device
from dpo_pack.packing.lengths import IntArray

# Pieces shorter than twice this are padded together: functions fill them up to a chunk in any case.
_SHORT = 32


@dataclass(eq=False, slots=True, kw_only=True)
class PieceBatch:
    """Some roots or some tails of a row, for one call of a function."""

    take: Gather  # from the row's T tokens to the batch
    num_pieces: int
    # [pieces + 1] int64: where each piece starts, one after another, then where the last ends. None: the
    # pieces are padded to one length with zeros. On the device, and on the host.
    starts: tuple[Tensor, Tensor] | None


@dataclass(eq=False, slots=True, kw_only=True)
class RowPieces:
    """The pieces of a row."""

    roots: list[PieceBatch]
    tails: list[PieceBatch]
    to_tails: Gather  # from the final states of all roots to the first states of all tails
    to_row: Gather  # from the entries of all batches to the row


def row_pieces(segments: RowSegments, *, padded: bool) -> RowPieces:
    """Returns the row's pieces: padded, or one after another. Computed once for all layers."""
    return segments.once(("pieces", padded), lambda: _make_pieces(segments, padded=padded))


def _make_pieces(segments: RowSegments, *, padded: bool) -> RowPieces:
    roots: list[tuple[int, int]] = []  # (first row position, length), and so are the tails
    tails: list[tuple[int, int]] = []
    parents: list[int] = []  # of each tail the index of its root
    start = 0
    lengths = (segments.query_lengths, segments.key_lengths, segments.shared_lengths)
    for queries, keys, shared in zip(*lengths, strict=True):
        tail = queries
        if queries == keys:  # the segment begins its group
            roots.append((start, shared or queries))
            tail = queries - roots[-1][1]
        if tail:
            tails.append((start + queries - tail, tail))
            parents.append(len(roots) - 1)
        start += queries
    device, entries = segments.cu_seqlens_q.device, []

    def batches(pieces: list[tuple[int, int]]) -> tuple[list[PieceBatch], IntArray]:
        """Returns batches of pieces, longest first, and the order in which they hold the pieces."""
        firsts, lengths = np.asarray(pieces, dtype=np.int64).reshape(-1, 2).T
        order = np.argsort(-lengths, kind="stable")
        together = [order]
        if padded:  # only pieces whose lengths differ by a factor below two
            doublings = np.log2(lengths[order].clip(_SHORT)).astype(int)
            together = np.split(order, np.flatnonzero(np.diff(doublings)) + 1)
        made = []
        for chosen in together if pieces else []:
            offsets = np.arange(lengths[chosen].max())
            places = np.where(offsets < lengths[chosen, None], firsts[chosen, None] + offsets, -1).ravel()
            starts = None
            if not padded:
                places = places[places >= 0]
                bounds = np.concatenate(([0], lengths[chosen].cumsum()))
                starts = on_device(bounds, device), torch.from_numpy(bounds)
            take = make_gather(places, start, device)
            made.append(PieceBatch(take=take, num_pieces=len(chosen), starts=starts))
            entries.append(places)
        return made, order

    root_batches, root_order = batches(roots)
    tail_batches, tail_order = batches(tails)
    parent_places = np.argsort(root_order)[np.asarray(parents, dtype=np.int64)][tail_order]
    positions = np.concatenate(entries)
    to_row = np.empty(start, dtype=np.int64)
    to_row[positions[positions >= 0]] = np.flatnonzero(positions >= 0)
    return RowPieces(
        roots=root_batches,
        tails=tail_batches,
        to_tails=make_gather(parent_places, len(roots), device),
        to_row=make_gather(to_row, len(positions), device),
    )


def row_history(segments: RowSegments, width: int) -> tuple[Gather, Gather]:
    """Returns two gathers for a convolution over `width` tokens: from the row to a longer row, and back.

    In front of each segment the longer row has the `width - 1` inputs before its first token: zeros if the
    segment begins its sequence, otherwise the last inputs of the part that the sequence shares.
    """
    return segments.once(("history", width), lambda: _make_history(segments, width))


def _make_history(segments: RowSegments, width: int) -> tuple[Gather, Gather]:
    inputs: list[IntArray] = []
    outputs: list[IntArray] = []
    before = np.arange(1 - width, 0)  # offsets of the inputs before a token
    start = num_inputs = shared_end = 0
    lengths = (segments.query_lengths, segments.key_lengths, segments.shared_lengths)
    for queries, keys, shared in zip(*lengths, strict=True):
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
