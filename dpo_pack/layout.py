"""From the sequences of one row to the index arrays a model and an attention kernel need.

A *group* is one context and n completions of it; a preference pair is a group of two. With prompt
sharing a group is laid out as

    [ shared | tail 0 | tail 1 | ... ]

where `shared` is the longest common token prefix of all its sequences (the context plus whatever the
completions begin with alike) and positions restart at `len(shared)` in every tail after the first. In
attention terms that is one segment per sequence: the first one's queries and keys are shared + tail 0;
every other one's queries are its tail and its keys shared + tail, which a kernel with a bottom-right
aligned causal mask computes exactly. Without sharing, `shared` is empty and nothing else changes.

Legend: T tokens of the row, K gathered keys, G segments, N scored completion tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpo_pack.attention.segments import RowSegments

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One context and the completions that continue it.

    `context` is [C] token ids, C >= 1: a completion's first token needs something to be predicted from.
    `completions` are one or more [L_i] arrays of token ids, L_i >= 1.
    """

    context: npt.NDArray[np.integer]
    completions: tuple[npt.NDArray[np.integer], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Everything about one row except the weights: token ids and the indices that tie them together.

    | field | shape | meaning |
    |---|---|---|
    | `input_ids` | [T] int64 | |
    | `position_ids` | [T] int64 | explicit, so learned absolute positions work as well as RoPE |
    | `query_lengths`, `key_lengths` | [G] int64 | of each attention segment, in row order |
    | `kv_index` | [K] int64 or None | row position of every gathered key; None when nothing is shared |
    | `kv_first` | [T] int64 or None | where each row position first appears in `kv_index` |
    | `kv_repeats` | tuple of ([R], [R]) | (row positions, their further places in `kv_index`); row positions are unique within one entry |
    | `logit_index` | [N] int64 | row position of the hidden state that predicts the target |
    | `targets` | [N] int64 | |
    | `completion_lengths` | [S] int64 | scored tokens of each sequence; N is their sum, in this order |
    """  # noqa: E501

    input_ids: IntArray
    position_ids: IntArray
    query_lengths: IntArray
    key_lengths: IntArray
    kv_index: IntArray | None
    kv_first: IntArray | None
    kv_repeats: tuple[tuple[IntArray, IntArray], ...]
    logit_index: IntArray
    targets: IntArray
    completion_lengths: IntArray

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row on its device, ready for the model: a packed one (B = 1, L = T) or a right-padded batch."""

    input_ids: Tensor  # [B, L] int64
    position_ids: Tensor  # [B, L] int64
    attention_mask: Tensor | None  # [B, L] int64, 1 at real tokens; None for a packed row
    segments: RowSegments | None  # None for a padded batch
    logit_index: Tensor  # [N] int64, into the flattened B * L positions
    targets: Tensor  # [N] int64
    completion_lengths: Tensor  # [S] int64; the N scored tokens lie sequence by sequence
    num_tokens: int  # real tokens, padding not counted


def common_prefix_length(sequences: Sequence[npt.NDArray[np.integer]]) -> int:
    """Number of leading tokens that all `sequences` ([L_i] each) have in common."""
    shortest = min(len(sequence) for sequence in sequences)
    first = sequences[0][:shortest]
    for other in sequences[1:]:
        differs = np.flatnonzero(first != other[: len(first)])
        if len(differs):
            first = first[: differs[0]]
    return len(first)


def layout_row(groups: Sequence[Group], *, share_prompt: bool) -> RowLayout:
    """Lay `groups` out one after another in one row.

    Sequences are numbered in order of appearance: completion j of the first group is sequence j, the next
    group goes on counting. A sequence whose tail is empty (it is a prefix of the others) gets no attention
    segment of its own; its last hidden state is a shared one.
    """
    return _RowBuilder(share_prompt).build(groups)


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`. Waits for nothing that is under way there.

    CUDA copies from pinned memory while the host goes on; of other memory it may first end all earlier work.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def packed_row(layout: RowLayout, device: torch.device) -> Row:
    """Put a row's layout on `device`."""

    def put(array: IntArray) -> Tensor:
        return on_device(array, device)

    def cumulative(lengths: IntArray) -> Tensor:
        return on_device(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), device)

    segments = RowSegments(
        query_lengths=tuple(layout.query_lengths.tolist()),
        key_lengths=tuple(layout.key_lengths.tolist()),
        cu_seqlens_q=cumulative(layout.query_lengths),
        cu_seqlens_k=cumulative(layout.key_lengths),
        kv_index=None if layout.kv_index is None else put(layout.kv_index),
        kv_first=None if layout.kv_first is None else put(layout.kv_first),
        kv_repeats=tuple((put(tokens), put(places)) for tokens, places in layout.kv_repeats),
        scored_positions=put(np.unique(layout.logit_index)),
    )
    return Row(
        input_ids=put(layout.input_ids)[None],
        position_ids=put(layout.position_ids)[None],
        attention_mask=None,
        segments=segments,
        logit_index=put(layout.logit_index),
        targets=put(layout.targets),
        completion_lengths=put(layout.completion_lengths),
        num_tokens=layout.num_tokens,
    )


def padded_row(groups: Sequence[Group], *, pad_token_id: int, device: torch.device) -> Row:
    """An ordinary right-padded batch of the same sequences in the same order, nothing shared.

    Right padding needs no help from the attention kernel to be exact for a causal model: no real token
    ever sees a later position.
    """
    pairs = [(group.context, completion) for group in groups for completion in group.completions]
    lengths = np.asarray([len(context) + len(completion) for context, completion in pairs])
    longest = int(lengths.max())
    ids = np.full((len(pairs), longest), pad_token_id, dtype=np.int64)
    for line, (context, completion) in zip(ids, pairs, strict=True):
        line[: len(context) + len(completion)] = np.concatenate((context, completion))
    index = [
        np.arange(len(context) - 1, len(context) + len(completion) - 1) + number * longest
        for number, (context, completion) in enumerate(pairs)
    ]
    real = np.arange(longest)[None, :] < lengths[:, None]
    completion_lengths = [len(completion) for _, completion in pairs]
    return Row(
        input_ids=on_device(ids, device),
        position_ids=torch.arange(longest, device=device).expand(len(pairs), longest),
        attention_mask=on_device(real.astype(np.int64), device),
        segments=None,
        logit_index=on_device(_concatenate(index), device),
        targets=on_device(_concatenate([completion for _, completion in pairs]), device),
        completion_lengths=on_device(np.asarray(completion_lengths, dtype=np.int64), device),
        num_tokens=int(lengths.sum()),
    )


class _RowBuilder:
    """Pieces of index arrays, collected group by group and concatenated once."""

    def __init__(self, share_prompt: bool) -> None:
        self.share_prompt = share_prompt
        self.num_tokens = 0
        self.num_keys = 0
        self.ids: list[npt.NDArray[np.integer]] = []
        self.positions: list[IntArray] = []
        self.query_lengths: list[int] = []
        self.key_lengths: list[int] = []
        self.kv_index: list[IntArray] = []
        self.kv_first: list[IntArray] = []
        self.repeats: dict[int, list[tuple[IntArray, IntArray]]] = {}
        self.logit_index: list[IntArray] = []
        self.targets: list[npt.NDArray[np.integer]] = []
        self.completion_lengths: list[int] = []

    def build(self, groups: Sequence[Group]) -> RowLayout:
        for group in groups:
            self._add_group(group)
        shares = bool(self.repeats)
        return RowLayout(
            input_ids=_concatenate(self.ids),
            position_ids=_concatenate(self.positions),
            query_lengths=np.asarray(self.query_lengths, dtype=np.int64),
            key_lengths=np.asarray(self.key_lengths, dtype=np.int64),
            kv_index=_concatenate(self.kv_index) if shares else None,
            kv_first=_concatenate(self.kv_first) if shares else None,
            kv_repeats=tuple(
                (_concatenate([tokens for tokens, _ in level]), _concatenate([keys for _, keys in level]))
                for _, level in sorted(self.repeats.items())
            ),
            logit_index=_concatenate(self.logit_index),
            targets=_concatenate(self.targets),
            completion_lengths=np.asarray(self.completion_lengths, dtype=np.int64),
        )

    def _add_group(self, group: Group) -> None:
        assert len(group.context) >= 1 and all(len(c) >= 1 for c in group.completions)
        sequences = [np.concatenate((group.context, completion)) for completion in group.completions]
        shared = common_prefix_length(sequences) if self.share_prompt and len(sequences) > 1 else 0
        shared_start = self.num_tokens
        for branch, sequence in enumerate(sequences):
            # The first sequence carries the shared tokens; of the others only the tail is in the row.
            begin = shared if branch > 0 else 0
            tail_start = self.num_tokens - begin + shared
            self._add_scores(sequence, len(group.context), shared, shared_start, tail_start)
            if begin < len(sequence):
                self._add_segment(sequence, begin, shared_start, branch)

    def _add_scores(
        self, sequence: npt.NDArray[np.integer], context: int, shared: int, shared_start: int, tail_start: int
    ) -> None:
        """The hidden state at offset i predicts token i + 1, for i from the last context token on."""
        offsets = np.arange(context - 1, len(sequence) - 1)
        in_row = np.where(offsets < shared, shared_start + offsets, tail_start + offsets - shared)
        self.logit_index.append(in_row)
        self.targets.append(sequence[context:])
        self.completion_lengths.append(len(sequence) - context)

    def _add_segment(
        self, sequence: npt.NDArray[np.integer], begin: int, shared_start: int, branch: int
    ) -> None:
        start, num_queries = self.num_tokens, len(sequence) - begin
        own = np.arange(start, start + num_queries)
        if begin > 0:
            prefix = np.arange(shared_start, shared_start + begin)
            places = np.arange(self.num_keys, self.num_keys + begin)
            self.repeats.setdefault(branch, []).append((prefix, places))
            self.kv_index.append(prefix)
        self.kv_index.append(own)
        self.kv_first.append(np.arange(self.num_keys + begin, self.num_keys + len(sequence)))
        self.ids.append(sequence[begin:])
        self.positions.append(np.arange(begin, len(sequence)))
        self.query_lengths.append(num_queries)
        self.key_lengths.append(len(sequence))
        self.num_tokens += num_queries
        self.num_keys += len(sequence)


def _concatenate(pieces: Sequence[npt.NDArray[np.integer]]) -> IntArray:
    return np.concatenate(pieces).astype(np.int64, copy=False) if pieces else np.zeros(0, dtype=np.int64)
