"""Attention with torch's scaled_dot_product_attention, one call a segment. Runs anywhere; the CPU default.

On the CPU the kernel behind it is called directly where it can be, see cpu_segments.py.

Legend: T tokens of the row, K gathered keys, H heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpo_pack.attention.cpu_segments import cpu_segments_attention, kernel_takes
from dpo_pack.attention.segments import RowSegments


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: RowSegments,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[T, H, D], [K, H_kv, D], [K, H_kv, D_v] -> [T, H, D_v].

    Logit softcaps (Gemma 2) and attention sinks (gpt-oss) are computed eagerly, one segment at a time.
    """
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1:
        key = key.repeat_interleave(num_groups, dim=1)
        value = value.repeat_interleave(num_groups, dim=1)
    if softcap is None and sinks is None and kernel_takes(query, value):
        return cpu_segments_attention(query, key, value, segments, scale=scale, window=window)
    # One split, not a slice per segment: a slice's backward writes a whole [T, H, D] gradient each time.
    outputs = []
    for q, k, v in zip(
        query.split(segments.query_lengths),
        key.split(segments.key_lengths),
        value.split(segments.key_lengths),
        strict=True,
    ):
        num_queries, num_keys = len(q), len(k)
        short = window if window is not None and window < num_keys else None
        causal = num_queries == num_keys and short is None
        mask = None if causal else segments.mask(num_queries, num_keys, short)
        # [1, H, L, D] views: SDPA's fused kernels take four dimensions only.
        q, k, v = (states.transpose(0, 1).unsqueeze(0) for states in (q, k, v))
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        else:
            mask = segments.mask(num_queries, num_keys, short)
            out = _eager_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[1, H, Lq, D], [1, H, Lk, D], [1, H, Lk, D_v] -> [1, H, Lq, D_v]; `sinks` is [H], one logit a head."""
    scores = query @ key.transpose(-1, -2) * scale  # [1, H, Lq, Lk]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[-2]] @ value
