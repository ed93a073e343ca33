"""Attention with the flash-attn package's varlen kernel (FlashAttention-2, CUDA, an optional extra)."""

from __future__ import annotations

from torch import Tensor

from dpo_pack.attention.autocast import as_autocast
from dpo_pack.attention.segments import RowSegments


def flash_attn_attention(
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
    """[T, H, D], [K, H_kv, D], [K, H_kv, D] -> [T, H, D], bf16 or fp16; obeys autocast."""
    from flash_attn import flash_attn_varlen_func

    assert sinks is None  # select_backend refuses these models
    out: Tensor = flash_attn_varlen_func(
        *as_autocast(query, key, value),
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_seqlen_q,
        segments.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        # (left, right) neighbours besides the query itself; transformers' window counts the query too.
        window_size=(-1 if window is None else window - 1, 0),
        softcap=softcap or 0.0,
        deterministic=True,
    )
    return out
