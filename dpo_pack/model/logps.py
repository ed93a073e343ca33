"""Computes log-probs of completion tokens from hidden states, by chunk, so that no [N, V] tensor exists.

Legend: N scored completion tokens, D hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """What the head computes beside the log-probs. Each reads all logits once more."""

    metrics: bool = True  # entropy, is_top1, mean_logit
    squares: bool = False  # log_sum_squares


class TokenStatistics(NamedTuple):
    """Statistics of each scored token's logits: [N] each, fp32, detached; NaN if not wanted."""

    entropy: Tensor  # nats
    is_top1: Tensor  # 1.0 where the target has the largest logit
    mean_logit: Tensor  # over the vocabulary
    log_sum_squares: Tensor  # log sum_v p(v)^2, nats: the log of the expected probability of a sampled token


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBounds:
    """Upper limits on how many logits are in memory at once."""

    chunk_tokens: int  # tokens of one chunk
    chunk_bytes: int  # size of a chunk's two [C, V] buffers; but a chunk has at least one token
    kept_bytes: int  # size of the softmax weights that we keep, so that the backward pass can reuse them


# Each chunk reads the head's whole weight, and in the backward pass reads and writes its gradient. If a chunk
# has few tokens, this takes longer than the products (on an H200, computed: below about 200 tokens). On a CPU
# chunks of more than 256 tokens are not faster (docs/dev/performance.md), and kept softmax weights save one
# of four products.
HEAD_BOUNDS = {
    "cpu": HeadBounds(chunk_tokens=256, chunk_bytes=256 * 2**20, kept_bytes=512 * 2**20),
    "cuda": HeadBounds(chunk_tokens=8192, chunk_bytes=2**30, kept_bytes=0),
}


# Whether torch adds a product in low precision to an fp32 tensor: cuBLAS does.
_ADDS_TO_FLOAT32 = torch.version.hip is None


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
    passes: HeadPasses | None = None,
) -> tuple[Tensor, TokenStatistics]:
    """Computes the log-prob of each target under the head's softmax.

    hidden [N, D], weight [V, D], bias [V] or None, targets [N] int64 -> ([N] fp32 log-probs, statistics).
    Differentiable in hidden, weight and bias. Matrix products are in `compute_dtype` (autocast has no effect
    in an autograd Function's backward), the log-softmax in fp32 or float64. The backward pass computes a
    chunk's logits again, unless its softmax was kept or the head is frozen."""
    passes = passes or HeadPasses()
    vocabulary_bytes = weight.shape[0] * max(4, weight.element_size())
    # Compiled passes have two buffers in the products' dtype, and none in fp32.
    buffer_bytes = weight.shape[0] * compute_dtype.itemsize if passes.are_compiled else vocabulary_bytes
    chunk_tokens = max(1, min(bounds.chunk_tokens, bounds.chunk_bytes // (2 * buffer_bytes)))
    if not torch.is_grad_enabled():
        # An autograd Function cannot see that gradients are off, and would keep tensors for a backward pass.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    # If the logits have a softcap, we keep the softcap's derivative beside the softmax.
    buffers_per_chunk = 1 if transform.softcap is None else 2
    kept_chunks = bounds.kept_bytes // (chunk_tokens * vocabulary_bytes * buffers_per_chunk)
    plan = (transform, compute_dtype, chunk_tokens, kept_chunks, wanted, passes)
    with torch.autocast(hidden.device.type, enabled=False):
        logps, *statistics = _ChunkedLogps.apply(hidden, weight, bias, targets, *plan)  # type: ignore[no-untyped-call]
    return logps, TokenStatistics(*statistics)


def sequence_sums(token_values: Tensor, lengths: Tensor) -> Tensor:
    """Adds up each sequence's tokens: [N, ...] values, [S] lengths -> [S, ...] sums in float64, because a
    reward is a small difference of two large sums."""
    # `unsafe` skips a check of the lengths: the check would wait for the device.
    return torch.segment_reduce(token_values.double(), "sum", lengths=lengths, unsafe=True)


class _ChunkedLogps(torch.autograd.Function):
    """Computes log-probs and wanted statistics chunk by chunk; the logits' gradient is `onehot - softmax`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: HeadTransform,
        dtype: torch.dtype,
        chunk_tokens: int,
        kept_chunks: int,
        wanted: WantedStatistics,
        passes: HeadPasses,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        trains_head = needs_weight or needs_bias
        if trains_head:
            ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.hidden_dtype, ctx.dtype = hidden.dtype, dtype
        hidden, head_weight = hidden.to(dtype), weight.to(dtype)
        num_tokens = len(targets)
        # `logps` must not be a view of another tensor, because FSDP2 puts its backward hook on it.
        logps = torch.empty(num_tokens, dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
        statistics = logps.new_full((4, num_tokens), torch.nan)
        log_normalizer = torch.empty_like(logps)
        # d logp / d hidden. When the head is frozen, the backward pass needs no other tensor.
        direction = torch.empty_like(hidden) if needs_hidden and not trains_head else None
        kept: list[tuple[Tensor, Tensor | None]] = []
        for number, start in enumerate(range(0, num_tokens, chunk_tokens)):
            chunk = slice(start, start + chunk_tokens)
            keeps = trains_head and number < kept_chunks
            result = passes.forward(
                times_transposed(hidden[chunk], head_weight),
                bias,
                targets[chunk],
                transform,
                wanted,
                wants_softmax=keeps,
                wants_gradient=direction is not None,
            )
            logps[chunk], log_normalizer[chunk] = result.logps, result.log_normalizer
            for values, of_chunk in zip(statistics, result.statistics, strict=True):
                if of_chunk is not None:
                    values[chunk] = of_chunk
            if direction is not None:
                assert result.gradient is not None
                direction[chunk] = result.gradient @ head_weight * transform.scale
            elif keeps:
                assert result.softmax is not None
                kept.append((result.softmax, result.slope))
            del result  # frees the chunk's buffers before the next chunk allocates its own
        ctx.transform, ctx.chunk_tokens, ctx.trains_head = transform, chunk_tokens, trains_head
        ctx.kept, ctx.log_normalizer, ctx.direction = kept, log_normalizer, direction
        ctx.passes = passes
        entropy, is_top1, mean_logit, log_sum_squares = statistics.unbind()
        ctx.mark_non_differentiable(entropy, is_top1, mean_logit, log_sum_squares)
        return logps, entropy, is_top1, mean_logit, log_sum_squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logps = grads[0]
        if not ctx.trains_head:
            grad_direction = ctx.direction * grad_logps[:, None].to(ctx.dtype)
            return (grad_direction.to(ctx.hidden_dtype), *[None] * 9)
        hidden, weight, bias, targets = ctx.saved_tensors
        hidden, head_weight = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        log_normalizer: Tensor = ctx.log_normalizer
        transform: HeadTransform = ctx.transform
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(ctx.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Gradients of chunks add up in fp32: in bf16 a sum over many chunks would lose its small terms.
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for number, start in enumerate(range(0, len(targets), ctx.chunk_tokens)):
            chunk = slice(start, start + ctx.chunk_tokens)
            grad = grad_logps[chunk] * transform.scale
            if number < len(ctx.kept):
                softmax, slope = ctx.kept[number]
                grad_logits = logit_grad(softmax, targets[chunk], grad, slope)
                bias_part = grad_logits.sum(dim=0) if grad_bias is not None else None
                grad_logits = grad_logits.to(ctx.dtype)
            else:
                grad_logits, bias_part = ctx.passes.backward(
                    times_transposed(hidden[chunk], head_weight),
                    bias,
                    targets[chunk],
                    transform,
                    log_normalizer[chunk],
                    grad,
                    sums=grad_bias is not None,
                )
            if grad_bias is not None and bias_part is not None:
                grad_bias += bias_part
            if grad_hidden is not None:
                grad_hidden[chunk] = times_transposed(grad_logits, head_weight.T)
            if grad_weight is not None and wide == ctx.dtype:
                grad_weight.addmm_(grad_logits.T, hidden[chunk])
            elif grad_weight is not None and _ADDS_TO_FLOAT32 and grad_weight.device.type == "cuda":
                # One kernel, which also does not round the chunk's gradient.
                factors = grad_logits.T, hidden[chunk]
                torch.addmm(grad_weight, *factors, out_dtype=wide, out=grad_weight)
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[chunk]
            del grad_logits
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.hidden_dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 7,
        )


class ChunkResult(NamedTuple):
    logps: Tensor  # [C]
    log_normalizer: Tensor  # [C]
    statistics: tuple[Tensor | None, ...]  # [C] each, in the order of TokenStatistics
    softmax: Tensor | None  # [C, V]
    slope: Tensor | None  # [C, V], a softcap's derivative
    gradient: Tensor | None  # [C, V]: d logp / d scaled logits, in the dtype of the products


def _chunk_forward(
    product: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: HeadTransform,
    wanted: WantedStatistics,
    *,
    wants_softmax: bool,
    wants_gradient: bool,
) -> ChunkResult:
    """Computes a chunk's results from `product` [C, V] = hidden states x head; may overwrite `product`."""
    dtype = product.dtype
    logits, slope = _logits(product, bias, transform)
    del product  # frees memory in low precision, where the logits are a copy
    target_logit = logits.gather(1, targets[:, None]).squeeze(1)
    mean_logit = logits.mean(dim=1) if wanted.metrics else None
    peak = logits.amax(dim=1)
    centered = logits.sub_(peak[:, None])
    softmax = centered.exp() if wanted.metrics else centered.exp_()
    total = softmax.sum(dim=1)
    log_normalizer = peak + total.log()
    entropy = is_top1 = log_sum_squares = gradient = None
    if wanted.metrics:
        entropy = total.log() - centered.mul_(softmax).sum(dim=1) / total
        is_top1 = (target_logit >= peak).to(total.dtype)
    if wanted.squares:
        log_sum_squares = (torch.linalg.vecdot(softmax, softmax) / total.square()).log()
    del logits, centered
    if wants_softmax or wants_gradient:
        softmax = softmax.div_(total[:, None])
    if wants_gradient:
        gradient = logit_grad(softmax, targets, torch.ones_like(total), slope).to(dtype)
    return ChunkResult(
        logps=target_logit - log_normalizer,
        log_normalizer=log_normalizer,
        statistics=(entropy, is_top1, mean_logit, log_sum_squares),
        softmax=softmax if wants_softmax else None,
        slope=slope if wants_softmax else None,
        gradient=gradient,
    )


def _chunk_backward(
    product: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: HeadTransform,
    log_normalizer: Tensor,
    grad_logps: Tensor,
    *,
    sums: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradient of logits [C, V], in the dtype of products, and if `sums`, its sum [V]."""
    dtype = product.dtype
    logits, slope = _logits(product, bias, transform)
    del product
    softmax = logits.sub_(log_normalizer[:, None]).exp_()
    grad = logit_grad(softmax, targets, grad_logps, slope)
    del logits, softmax
    return grad.to(dtype), grad.sum(dim=0) if sums else None


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


def logit_grad(softmax: Tensor, targets: Tensor, grad_logps: Tensor, slope: Tensor | None) -> Tensor:
    """Returns `grad_logps * (onehot - softmax) * slope`: [C, V], [C], [C], [C, V] -> [C, V]."""
    grad = softmax * -grad_logps[:, None]
    if torch.compiler.is_compiling():  # here `scatter_add_` would read the logits once more
        is_target = torch.arange(softmax.shape[1], device=softmax.device) == targets[:, None]
        grad = torch.where(is_target, grad + grad_logps[:, None], grad)
    else:
        grad.scatter_add_(1, targets[:, None], grad_logps[:, None])
    return grad if slope is None else grad.mul_(slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPasses:
    """What is computed of a chunk of logits between two matrix products."""

    forward: Callable[..., ChunkResult] = _chunk_forward
    backward: Callable[..., tuple[Tensor, Tensor | None]] = _chunk_backward
    are_compiled: bool = False


def compile_head(*, backend: str | Callable[..., Any] = "inductor", falls_back: bool = False) -> HeadPasses:
    """Compiles `HeadPasses`, which then read a chunk's logits only twice forward and once backward.

    `falls_back` is that of `compile_layers`.
    """
    compiled = functools.partial(torch.compile, backend=backend, fullgraph=not falls_back)
    passes = {"forward": compiled(_chunk_forward), "backward": compiled(_chunk_backward)}
    return HeadPasses(**passes, are_compiled=True)
