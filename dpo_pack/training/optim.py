"""Optimizers by name, and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from dpo_pack.recipe.load import NO_MASTER_WEIGHTS
from dpo_pack.system.errors import RecipeError
from dpo_pack.training.split_adamw import SplitAdamW

# Biases and norms by their names, in lower case: the patterns of transformers' Trainer.
_NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Optimizer:
    """Builds the optimizer that a recipe's `optim.name` names, for the parameters that are trained.

    adamw (Loshchilov & Hutter 2017, arXiv 1711.05101) computes in fp32 for any dtype. adamw_8bit is AdamW
    whose moments have 8 bits each (Dettmers et al. 2021, arXiv 2110.02861). adafactor (Shazeer & Stern 2018,
    arXiv 1804.04235) has no first moments, and only row and column means of second moments; its update is
    `lr` times the tensor's root mean square, at least `lr` x 1e-3; it ignores `betas` and `eps`. Raises
    RecipeError if adamw_8bit or adafactor would train bfloat16 parameters.
    """
    groups = _groups(model, weight_decay)
    trains_bfloat16 = any(
        parameter.dtype == torch.bfloat16 for group in groups for parameter in group["params"]
    )
    if name == "adamw":
        if trains_bfloat16:
            return SplitAdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    if trains_bfloat16:
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
            f"optim.name: adamw_8bit needs a CUDA device, and this run computes on {device.type}; "
            "set optim.name: adamw"
        )


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the trained parameters in two groups: with weight decay, and (biases, norms, vectors) without.

    The number of dimensions does not show all biases and norms: gpt_oss's experts have matrices of biases,
    and Cohere's query and key norms have a row for each head. So names and kinds of modules count too, as in
    transformers' Trainer. An adapter or shards do not change these parts of a parameter's name.
    """
    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(_NOT_DECAYED)))
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and name in decayed
            groups[0 if decays else 1]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scales gradients down to the L2 norm `max_norm` if their norm is larger; returns the earlier norm, [].

    The host does not wait. For sharded parameters, the norm is over all shards. The norm of bfloat16
    gradients is computed in fp32, because torch would compute it in bfloat16, which has three digits.
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
    """Returns transformers' schedule `name`. Step i of w warm-up steps has the rate lr x (i - 1) / w.

    `min_lr_ratio`, for `linear` and `cosine`: the final learning rate divided by the largest.
    """

    def linear(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        remaining = max(0.0, (num_steps - step) / max(1, num_steps - warmup_steps))
        return min_lr_ratio + (1.0 - min_lr_ratio) * remaining

    options = None
    if min_lr_ratio > 0.0:
        if name == "linear":  # transformers has no linear schedule that ends above 0
            return LambdaLR(optimizer, linear)
        name, options = "cosine_with_min_lr", {"min_lr_rate": min_lr_ratio}
    scheduler: LRScheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=options,
    )
    return scheduler


def num_warmup_steps(num_steps: int, *, warmup_ratio: float, warmup_steps: int | None) -> int:
    """Returns `warmup_steps` if it is given, even 0; else `warmup_ratio` times all steps, rounded up."""
    return math.ceil(warmup_ratio * num_steps) if warmup_steps is None else warmup_steps
