"""Optimizers by name, and the learning-rate schedule."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from dpo_pack.errors import RecipeError
from dpo_pack.recipe_checks import NO_MASTER_WEIGHTS
from dpo_pack.split_adamw import SplitAdamW


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Optimizer:
    """A recipe's `optim.name` over the trained parameters; `check_optimizer` has let it pass.

    Parameters in bfloat16 are trained by adamw alone, in fp32. Raises RecipeError for another on such.
    `betas` and `eps` are AdamW's. adamw_8bit: its moments in blocks of 8 bits (Dettmers et al. 2021, arXiv
    2110.02861). adafactor (Shazeer & Stern 2018, arXiv 1804.04235): no first moments, of second ones row and
    column means; a step is `lr` times the tensor's root mean square, or times 1e-3 if that is more.
    """
    if name == "adamw":
        return adamw(model, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    groups = _groups(model, weight_decay)
    if _trains_bfloat16(groups):
        raise RecipeError(f"optim.name: {name} {NO_MASTER_WEIGHTS}")
    if name == "adafactor":
        return Adafactor(groups, lr=lr, weight_decay=weight_decay)
    assert name == "adamw_8bit"
    from bitsandbytes.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
    return optimizer


def check_optimizer(name: str, device: torch.device) -> None:
    """Raises RecipeError when a recipe's `optim.name` does not run on this device."""
    if name == "adamw_8bit" and device.type != "cuda":
        raise RecipeError(
            f"optim.name: adamw_8bit is bitsandbytes' kernel for CUDA devices, and this is {device.type}; "
            "set optim.name: adamw"
        )


def adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> AdamW | SplitAdamW:
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101) in fp32, whatever the type of the parameters.

    Vectors (biases, norm weights) are not decayed: they have no scale to keep small.
    """
    groups = _groups(model, weight_decay)
    if _trains_bfloat16(groups):
        return SplitAdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def _trains_bfloat16(groups: list[dict[str, Any]]) -> bool:
    return any(parameter.dtype == torch.bfloat16 for group in groups for parameter in group["params"])


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale gradients down to `max_norm`, if they are larger; returns their norm before, [].

    Waits for nothing on the host. Of sharded parameters the norm is that of the whole gradient, and of
    gradients in bfloat16 it is in fp32: torch's own would have three digits.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm(grads, 2.0, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(list(norms)))
    nn.utils.clip_grads_with_norm_(parameters, math.inf if max_norm is None else max_norm, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
