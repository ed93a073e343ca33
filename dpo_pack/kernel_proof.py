"""A kernel on random inputs of a model's shapes, forward and gradients, against attention by definition.

Legend: H heads, D head dimension, L_q and L_k queries and keys of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpo_pack.attention import AttentionBackend
from dpo_pack.attention.segments import RowSegments

# A model's real window may be longer than a proof's segments; the kernel's meaning of it is the same.
_PROOF_WINDOW = 24
# (queries, keys): alone, one token after others, a tail, longer than the window.
_PROOF_SEGMENTS = ((1, 1), (7, 7), (1, 30), (20, 45), (64, 64))
# Relative; measured are 2e-7 to 6e-7.
_FLOAT32_BOUND = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamCall:
    """What one attention layer asked of the kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


def seam_call(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> SeamCall:
    """[T, H, D], [K, H_kv, D], [K, H_kv, D_v] as a backend gets them."""
    return SeamCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[2],
        value_head_dim=value.shape[2],
        scale=options["scale"],
        window=options["window"],
        softcap=options["softcap"],
        has_sinks=options["sinks"] is not None,
    )


def kernel_error(
    backend: AttentionBackend, call: SeamCall, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """(error against fp32, what it may be), of the output or the gradient that is worst off.

    Norms, relative to the fp32 result's: the largest entry's error differs too much from draw to draw for a
    bound. A low-precision kernel may err twice as much as the plain computation in its dtype does, as in
    flash-attn's own tests; in fp32 the bound is a constant.
    """
    segments = _segments(device)
    kv_heads = min(2, call.num_kv_heads)
    heads = kv_heads * (call.num_heads // call.num_kv_heads)
    num_queries, num_keys = sum(segments.query_lengths), sum(segments.key_lengths)
    shapes = (
        (num_queries, heads, call.head_dim),
        (num_keys, kv_heads, call.head_dim),
        (num_keys, kv_heads, call.value_head_dim),
    )
    exact = [torch.randn(shape, device=device).to(dtype).float() for shape in shapes]
    weights = torch.randn(num_queries, heads, call.value_head_dim, device=device)
    window = None if call.window is None else min(call.window, _PROOF_WINDOW)
    options: dict[str, Any] = {"scale": call.scale, "window": window, "softcap": call.softcap}
    options["sinks"] = torch.randn(heads, device=device) if call.has_sinks else None

    def run(attention: AttentionBackend, of: torch.dtype) -> list[Tensor]:
        inputs = [states.to(of).requires_grad_() for states in exact]
        with torch.enable_grad():
            out = attention(*inputs, segments, **options)
            grads = torch.autograd.grad(out, inputs, weights.to(out.dtype))
        return [result.detach().float() for result in (out, *grads)]

    reference = run(plain_attention, torch.float32)
    errors = _relative_errors(run(backend, dtype), reference)
    allowed = [_FLOAT32_BOUND] * len(errors)
    if dtype != torch.float32:
        allowed = [2 * error for error in _relative_errors(run(plain_attention, dtype), reference)]
    return max(zip(errors, allowed, strict=True), key=lambda pair: pair[0] / pair[1])


def plain_attention(
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
    """Attention by definition, in the dtype of its inputs: scores, caps, the causal window, softmax, values.

    As the eager attention of transformers has it, softmax alone is in fp32.
    """
    groups = query.shape[1] // key.shape[1]
    outputs = []
    lengths = (segments.query_lengths, segments.key_lengths, segments.key_lengths)
    parts = [states.split(sizes) for states, sizes in zip((query, key, value), lengths, strict=True)]
    for q, k, v in zip(*parts, strict=True):
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = (
            torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
            - torch.arange(len(k), device=q.device)[None, :]
        )
        visible = (distance >= 0) & (distance < (len(k) if window is None else window))
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)), dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : len(k)].to(v.dtype)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def _segments(device: torch.device) -> RowSegments:
    def cumulative(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32, device=device)

    query_lengths, key_lengths = zip(*_PROOF_SEGMENTS, strict=True)
    return RowSegments(
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        cu_seqlens_q=cumulative(query_lengths),
        cu_seqlens_k=cumulative(key_lengths),
        kv_index=None,
        kv_first=None,
        kv_repeats=(),
    )


def _relative_errors(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    """Norm of the difference over the reference's. NaN counts as infinitely far."""
    pairs = zip(ours, reference, strict=True)
    ratios = [float((result - exact).norm() / exact.norm()) for result, exact in pairs]
    return [math.inf if math.isnan(ratio) else ratio for ratio in ratios]
