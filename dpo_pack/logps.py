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
from dpo_pack.head_logits import Asked, HeadPasses, HeadTransform, logit_grad, softmax_dtype


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
# On an H200 the gradient takes as long as the products with about 200 tokens (computed: 12 bytes a weight at
# 4 TB/s, 8 FLOPs a weight and token at 500 TFLOP/s); the bound leaves 882 at a vocabulary of 152,064.
HEAD_BOUNDS = {
    "cpu": HeadBounds(chunk_tokens=256, chunk_bytes=256 * 2**20, kept_bytes=512 * 2**20),
    "cuda": HeadBounds(chunk_tokens=8192, chunk_bytes=2**30, kept_bytes=0),
}


class TokenStatistics(NamedTuple):
    """What one pass over the logits yields besides the log-probs; detached, fp32, [N] each.

    NaN where it was not asked for.
    """

    entropy: Tensor  # nats
    is_top1: Tensor  # 1.0 where the target has the largest logit
    mean_logit: Tensor  # over the vocabulary
    log_sum_squares: Tensor  # log sum_v p(v)^2, nats: the expected probability of a sampled token


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
    passes: HeadPasses | None = None,
) -> tuple[Tensor, TokenStatistics]:
    """Log-prob of each target under the head's softmax.

    hidden [N, D], weight [V, D], bias [V] or None, targets [N] int64 -> ([N] fp32 log-probs, statistics).
    Differentiable in hidden, weight and bias. Matrix products are in `compute_dtype` (autocast does not
    reach into an autograd Function's backward, so the dtype is spelled out), the log-softmax in fp32
    (float64 for float64 products). `asked` says which statistics are wanted; `passes` are the functions
    between the products, None: as they are in head_logits.py.

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
            hidden,
            weight,
            bias,
            targets,
            transform,
            compute_dtype,
            chunk_tokens,
            kept_chunks,
            asked,
            passes or HeadPasses(),
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
        passes: HeadPasses,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        trains_head = needs_weight or needs_bias
        if trains_head:
            ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.hidden_dtype, ctx.dtype = hidden.dtype, dtype
        hidden, head_weight = hidden.to(dtype), weight.to(dtype)
        num_tokens = len(targets)
        # Memory of its own: what hooks sharding into the backward pass must not be a view.
        logps = torch.empty(num_tokens, dtype=softmax_dtype(dtype), device=hidden.device)
        statistics = logps.new_full((4, num_tokens), torch.nan)
        log_normalizer = torch.empty_like(logps)
        # d logp / d hidden, all that a frozen head leaves to know.
        direction = torch.empty_like(hidden) if needs_hidden and not trains_head else None
        kept: list[tuple[Tensor, Tensor | None]] = []
        for number, chunk in enumerate(_chunks(num_tokens, chunk_tokens)):
            keeps = trains_head and number < kept_chunks
            said = passes.forward(
                times_transposed(hidden[chunk], head_weight),
                bias,
                targets[chunk],
                transform,
                asked,
                wants_softmax=keeps,
                wants_gradient=direction is not None,
            )
            logps[chunk], log_normalizer[chunk] = said.logps, said.log_normalizer
            for values, of_chunk in zip(statistics, said.statistics, strict=True):
                if of_chunk is not None:
                    values[chunk] = of_chunk
            if direction is not None:
                assert said.gradient is not None
                direction[chunk] = said.gradient @ head_weight * transform.scale
            elif keeps:
                assert said.softmax is not None
                kept.append((said.softmax, said.slope))
            del said  # before there is another chunk's
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
        wide = softmax_dtype(ctx.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Chunks add up in fp32: in bf16 the sum over many chunks would lose its small terms.
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for number, chunk in enumerate(_chunks(len(targets), ctx.chunk_tokens)):
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
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[chunk]
            del grad_logits
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.hidden_dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 7,
        )


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]
