"""Turns sequences into one *row* (one model input) and the index arrays that the model's layers need.

A *group* is one context (a prompt) and n completions of it; a preference pair is a group with n = 2. The row
holds the longest common token prefix of a group's sequences once (the context and the completions' equal
first tokens). Then it holds the *tail* of each sequence: its other tokens. Groups whose contexts have a
*beginning* in common, such as a system prompt, follow each other, and the row holds it once for all. A row
with two pairs that begin with `1 2`; prompt `1 2 3`, answers `7 8` and `9`; prompt `1 2`, answers `6`, `4`:

    node            beginning  shared  chosen  rejected  chosen  rejected   (parents: -1, 0, 1, 1, 0, 0)
    row position    0  1       2       3  4    5         6       7
    input_ids       1  2       3       7  8    9         6       4
    position_ids    0  1       2       3  4    3         2       2          go on where a prefix ends
    segments        queries 0 to 4, keys 0 1 2 3 4; 5, 0 1 2 5; 6, 0 1 6; 7, 0 1 7
    logit_index     2  3  2  1  1                      row positions whose hidden states
    targets         7  8  9  6  4                      predict these tokens
    completion_lengths  2, 1, 1, 1

Each sequence is one attention segment. A segment's queries are the tokens that the sequence adds to the row;
its keys are all tokens of the sequence, its *path*: the path of the sequence before it, as far as the two are
shared, and the new tokens. The mask is causal and aligned bottom-right: a segment's last query stands at its
last key. If prompts are not shared, every sequence adds all of its tokens.

A completion token that is not scored has no place in `logit_index` and `targets`.

Legend: T tokens of the row, K gathered keys (of all segments, shared ones copied), G segments, N scored
completion tokens, S sequences, B and L lines and length of a batch (a packed row has B = 1 and L = T).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dpo_pack.model.attention.segments import Node, RowSegments, make_gather, make_segments, on_device
from dpo_pack.packing.lengths import AnyIntArray, Group, IntArray, common_prefix_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The tensors of one forward pass, on the model's device: a packed row, or a whole right-padded batch."""

    input_ids: Tensor  # [B, L] int64
    position_ids: Tensor  # [B, L] int64
    attention_mask: Tensor | None  # [B, L] int64, 1 at real tokens; None for a packed row
    segments: RowSegments | None  # None for a padded batch
    logit_index: Tensor  # [N] int64, into the flattened B * L positions
    targets: Tensor  # [N] int64
    completion_lengths: Tensor  # [S] int64 scored tokens; the N scored tokens are in the order of sequences
    num_tokens: int  # real tokens, padding not counted
    # [B * L] float32: how many sequences contain the token, 0 for padding. If given, the scorer adds up which
    # experts the routers of a mixture of experts choose.
    token_copies: Tensor | None = None
    prompts: tuple[Group, ...] = ()  # the groups, as often as their contexts are in the row
    prompt_tokens: tuple[int, ...] = ()  # of each of these: what it and its completions add to the row


def packed_row(
    groups: Sequence[Group], device: torch.device, *, share_prompt: bool, counts_copies: bool = False
) -> Row:
    """Puts `groups` one after another into one row, as tensors on `device`. If a sequence after the first of
    its group is a prefix of the others, it has no tail and no segment; its hidden states are the prefix's."""
    pieces: defaultdict[str, list[AnyIntArray]] = defaultdict(list)
    nodes, leaves = list[Node](), list[int]()
    # Of each node: the sequences that contain it, and their tokens up to its end.
    copies, ends = list[int](), list[int]()
    before, branch_nodes = np.zeros(0, dtype=np.int64), list[int]()  # path and nodes of the sequence before
    lengths: list[tuple[int, int]] = []  # queries and keys of each segment
    prompts, prompt_tokens, num_tokens = list[Group](), list[int](), 0
    common = [0] * (len(groups) + 1)  # tokens that a group shares with the group before it
    for number, (one, other) in enumerate(pairwise(groups), start=1):
        length = one.beginning if share_prompt and one.beginning == other.beginning else 0
        if np.array_equal(one.context[:length], other.context[:length]):
            common[number] = length
    for number, group in enumerate(groups):
        sequences = list(_sequences(group))
        shares = share_prompt and len(sequences) > 1
        prompts += [group] * (1 if shares else len(sequences))
        shared = common_prefix_length([ids for ids, _, _ in sequences]) if shares else 0
        for branch, (ids, offsets, targets) in enumerate(sequences):
            kept = shared if branch > 0 else common[number]
            while branch_nodes and ends[branch_nodes[-1]] > kept:
                branch_nodes.pop()
            path = np.concatenate((before[:kept], np.arange(num_tokens, num_tokens + len(ids) - kept)))
            start = kept
            for end in sorted({common[number], common[number + 1], shared, len(ids)}):
                if end > start:
                    parent = branch_nodes[-1] if branch_nodes else -1
                    branch_nodes.append(len(nodes))
                    nodes.append(Node(num_tokens + start - kept, end - start, parent))
                    ends.append(end)
                    copies.append(0)
                    start = end
            for node in branch_nodes:
                copies[node] += 1
            pieces["logit_index"].append(path[offsets])
            pieces["targets"].append(targets)
            if branch == 0 or not shares:
                prompt_tokens.append(0)
            prompt_tokens[-1] += len(ids) - kept
            before = path
            if kept == len(ids):
                continue
            pieces["kv_index"].append(path)
            pieces["input_ids"].append(ids[kept:])
            pieces["position_ids"].append(np.arange(kept, len(ids)))
            lengths.append((len(ids) - kept, len(ids)))
            leaves.append(branch_nodes[-1])
            num_tokens += len(ids) - kept
    arrays = {name: np.concatenate(parts).astype(np.int64, copy=False) for name, parts in pieces.items()}
    query_lengths, key_lengths = zip(*lengths, strict=True)
    is_shared = sum(key_lengths) > num_tokens
    segments = make_segments(
        query_lengths,
        key_lengths,
        device,
        nodes=tuple(nodes),
        leaves=tuple(leaves),
        kv_gather=make_gather(arrays["kv_index"], num_tokens, device) if is_shared else None,
        scored_positions=on_device(np.unique(arrays["logit_index"]), device),
    )
    of_tokens = np.repeat(np.array(copies, dtype=np.float32), [node.length for node in nodes])
    return Row(
        input_ids=on_device(arrays["input_ids"], device)[None],
        position_ids=on_device(arrays["position_ids"], device)[None],
        attention_mask=None,
        segments=segments,
        logit_index=on_device(arrays["logit_index"], device),
        targets=on_device(arrays["targets"], device),
        completion_lengths=on_device(np.asarray([len(part) for part in pieces["targets"]]), device),
        num_tokens=num_tokens,
        token_copies=on_device(of_tokens, device) if counts_copies else None,
        prompts=tuple(prompts),
        prompt_tokens=tuple(prompt_tokens),
    )


def padded_row(groups: Sequence[Group], *, device: torch.device, counts_copies: bool = False) -> Row:
    """Returns a right-padded batch of the same sequences in the same order, without shared prefixes. Any
    token id can pad, because no real token sees a later position: 0, which every model has."""
    sequences = [sequence for group in groups for sequence in _sequences(group)]
    lengths = np.array([len(ids) for ids, _, _ in sequences])
    longest = int(lengths.max())
    input_ids = np.zeros((len(sequences), longest), dtype=np.int64)
    for line, (ids, _, _) in zip(input_ids, sequences, strict=True):
        line[: len(ids)] = ids
    logit_index = [offsets + number * longest for number, (_, offsets, _) in enumerate(sequences)]
    targets = np.concatenate([targets for _, _, targets in sequences])
    is_real = np.arange(longest)[None, :] < lengths[:, None]
    return Row(
        input_ids=on_device(input_ids, device),
        position_ids=torch.arange(longest, device=device).expand(len(sequences), longest),
        attention_mask=on_device(is_real.astype(np.int64), device),
        segments=None,
        logit_index=on_device(np.concatenate(logit_index), device),
        targets=on_device(targets.astype(np.int64), device),
        completion_lengths=on_device(np.asarray([len(targets) for _, _, targets in sequences]), device),
        num_tokens=int(lengths.sum()),
        token_copies=on_device(is_real.ravel().astype(np.float32), device) if counts_copies else None,
        prompts=tuple(group for group in groups for _ in group.completions),
        prompt_tokens=(longest,) * len(sequences),
    )


def _sequences(group: Group) -> Iterator[tuple[AnyIntArray, IntArray, AnyIntArray]]:
    """Yields the token ids of each sequence, the offsets in it that predict scored tokens, and these."""
    assert len(group.context) >= 1 and all(len(completion) >= 1 for completion in group.completions)
    for number, completion in enumerate(group.completions):
        is_scored = slice(None) if group.scored is None else group.scored[number]
        # The hidden state at offset i predicts token i + 1, for i from the last context token on.
        offsets = np.arange(len(completion)) + len(group.context) - 1
        yield np.concatenate((group.context, completion)), offsets[is_scored], completion[is_scored]
