"""FlashAttention's varlen kernels by definition, on any device: they take what the real ones take, no more.

Legend: T queries, K keys, H heads, D head dimension, G segments.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dpo_pack.model.attention.cuda as cuda


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Both backends of FlashAttention call these; returns the dtypes of their calls, as they come."""
    dtypes: list[torch.dtype] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        dtypes.append(query.dtype)
        with torch.autocast(query.device.type, enabled=False):  # of which the real ones know nothing
            return _attention(query, key, value, *arguments, **options)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        is_causal: bool,
        debug: bool,
        *,
        scale: float,
        window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, ...]:
        assert dropout == 0.0 and not debug and is_causal == (window_size_left < 0)
        assert query.shape[-1] % 8 == 0, "head dimension must be a multiple of 8"
        _check_longest(cu_seq_q, max_q)
        _check_longest(cu_seq_k, max_k)
        window = (window_size_left, window_size_right)
        out = kernel(query, key, value, cu_seq_q, cu_seq_k, scale=scale, window=window)
        normalizers = torch.zeros(query.shape[1], len(query))
        return out, normalizers, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, normalizers: Tensor,
        *arguments: Any, **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        def differentiate() -> tuple[Tensor, ...]:
            inputs = [states.detach().requires_grad_() for states in (query, key, value)]
            again: Any = forward
            return torch.autograd.grad(again(*inputs, *arguments[:6], False, **options)[0], inputs, grad)

        with ThreadPoolExecutor(1) as pool:  # in this one, an operator's code runs without autograd
            return pool.submit(differentiate).result()

    def flash_attn_varlen_func(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        deterministic: bool,
    ) -> Tensor:
        assert causal and deterministic
        _check_longest(cu_seqlens_q, max_seqlen_q)
        _check_longest(cu_seqlens_k, max_seqlen_k)

        def attend(*states: Tensor) -> Tensor:
            options: Any = {"scale": softmax_scale, "window": window_size, "softcap": softcap}
            return kernel(*states, cu_seqlens_q, cu_seqlens_k, **options)

        attended: Tensor = _Kernel.apply(query, key, value, attend)  # type: ignore[no-untyped-call]
        return attended

    package: Any = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    operators = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(cuda, "_operators", operators)
    return dtypes


class _Kernel(torch.autograd.Function):
    """It keeps what the package's keeps: what it was given, as it is, and its result."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, attend: Any) -> Tensor:
        out: Tensor = attend(query, key, value)
        ctx.save_for_backward(query, key, value, out)
        ctx.attend = attend
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [states.detach().requires_grad_() for states in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            return *torch.autograd.grad(ctx.attend(*inputs), inputs, grads[0]), None


def _check_longest(cu_seqlens: Tensor, longest: int) -> None:
    """A kernel does not look past the length that it is told."""
    assert longest == int(cu_seqlens.diff().max())


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
) -> Tensor:
    """[T, H, D], [K, H_kv, D], [K, H_kv, D], [G+1], [G+1] -> [T, H, D], causal, aligned bottom-right."""
    assert query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype"
    assert query.dtype in (torch.bfloat16, torch.float16), "only fp16 and bf16 are supported"
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and window[1] == 0
    groups = query.shape[1] // key.shape[1]
    lengths = (cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), cu_seqlens_k.diff().tolist())
    parts = [states.float().split(sizes) for states, sizes in zip((query, key, value), lengths, strict=True)]
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None, :]
        is_visible = (behind >= 0) & ((behind <= window[0]) | (window[0] < 0))
        weights = scores.masked_fill(~is_visible, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs).to(query.dtype)
