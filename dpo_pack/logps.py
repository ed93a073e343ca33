"""Hidden states -> log-probs of completion tokens, through the output head in chunks, never [N, V] at once.

Legend: N scored completion tokens, D hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpo_pack.cpu_products import times_transposed


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBounds:
    """How much of the logits exists at a time."""

    chunk_tokens: int  # of a chunk at most
    chunk_bytes: int  # of a chunk at most, unless it is one token: two [C, V] buffers in fp32
    kept_bytes: int  # of softmax weights kept for the backward pass instead of being computed again

    def tokens_in_chunk(self, vocabulary_bytes: int) -> int:
        """C, for the bytes of one token's logits."""
        return max(1, min(self.chunk_tokens, self.chunk_bytes // (2 * vocabulary_bytes)))


# A chunk reads the whole head and, in the backward pass, reads and writes its gradient: with few tokens that
# takes longer than the products. On a CPU more than 256 tokens gain nothing and leave the caches
# (`scripts/measure_settings.py head-chunks`). What is kept there saves the fourth of the head's products.
HEAD_BOUNDS = {
    "cpu": HeadBounds(chunk_tokens=256, chunk_bytes=256 * 2**20, kept_bytes=512 * 2**20),
    "cuda": HeadBounds(chunk_tokens=8192, chunk_bytes=256 * 2**20, kept_bytes=0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which statistics a pass over the logits takes along. Each is another reading of all of them."""

    metrics: bool = True  # entropy, is_top1, mean_logit
    squares: bool = False  # log_sum_squares


class TokenStatistics(NamedTuple):
    """What one pass over the logits yields besides the log-probs; detached, fp32, [N] each.

    NaN where it was not asked for.
    """

    entropy: Tensor  # nats
    is_top1: Tensor  # 1.0 where the target has the largest logit
    mean_logit: Tensor  # over the vocabulary
    log_sum_squares: Tensor  # log sum_v p(v)^2, nats: the expected probability of a sampled token


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """What a model does to its head's output: `logits = cap(scale * (hidden @ weight.T + bias))`.

    `scale` is Cohere's `logit_scale` or the inverse of Granite's `logits_scaling`; `softcap` is Gemma 2's
    `cap(z) = softcap * tanh(z / softcap)`.
    """

    scale: float = 1.0
    softcap: float | None = None


def token_logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    transform: HeadTransform,
    compute_dtype: torch.dtype,
    bounds: HeadBounds,
    asked: Asked,
) -> tuple[Tensor, TokenStatistics]:
    """Log-prob of each target under the head's softmax.

    hidden [N, D], weight [V, D], bias [V] or None, targets [N] int64 -> ([N] fp32 log-probs, statistics).
    Differentiable in hidden, weight and bias. Matrix products are in `compute_dtype` (autocast does not
    reach into an autograd Function's backward, so the dtype is spelled out), the log-softmax in fp32
    (float64 for float64 products). `asked` says which statistics are wanted.

    Per-token log-probs come out, so autograd delivers each token's weight and any loss can follow. The
    backward pass recomputes a chunk's logits unless its softmax was kept; when the head is frozen nothing
    is recomputed at all.
    """
    vocabulary_bytes = weight.shape[0] * max(4, weight.element_size())
    chunk_tokens = bounds.tokens_in_chunk(vocabulary_bytes)
    if not torch.is_grad_enabled():
        # An autograd Function cannot tell: it would keep what only a backward pass needs.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    # A softcap's derivative is kept beside the softmax.
    buffers_per_chunk = 1 if transform.softcap is None else 2
    kept_chunks = bounds.kept_bytes // (chunk_tokens * vocabulary_bytes * buffers_per_chunk)
    with torch.autocast(hidden.device.type, enabled=False):
        logps, *statistics = _ChunkedLogps.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, transform, compute_dtype, chunk_tokens, kept_chunks, asked
        )
    return logps, TokenStatistics(*statistics)


def sequence_sums(token_values: Tensor, lengths: Tensor) -> Tensor:
    """[N] per-token values lying sequence by sequence, [S] lengths -> [S] sums in float64.

    float64, because a reward is a small difference of two large sums.
    """
    # `unsafe` skips a check of the lengths that would wait for the device.
    return torch.segment_reduce(token_values.double(), "sum", lengths=lengths, unsafe=True)


class _ChunkedLogps(torch.autograd.Function):
    """Per chunk: logits, their softmax and what is asked of them; the gradient by `onehot - softmax`."""

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
        asked: Asked,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        trains_head = needs_weight or needs_bias
        if trains_head:
            ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.hidden_dtype, ctx.dtype = hidden.dtype, dtype
        hidden, head_weight = hidden.to(dtype), weight.to(dtype)
        num_tokens = len(targets)
        # Memory of its own: what hooks sharding into the backward pass must not be a view.
        logps = torch.empty(num_tokens, dtype=_softmax_dtype(hidden), device=hidden.device)
        entropy, is_top1, mean_logit, log_sum_squares, log_normalizer = logps.new_full(
            (5, num_tokens), torch.nan
        ).unbind()
        # d logp / d hidden, all that a frozen head leaves to know.
        direction = torch.empty_like(hidden) if needs_hidden and not trains_head else None
        kept: list[tuple[Tensor, Tensor | None]] = []
        for number, chunk in enumerate(_chunks(num_tokens, chunk_tokens)):
            logits, slope = _head(hidden[chunk], head_weight, bias, transform)
            target_logit = logits.gather(1, targets[chunk, None]).squeeze(1)
            if asked.metrics:
                mean_logit[chunk] = logits.mean(dim=1)
            peak = logits.amax(dim=1)
            centered = logits.sub_(peak[:, None])
            softmax = centered.exp() if asked.metrics else centered.exp_()
            total = softmax.sum(dim=1)
            log_normalizer[chunk] = peak + total.log()
            logps[chunk] = target_logit - log_normalizer[chunk]
            if asked.metrics:
                entropy[chunk] = total.log() - centered.mul_(softmax).sum(dim=1) / total
                is_top1[chunk] = target_logit >= peak
            if asked.squares:
                log_sum_squares[chunk] = (torch.linalg.vecdot(softmax, softmax) / total.square()).log()
            if direction is not None:
                one = torch.ones_like(total)
                grad_logits = _logit_grad(softmax.div_(total[:, None]), targets[chunk], one, slope)
                direction[chunk] = grad_logits.to(dtype) @ head_weight * transform.scale
            elif trains_head and number < kept_chunks:
                kept.append((softmax.div_(total[:, None]), slope))
        ctx.transform, ctx.chunk_tokens, ctx.trains_head = transform, chunk_tokens, trains_head
        ctx.kept, ctx.log_normalizer, ctx.direction = kept, log_normalizer, direction
        ctx.mark_non_differentiable(entropy, is_top1, mean_logit, log_sum_squares)
        return logps, entropy, is_top1, mean_logit, log_sum_squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logps = grads[0]
        if not ctx.trains_head:
            grad_direction = ctx.direction * grad_logps[:, None].to(ctx.dtype)
            return (grad_direction.to(ctx.hidden_dtype), *[None] * 8)
        hidden, weight, bias, targets = ctx.saved_tensors
        hidden, head_weight = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        log_normalizer: Tensor = ctx.log_normalizer
        transform: HeadTransform = ctx.transform
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = _softmax_dtype(hidden)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Chunks add up in fp32: in bf16 the sum over many chunks would lose its small terms.
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for number, chunk in enumerate(_chunks(len(targets), ctx.chunk_tokens)):
            if number < len(ctx.kept):
                softmax, slope = ctx.kept[number]
            else:
                logits, slope = _head(hidden[chunk], head_weight, bias, transform)
                softmax = logits.sub_(log_normalizer[chunk, None]).exp_()
            grad_logits = _logit_grad(softmax, targets[chunk], grad_logps[chunk] * transform.scale, slope)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = times_transposed(grad_logits, head_weight.T)
            if grad_weight is not None and wide == ctx.dtype:
                grad_weight.addmm_(grad_logits.T, hidden[chunk])
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[chunk]
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.hidden_dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 6,
        )


def _head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: HeadTransform
) -> tuple[Tensor, Tensor | None]:
    """[C, D] -> logits [C, V] in fp32 or wider, and the softcap's derivative [C, V] where it has one."""
    logits = times_transposed(hidden, weight).to(_softmax_dtype(hidden))
    if bias is not None:
        logits += bias
    if transform.scale != 1.0:
        logits *= transform.scale
    if transform.softcap is None:
        return logits, None
    bent = logits.div_(transform.softcap).tanh_()
    slope = 1 - bent.square()
    return bent.mul_(transform.softcap), slope


def _logit_grad(softmax: Tensor, targets: Tensor, grad_logps: Tensor, slope: Tensor | None) -> Tensor:
    """`g * (onehot - softmax) * slope`: [C, V], [C], [C], [C, V] -> [C, V]."""
    grad = softmax * -grad_logps[:, None]
    grad.scatter_add_(1, targets[:, None], grad_logps[:, None])
    return grad if slope is None else grad.mul_(slope)


def _softmax_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]
