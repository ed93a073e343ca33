"""Proofs of the seam (our attention function): layers call it as the config says; its kernel is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from dpo_pack.model.attention import AttentionBackend
from dpo_pack.model.attention.segments import AttentionOptions, RowSegments, make_segments
from dpo_pack.model.config import attention_needs, effective_window, layer_windows, num_recurrent_calls
from dpo_pack.model.layout import Row
from dpo_pack.model.recurrence import RecurrentCall
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.proofs.rows import PADDED_REMEDY, Proof
from dpo_pack.system.errors import UnsupportedModelError

# A window longer than all _PROOF_SEGMENTS would hide no key, so the proof uses at most this window.
_PROOF_WINDOW = 24
# (queries, keys): one token; a short sequence; 1 query after 29 keys; 20 after 25; more than the window.
_PROOF_SEGMENTS = ((1, 1), (7, 7), (1, 30), (20, 45), (64, 64))
# The allowed relative error in fp32. We measured errors of 2e-7 to 6e-7.
_FLOAT32_BOUND = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamCall:
    """How one attention layer called the kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    options: AttentionOptions  # without the values of sinks
    has_sinks: bool


class Recorded:
    """The calls of our functions by the layers of a model while `compute` runs a row."""

    def __init__(self, scorer: CompletionLogps, row: Row, compute: Callable[[Row], object]) -> None:
        assert scorer.backend is not None
        self.backend, self.recurrence = scorer.backend, scorer.recurrence
        self.attention: list[SeamCall] = []
        self.recurrent: dict[Hashable, RecurrentCall] = {}  # the first of each kind
        self.num_recurrent = 0
        self.error: UnsupportedModelError | None = None  # which ended the row
        try:
            with scorer.replaced(backend=self._attend, recurrence=self._recur):
                compute(row)
        except UnsupportedModelError as error:
            self.error = error

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
    ) -> Tensor:
        call = SeamCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            value_head_dim=value.shape[2],
            options=replace(options, sinks=None),
            has_sinks=options.sinks is not None,
        )
        self.attention.append(call)
        return self.backend(query, key, value, segments, options)

    def _recur(self, call: RecurrentCall) -> Any:
        self.num_recurrent += 1
        shapes = tuple(part.shape for part in call.arguments if isinstance(part, Tensor))
        self.recurrent.setdefault((call.name, shapes), call)
        return self.recurrence(call)


def prove_wiring(calls: Recorded, config: PretrainedConfig) -> Proof:
    """Proves that each layer calls our attention once, with the window, softcap and sinks of the config:
    log-probs of short rows cannot show that a window is missing, and rounding may hide a sink."""
    attention, needs, expected = calls.attention, attention_needs(config), layer_windows(config)
    windows = [effective_window(call.options.window, config) for call in attention]
    num_softcaps = sum(call.options.softcap is not None for call in attention)
    num_sinks = sum(call.has_sinks for call in attention)
    num_recurrent = num_recurrent_calls(config)
    bound = "one call of our attention by each attention layer, with the window of the config"
    bound += f"; {num_recurrent} calls of our recurrent functions" * (num_recurrent > 0)
    bound += "; a softcap in every layer" * needs.has_softcap + "; sinks" * needs.has_sinks
    remedy = PADDED_REMEDY if calls.error is None else str(calls.error)
    if num_recurrent != calls.num_recurrent and calls.error is None:
        own = f"this is {transformers.__version__}"
        remedy = f"install the transformers release that docs/families.md names ({own}), or {remedy}"
    return Proof(
        name="wiring",
        passed=calls.error is None
        and windows == expected
        and calls.num_recurrent == num_recurrent
        and num_softcaps == (len(attention) if needs.has_softcap else 0)
        and (num_sinks > 0 or not needs.has_sinks),
        numbers={
            "attention layers": float(len(expected)),
            "calls of our attention": float(len(attention)),
            "calls of our recurrent functions": float(calls.num_recurrent),
            "windows as in the config": float(sum(a == b for a, b in zip(windows, expected, strict=False))),
            "softcaps": float(num_softcaps),
            "sinks": float(num_sinks),
        },
        bound=bound,
        remedy=remedy,
    )


def error_proof(name: str, measured: Iterable[tuple[float, float]], where: str, remedy: str) -> Proof:
    """Returns the proof whose number is the worst of the (error, bound) in `measured`."""
    error, bound = worst(measured)
    words = f"relative error of outputs and gradients {where} <= {bound:.1e}"
    return Proof(
        name=name, passed=error <= bound, numbers={"relative error": error}, bound=words, remedy=remedy
    )


def kernel_error(
    backend: AttentionBackend, call: SeamCall, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Returns (error, bound) of the output or the gradient with the largest ratio of error to bound.

    An error is relative to the norm of the fp32 result. In low precision the bound is twice the error of
    `plain_attention` in the same dtype, in fp32 a constant."""
    query_lengths, key_lengths = zip(*_PROOF_SEGMENTS, strict=True)
    segments = make_segments(query_lengths, key_lengths, device)
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
    window = call.options.window
    options = replace(
        call.options,
        window=None if window is None else min(window, _PROOF_WINDOW),
        sinks=torch.randn(heads, device=device) if call.has_sinks else None,
    )

    def run(attention: AttentionBackend, dtype: torch.dtype) -> list[Tensor]:
        inputs = [states.to(dtype).requires_grad_() for states in exact]
        with torch.enable_grad():
            out = attention(*inputs, segments, options)
            grads = torch.autograd.grad(out, inputs, weights.to(out.dtype))
        return [result.detach().float() for result in (out, *grads)]

    reference = run(plain_attention, torch.float32)
    errors = relative_errors(run(backend, dtype), reference)
    bounds = [_FLOAT32_BOUND] * len(errors)
    if dtype != torch.float32:
        bounds = [2 * error for error in relative_errors(run(plain_attention, dtype), reference)]
    return worst(zip(errors, bounds, strict=True))


def relative_errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Returns, for each result, the norm of its error divided by the norm of `exact`; infinity for NaN."""
    ratios = [float((ours - right).norm() / right.norm()) for ours, right in zip(results, exact, strict=True)]
    return [math.inf if math.isnan(ratio) else ratio for ratio in ratios]


def worst(measured: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns the (error, bound) with the largest ratio of error to bound."""
    return max(measured, key=lambda pair: pair[0] / pair[1])


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """Attention by definition, in the dtype of its inputs; only softmax is in fp32, as in eager attention."""
    device, groups = query.device, query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # In each segment the last query is at the last key, and a query sees `window` keys up to itself.
    visible = [
        torch.ones(q, k, device=device).tril(k - q).triu(k - q - (options.window or k) + 1)
        for q, k in zip(segments.query_lengths, segments.key_lengths, strict=True)
    ]
    scores = scores.masked_fill(torch.block_diag(*visible) == 0, float("-inf"))
    if options.sinks is not None:
        column = options.sinks.to(scores.dtype)[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : len(key)].to(value.dtype)
    return torch.einsum("hqk,khd->qhd", weights, value)
