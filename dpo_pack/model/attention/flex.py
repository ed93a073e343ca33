"""Attention with torch's FlexAttention, one call for a row: for logit softcaps (Gemma 2) and sinks (gpt-oss).

The kernel computes only those blocks of 128 x 128 logits in which a query sees a key. For other models the
kernels in flash.py are faster.

Legend: T tokens of the row, K keys of all segments (see segments.py), H heads, D head dimension, B blocks of
queries or keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpo_pack.model.attention.segments import AttentionOptions, RowSegments, as_autocast, on_device

_BLOCK = 128


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """The backend "flex": queries [T, H, D], keys [T, H_kv, D], values [T, H_kv, D_v] -> [T, H, D_v]."""
    from torch.nn.attention.flex_attention import AuxRequest

    def score(logit: Tensor, batch: Tensor, head: Tensor, at: Tensor, key_at: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(logit / softcap)

    softcap, window = options.softcap, options.window
    if segments.kv_gather is not None:
        key, value = map(segments.kv_gather, (key, value))
    query, key, value = as_autocast(query, key, value)
    block_mask = segments.once(("flex", window), lambda: _block_mask(segments, window, query.device))
    out, aux = _kernel(query.device.type)(
        *(states.transpose(0, 1).unsqueeze(0) for states in (query, key, value)),
        score_mod=None if softcap is None else score,
        block_mask=block_mask,
        scale=options.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out = out.squeeze(0).transpose(0, 1)  # [T, H, D_v]
    if options.sinks is not None:
        # A sink is one more logit of the softmax, without a value. So it multiplies the weights of all keys
        # by Z / (Z + exp(sink)), where Z is the sum of exp(logit) over the keys.
        share = torch.sigmoid(aux.lse.squeeze(0).transpose(0, 1) - options.sinks.float())  # [T, H]
        out = (out.float() * share.unsqueeze(-1)).to(out.dtype)
    return out  # type: ignore[no-any-return]


@functools.cache
def _kernel(device_type: str) -> Callable[..., Any]:
    """Returns FlexAttention, compiled on CUDA. Elsewhere torch computes it without a fused kernel."""
    from torch.nn.attention import flex_attention as torch_flex

    plain: Callable[..., Any] = torch_flex.flex_attention
    if device_type != "cuda":
        return plain
    # Without `fullgraph`, torch may compute all T x K logits of attention and say nothing. A softcap must be
    # a constant of the code: torch cannot compile a backward pass with a symbolic number in a score.
    constants = torch._dynamo.config.patch(specialize_float=True)
    compiled: Callable[..., Any] = constants(torch.compile(plain, dynamic=True, fullgraph=True))
    return compiled


def _block_mask(segments: RowSegments, window: int | None, device: torch.device) -> Any:
    """Returns torch's BlockMask of the row: in each segment causal, with the last query at the last key."""
    from torch.nn.attention.flex_attention import BlockMask

    first_keys, last_keys = [], []  # that each query sees
    starts = pairwise(accumulate(segments.key_lengths, initial=0))
    for num_queries, (start, end) in zip(segments.query_lengths, starts, strict=True):
        own = np.arange(end - num_queries, end, dtype=np.int32)
        last_keys.append(own)
        first_keys.append(np.full_like(own, start) if window is None else np.maximum(start, own - window + 1))
    first, last = np.concatenate(first_keys), np.concatenate(last_keys)  # [T] each
    # [query blocks, key blocks]: whether a query of the one sees a key of the other
    num_blocks = [-(-count // _BLOCK) for count in (len(first), sum(segments.key_lengths))]
    edges = np.zeros((num_blocks[0], num_blocks[1] + 1), dtype=np.int32)
    block = np.arange(len(first)) // _BLOCK
    np.add.at(edges, (block, first // _BLOCK), 1)
    np.add.at(edges, (block, last // _BLOCK + 1), -1)
    touched = edges.cumsum(axis=1)[:, :-1] > 0
    first_key, last_key = on_device(first, device), on_device(last, device)

    def mask(batch: Tensor, head: Tensor, at: Tensor, key_at: Tensor) -> Tensor:
        return (first_key[at] <= key_at) & (key_at <= last_key[at])

    # In each line (a block of queries), BlockMask wants the key blocks that the queries see first.
    order = np.argsort(~touched, axis=1, kind="stable").astype(np.int32)
    counts = touched.sum(axis=1, dtype=np.int32)
    return BlockMask.from_kv_blocks(
        on_device(counts, device)[None, None],
        on_device(order, device)[None, None],
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(len(first), sum(segments.key_lengths)),
    )
