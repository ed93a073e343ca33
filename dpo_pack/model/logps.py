"""Computes log-probs of completion tokens from hidden states, by chunk, so that no [N, V] tensor exists.

Legend: N scored completion tokens, D hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpo_pack.model.fast_layers import times_transposed


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """How a model computes logits with its head: `logits = cap(scale * (hidden @ weight.T + bias))`.

    `scale` is Cohere's `logit_scale` or the inverse of Granite's `logits_scaling`; `softcap` is Gemma 2's
    `cap(z) = softcap * tanh(z / softcap)`.
    """

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedStatistics:
    """Which of a token's first four statistics the head computes beside its log-prob; the others are NaN.
    Each of the two fields costs one more read of all logits. The fifth, always computed, is the variance of
    the log-prob's rounding in nats^2, see `ROUNDING`."""

    metrics: bool = True  # 0-2: entropy (nats), 1.0 if the target has the largest logit, mean logit
    squares: bool = False  # 3: log sum_v p(v)^2 (nats), the log of a sampled token's expected probability


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBounds:
    """Upper limits on how many logits are in memory at once."""

    chunk_tokens: int  # tokens of one chunk
    chunk_bytes: int  # size of a chunk's two [C, V] buffers; but a chunk has at least one token
    kept_bytes: int  # size of the [C, V] tensors of chunks that are kept for the backward pass


# Each chunk reads the head's whole weight, and in the backward pass reads and writes its gradient. If a chunk
# has few tokens, this takes longer than the products (on an H200, computed: below about 200 tokens). On a CPU
# chunks of more than 256 tokens are not faster (docs/dev/performance.md), and kept softmax weights save one
# of four products.
HEAD_BOUNDS = {
    "cpu": HeadBounds(chunk_tokens=256, chunk_bytes=256 * 2**20, kept_bytes=512 * 2**20),
    "cuda": HeadBounds(chunk_tokens=8192, chunk_bytes=2**30, kept_bytes=0),
}


# The standard deviation of the difference between two computations of a token's log-prob in other rows, in
# epsilons of the products' dtype x the largest logit: 16 bits round logits, fp32 rounds sums. Measured in
# docs/numerics.md, section Ties.
ROUNDING = {torch.float16: 0.5, torch.bfloat16: 0.5, torch.float32: 2.0, torch.float64: 2.0}
# Whether torch adds a product in low precision to an fp32 tensor: cuBLAS does.
_ADDS_TO_FLOAT32 = torch.version.hip is None
_ADDED_ROWS = 2048  # of a gradient, added at once: a few megabytes


def token_logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    transform: HeadTransform,
    compute_dtype: torch.dtype,
    bounds: HeadBounds,
    wanted: WantedStatistics,
    passes: HeadPasses,
) -> tuple[Tensor, Tensor]:
    """Computes the log-prob of each target under the head's softmax: hidden [N, D], weight [V, D], bias [V]
    or None, targets [N] int64 -> [N] fp32 log-probs, differentiable, and [N, 5] fp32 statistics, see
    `WantedStatistics`. Matrix products are in `compute_dtype` (autocast has no effect in an autograd
    Function's backward), the log-softmax in fp32 or float64. The backward pass computes a chunk's logits
    again, unless their part of the gradient was kept or the head is frozen."""
    vocabulary_bytes = weight.shape[0] * max(4, weight.element_size())
    # Compiled passes have two buffers in the products' dtype, and none in fp32.
    buffer_bytes = weight.shape[0] * compute_dtype.itemsize if passes.are_compiled else vocabulary_bytes
    chunk_tokens = max(1, min(bounds.chunk_tokens, bounds.chunk_bytes // (2 * buffer_bytes)))
    if not torch.is_grad_enabled():
        # An autograd Function cannot see that gradients are off, and would keep tensors for a backward pass.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    kept_chunks = bounds.kept_bytes // (chunk_tokens * vocabulary_bytes)
    plan = (transform, compute_dtype, chunk_tokens, kept_chunks, wanted, passes)
    compute: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogps.apply
    with torch.autocast(hidden.device.type, enabled=False):
        return compute(hidden, weight, bias, targets, plan)


def sequence_sums(token_values: Tensor, lengths: Tensor) -> Tensor:
    """Adds up each sequence's tokens: [N, ...] values, [S] lengths -> [S, ...] sums in float64, because a
    reward is a small difference of two large sums."""
    # `unsafe` skips a check of the lengths: the check would wait for the device.
    return torch.segment_reduce(token_values.double(), "sum", lengths=lengths, unsafe=True)


class _ChunkedLogps(torch.autograd.Function):
    """Computes log-probs and statistics chunk by chunk. The log-prob's gradient in the logits is `onehot -
    softmax`; what is kept of a chunk is `excess`, its negative."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: tuple[HeadTransform, torch.dtype, int, int, WantedStatistics, HeadPasses],
    ) -> tuple[Tensor, Tensor]:
        transform, dtype, chunk_tokens, kept_chunks, wanted, passes = plan
        trains_head = any(ctx.needs_input_grad[1:3])
        if trains_head:
            ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.hidden_dtype, ctx.plan = hidden.dtype, plan
        hidden, head_weight = hidden.to(dtype), weight.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        # `logps` must not be a view of another tensor, because FSDP2 puts its backward hook on it.
        logps = torch.empty(len(targets), dtype=wide, device=hidden.device)
        log_normalizer, statistics = torch.empty_like(logps), logps.new_full((len(targets), 5), torch.nan)
        # d logp / d hidden. When the head is frozen, the backward pass needs no other tensor.
        direction = torch.empty_like(hidden) if ctx.needs_input_grad[0] and not trains_head else None
        kept: list[Tensor] = []
        for start in range(0, len(targets), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            keeps = trains_head and len(kept) < kept_chunks
            logps[chunk], log_normalizer[chunk], of_chunk, excess = passes.forward(
                times_transposed(hidden[chunk], head_weight),
                bias,
                targets[chunk],
                transform,
                wanted,
                excess_dtype=dtype if direction is not None else wide if keeps else None,
            )
            for column, values in enumerate(of_chunk):
                if values is not None:
                    statistics[chunk, column] = values
            if direction is not None and excess is not None:
                direction[chunk] = excess @ head_weight * -transform.scale
            elif excess is not None:
                kept.append(excess)
            del excess  # frees the chunk's buffer before the next chunk allocates its own
        ctx.kept, ctx.log_normalizer, ctx.direction = kept, log_normalizer, direction
        ctx.mark_non_differentiable(statistics)
        return logps, statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        transform, dtype, chunk_tokens, _, _, passes = ctx.plan
        if ctx.direction is not None:
            grad_hidden = ctx.direction * grad_logps[:, None].to(dtype)
            return grad_hidden.to(ctx.hidden_dtype), None, None, None, None
        hidden, weight, bias, targets = ctx.saved_tensors
        hidden, head_weight = hidden.to(dtype), weight.to(dtype)
        grad_hidden = torch.empty_like(hidden)
        # Gradients of chunks add up in fp32: in bf16 a sum over many chunks would lose its small terms.
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(dtype, torch.float32)
        begin = torch.empty_like if len(targets) else torch.zeros_like
        grad_weight = begin(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for number, start in enumerate(range(0, len(targets), chunk_tokens)):
            chunk = slice(start, start + chunk_tokens)
            factors = grad_logps[chunk, None] * -transform.scale  # [C, 1]
            if number < len(ctx.kept):
                grad_logits = (ctx.kept[number] * factors).to(dtype)
            else:
                grad_logits = passes.backward(
                    times_transposed(hidden[chunk], head_weight),
                    bias,
                    targets[chunk],
                    transform,
                    ctx.log_normalizer[chunk, None],
                    factors,
                )
            grad_hidden[chunk] = times_transposed(grad_logits, head_weight.T)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0, dtype=wide)
            beta = min(number, 1)  # the first chunk overwrites
            if grad_weight is not None and wide == dtype:
                grad_weight.addmm_(grad_logits.T, hidden[chunk], beta=beta)
            elif grad_weight is not None and _ADDS_TO_FLOAT32 and grad_weight.device.type == "cuda":
                # One kernel, which also does not round the chunk's gradient.
                product = grad_logits.T, hidden[chunk]
                torch.addmm(grad_weight, *product, out_dtype=wide, beta=beta, out=grad_weight)
            elif grad_weight is not None:
                # In blocks, because torch copies what it adds in another dtype.
                parts = (grad_logits.T @ hidden[chunk]).split(_ADDED_ROWS)
                for total, part in zip(grad_weight.split(_ADDED_ROWS), parts, strict=True):
                    total.add_(part) if number else total.copy_(part)
            del grad_logits
        return (
            grad_hidden.to(ctx.hidden_dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


ChunkResults = tuple[Tensor, Tensor, tuple[Tensor | None, ...], Tensor | None]


def _chunk_forward(
    product: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: HeadTransform,
    wanted: WantedStatistics,
    *,
    excess_dtype: torch.dtype | None,
) -> ChunkResults:
    """Returns log-probs, log-normalizers, five statistics, [C] each, and, if `excess_dtype` is given,
    `_excess`, [C, V]. product: [C, V] = hidden states x head; may be overwritten."""
    dtype = product.dtype
    logits, slope = _logits(product, bias, transform)
    del product  # frees memory in low precision, where the logits are a copy
    target_logit = logits.gather(1, targets[:, None]).squeeze(1)
    peak = logits.amax(dim=1)
    entropy = is_top1 = log_sum_squares = excess = None
    mean_logit = logits.mean(dim=1) if wanted.metrics else None
    centered = logits.sub_(peak[:, None])
    softmax = centered.exp() if wanted.metrics else centered.exp_()
    total = softmax.sum(dim=1)
    log_normalizer = peak + total.log()
    # Rounding is relative to the largest logit and, in fp32 as log-probs are, to the normalizer.
    wide = ROUNDING[logits.dtype] * torch.finfo(logits.dtype).eps * log_normalizer
    narrow = ROUNDING[dtype] * torch.finfo(dtype).eps * torch.maximum(peak.abs(), target_logit.abs())
    variance = wide.square() + narrow.square()
    if wanted.metrics:
        entropy = total.log() - centered.mul_(softmax).sum(dim=1) / total
        is_top1 = (target_logit >= peak).to(total.dtype)
    if wanted.squares:
        log_sum_squares = (torch.linalg.vecdot(softmax, softmax) / total.square()).log()
    del logits, centered
    if excess_dtype is not None:
        excess = _excess(softmax.div_(total[:, None]), targets, slope).to(excess_dtype)
    statistics = (entropy, is_top1, mean_logit, log_sum_squares, variance)
    return target_logit - log_normalizer, log_normalizer, statistics, excess


def _chunk_backward(
    product: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: HeadTransform,
    log_normalizer: Tensor,
    factors: Tensor,
) -> Tensor:
    """Returns `_excess` x factors, [C, V], in the dtype of products. log_normalizer, factors: [C, 1]."""
    dtype = product.dtype
    logits, slope = _logits(product, bias, transform)
    del product
    return _excess(logits.sub_(log_normalizer).exp_(), targets, slope).mul_(factors).to(dtype)


def _logits(product: Tensor, bias: Tensor | None, transform: HeadTransform) -> tuple[Tensor, Tensor | None]:
    """Returns logits [C, V] in fp32 or float64, and the softcap's derivative [C, V] (None: no softcap)."""
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    if bias is not None:
        logits += bias
    if transform.scale != 1.0:
        logits *= transform.scale
    if transform.softcap is None:
        return logits, None
    bent = logits.div_(transform.softcap).tanh_()
    slope = 1 - bent.square()
    return bent.mul_(transform.softcap), slope


def _excess(softmax: Tensor, targets: Tensor, slope: Tensor | None) -> Tensor:
    """Returns `(softmax - onehot) * slope`, [C, V], of softmax [C, V] (overwritten), [C] targets."""
    if torch.compiler.is_compiling():  # here `scatter_` would read the logits once more
        is_target = torch.arange(softmax.shape[1], device=softmax.device) == targets[:, None]
        softmax = torch.where(is_target, softmax - 1, softmax)
    else:
        softmax.scatter_(1, targets[:, None], -1.0, reduce="add")
    return softmax if slope is None else softmax.mul_(slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPasses:
    """What is computed of a chunk of logits between two matrix products."""

    forward: Callable[..., ChunkResults] = _chunk_forward
    backward: Callable[..., Tensor] = _chunk_backward
    are_compiled: bool = False


def compile_head(*, backend: str | Callable[..., Any] = "inductor", falls_back: bool = False) -> HeadPasses:
    """Compiles `HeadPasses`, which then read a chunk's logits only twice forward and once backward.

    `falls_back` is that of `compile_layers`.
    """
    compiled = functools.partial(torch.compile, backend=backend, fullgraph=not falls_back)
    passes = {"forward": compiled(_chunk_forward), "backward": compiled(_chunk_backward)}
    return HeadPasses(**passes, are_compiled=True)
