"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import functools
import math

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler


def adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> AdamW:
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101) in one fused kernel a step.

    Vectors (biases, norm weights) are not decayed: they have no scale to keep small.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)


def learning_rate_schedule(
    optimizer: Optimizer, name: str, *, num_steps: int, warmup_steps: int, min_lr_ratio: float
) -> LRScheduler:
    """transformers' schedules by name. In warm-up, step i of w has lr x (i - 1) / w: the first has 0.

    `min_lr_ratio` is the learning rate at the end as a part of the peak, for linear and cosine.
    """
    if min_lr_ratio > 0.0 and name == "linear":
        share = functools.partial(
            _linear_share, num_steps=num_steps, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio
        )
        return LambdaLR(optimizer, share)
    if min_lr_ratio > 0.0:
        name, options = "cosine_with_min_lr", {"min_lr_rate": min_lr_ratio}
    else:
        options = None
    scheduler: LRScheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=options,
    )
    return scheduler


def num_warmup_steps(num_steps: int, *, warmup_ratio: float, warmup_steps: int | None) -> int:
    """A number of steps, 0 included, replaces the ratio, which rounds up as transformers does."""
    return math.ceil(warmup_ratio * num_steps) if warmup_steps is None else warmup_steps


def _linear_share(step: int, *, num_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    if step < warmup_steps:
        return step / warmup_steps
    remaining = max(0.0, (num_steps - step) / max(1, num_steps - warmup_steps))
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining
