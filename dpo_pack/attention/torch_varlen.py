"""Attention with the variable-length FlashAttention kernel that torch itself brings (CUDA, torch >= 2.10)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor

from dpo_pack.attention.autocast import as_autocast
from dpo_pack.attention.segments import RowSegments


def torch_varlen_attention(
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
    from torch.nn.attention.varlen import varlen_attn

    assert softcap is None and sinks is None  # select_backend refuses these models
    out = varlen_attn(
        *as_autocast(query, key, value),
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_seqlen_q,
        segments.max_seqlen_k,
        **_kernel_arguments(scale, window, query.shape[1] != key.shape[1]),
    )
    assert isinstance(out, Tensor)  # a tuple only where the logsumexp is asked for
    return out


@functools.cache
def _parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def supports_window_and_scale() -> bool:
    """Whether this torch's kernel takes a sliding window and a softmax scale (torch 2.10's does not)."""
    return {"window_size", "scale"} <= _parameters()


def _kernel_arguments(scale: float, window: int | None, grouped_heads: bool) -> dict[str, Any]:
    """The argument names moved between releases: causal is a flag in 2.10, a window from 2.11 on."""
    known = _parameters()
    arguments: dict[str, Any] = {}
    if "window_size" in known:
        # (left, right) neighbours besides the query itself; transformers' window counts the query too.
        arguments["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        assert window is None
        arguments["is_causal"] = True
    if "scale" in known:
        arguments["scale"] = scale
    if "enable_gqa" in known and grouped_heads:
        arguments["enable_gqa"] = True
    return arguments
