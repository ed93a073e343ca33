"""What is done to a chunk's logits between the matrix products: log-softmax, statistics, gradient.

Legend: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which statistics a pass over the logits takes along. Each is another reading of all of them."""

    metrics: bool = True  # entropy, is_top1, mean_logit
    squares: bool = False  # log_sum_squares


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """What a model does to its head's output: `logits = cap(scale * (hidden @ weight.T + bias))`.

    `scale` is Cohere's `logit_scale` or the inverse of Granite's `logits_scaling`; `softcap` is Gemma 2's
    `cap(z) = softcap * tanh(z / softcap)`.
    """

    scale: float = 1.0
    softcap: float | None = None


class ChunkSays(NamedTuple):
    """What the logits of a chunk tell."""

    logps: Tensor  # [C]
    log_normalizer: Tensor  # [C]
    statistics: tuple[Tensor | None, ...]  # [C] each, in the order of TokenStatistics
    softmax: Tensor | None  # [C, V]
    slope: Tensor | None  # [C, V], a softcap's derivative
    gradient: Tensor | None  # [C, V] of the log-probs by the scaled logits, in the dtype of products


def _chunk_forward(
    product: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: HeadTransform,
    asked: Asked,
    *,
    wants_softmax: bool,
    wants_gradient: bool,
) -> ChunkSays:
    """From a chunk's product [C, V] of hidden states and head, which it may overwrite."""
    dtype = product.dtype
    logits, slope = _logits(product, bias, transform)
    del product  # in low precision the logits are a copy
    target_logit = logits.gather(1, targets[:, None]).squeeze(1)
    mean_logit = logits.mean(dim=1) if asked.metrics else None
    peak = logits.amax(dim=1)
    centered = logits.sub_(peak[:, None])
    softmax = centered.exp() if asked.metrics else centered.exp_()
    total = softmax.sum(dim=1)
    log_normalizer = peak + total.log()
    entropy = is_top1 = log_sum_squares = gradient = None
    if asked.metrics:
        entropy = total.log() - centered.mul_(softmax).sum(dim=1) / total
        is_top1 = (target_logit >= peak).to(total.dtype)
    if asked.squares:
        log_sum_squares = (torch.linalg.vecdot(softmax, softmax) / total.square()).log()
    del logits, centered
    if wants_softmax or wants_gradient:
        softmax = softmax.div_(total[:, None])
    if wants_gradient:
        gradient = logit_grad(softmax, targets, torch.ones_like(total), slope).to(dtype)
    return ChunkSays(
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
    """The gradient [C, V] of the logits in the dtype of products and, with `sums`, its sum over tokens, [V].

    `product` is that of the forward pass, computed again.
    """
    dtype = product.dtype
    logits, slope = _logits(product, bias, transform)
    del product
    softmax = logits.sub_(log_normalizer[:, None]).exp_()
    grad = logit_grad(softmax, targets, grad_logps, slope)
    del logits, softmax
    return grad.to(dtype), grad.sum(dim=0) if sums else None


def _logits(product: Tensor, bias: Tensor | None, transform: HeadTransform) -> tuple[Tensor, Tensor | None]:
    """[C, V] -> logits [C, V] in fp32 or wider, and the softcap's derivative [C, V] where it has one."""
    logits = product.to(softmax_dtype(product.dtype))
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
    """`g * (onehot - softmax) * slope`: [C, V], [C], [C], [C, V] -> [C, V]."""
    grad = softmax * -grad_logps[:, None]
    if torch.compiler.is_compiling():  # a scattered addition would be a pass of its own
        is_target = torch.arange(softmax.shape[1], device=softmax.device) == targets[:, None]
        grad = torch.where(is_target, grad + grad_logps[:, None], grad)
    else:
        grad.scatter_add_(1, targets[:, None], grad_logps[:, None])
    return grad if slope is None else grad.mul_(slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPasses:
    """What is done to a chunk's logits between the matrix products. Written for few buffers, not for few
    passes over them; `compiling.compile_head` gives functions that make fewer passes."""

    forward: Callable[..., ChunkSays] = _chunk_forward
    backward: Callable[..., tuple[Tensor, Tensor | None]] = _chunk_backward


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
