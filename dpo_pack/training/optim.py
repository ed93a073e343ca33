"""Optimizers by name, the learning-rate schedule, clipping, and the guard against values that are not finite.

The guard keeps losses and gradients that are not finite away from the parameters, without waiting for the
device: a fused optimizer takes a flag on the device (`found_inf`, which torch made for gradient scalers). If
it is 1, the kernel changes no bit of parameters, moments and step counts. The host reads the flag when it
next logs, evaluates or saves.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from dpo_pack.data.store import PairTable
from dpo_pack.packing.lengths import IntArray
from dpo_pack.system import ranks
from dpo_pack.system.errors import RecipeError
from dpo_pack.system.files import write_json_atomically
from dpo_pack.system.ranks import gather_over_ranks, sum_over_ranks
from dpo_pack.training.split_adamw import SplitAdamW

# Biases and norms by their paths, in lower case: the patterns of transformers' Trainer. Its functions are not
# called here: their modules import peft, and with it torch's compiler, seconds of each start.
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.|_)norm(?:$|\.)")


def build_optimizer(
    name: str, model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Optimizer:
    """Builds the optimizer that a recipe's `optim.name` names. adamw (Loshchilov & Hutter 2017, arXiv
    1711.05101) computes in fp32 for any dtype. adamw_8bit has moments of 8 bits (Dettmers et al. 2021, arXiv
    2110.02861). adafactor (Shazeer & Stern 2018, arXiv 1804.04235) ignores `betas` and `eps`; its rate is
    absolute, as in transformers' Trainer. Raises RecipeError if these two would train bfloat16 parameters."""
    # As in transformers' Trainer, names and kinds of modules count too: gpt_oss's experts have matrices of
    # biases, and Cohere's query and key norms have a row for each head.
    norms = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    matrices: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    vectors: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_vector = parameter.ndim < 2 or path.startswith(norms) or _NOT_DECAYED.search(path.lower())
            (vectors if is_vector else matrices)["params"].append(parameter)
    groups = [group for group in (matrices, vectors) if group["params"]]
    trains_bfloat16 = any(weight.dtype == torch.bfloat16 for group in groups for weight in group["params"])
    if name == "adamw" and trains_bfloat16:
        return SplitAdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    if name == "adamw":
        return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    if trains_bfloat16:
        raise RecipeError(
            f"optim.name: {name} keeps no fp32 master weights, so updates of parameters in bfloat16 would "
            "round away; set optim.name: adamw or model.dtype: float32"
        )
    if name == "adafactor":  # each group has its `weight_decay`
        from transformers import Adafactor

        return Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False)
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


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scales gradients down to the L2 norm `max_norm` if their norm is larger; returns the earlier norm, [],
    over all shards and in fp32. The host does not wait."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = torch._foreach_norm(grads, 2.0, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(list(norms)))
    nn.utils.clip_grads_with_norm_(model.parameters(), math.inf if max_norm is None else max_norm, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def rate_factor(step: int, *, name: str, num_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Returns the rate of the schedule `name` after `step` steps, as a part of lr, by the formulas of
    transformers' get_scheduler. Step i of w warm-up steps has the rate lr x (i - 1) / w. `linear`,
    `polynomial` and `cosine` end at lr x `min_lr_ratio`."""
    if step < warmup_steps and name != "constant":
        return step / warmup_steps
    if name in ("constant", "constant_with_warmup"):
        return 1.0
    if name == "inverse_sqrt":
        timescale = warmup_steps or 10_000
        return math.sqrt(timescale / (step - warmup_steps + timescale))
    left = max(0, num_steps - step) / max(1, num_steps - warmup_steps)
    if name == "cosine":
        left = (1 + math.cos(math.pi * (1 - left))) / 2
    return left * (1 - min_lr_ratio) + min_lr_ratio


def schedule_warnings(optimizer: Optimizer, *, lr: float, num_steps: int, warmup_steps: int) -> Iterator[str]:
    """Yields a sentence if the rate never reaches `lr`, or is too small for any weight to change."""
    peak = lr
    if num_steps and warmup_steps >= num_steps:
        peak = lr * (num_steps - 1) / warmup_steps
        moves = "no weight changes" if num_steps == 1 else f"the rate only gets to {peak:.3g}"
        steps = "the only step is" if num_steps == 1 else f"all {num_steps:,} steps are"
        yield (
            f"Warning: {steps} warm-up, which begins at the rate 0, so {moves} "
            f"(optim.lr is {lr:g}); set a smaller optim.warmup_steps, such as 0"
        )
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    # A fp32 weight w cannot change by less than about w x 2^-25. An optimizer's step is about the rate.
    if 0.0 < peak < 2**-25 and all(bool((weight.abs() > peak * 2**25).all()) for weight in weights):
        yield (
            f"Warning: the largest rate, {peak:.3g}, is too small to change any weight in float32; raise "
            "optim.lr"
        )


@dataclass(slots=True, kw_only=True)
class NonfiniteGuard:
    """Skips the update of a step that is not finite, and reports such steps later. With `stops` it also skips
    all later updates, until the host reads of the first such step."""

    stops: bool
    _has_skipped: Tensor | None = None  # [] float32, whether the newest step was skipped; None: no step yet
    # Of each step until the host reads it: its number, whether it is not finite ([] float32, 0 or 1), the
    # norm of its gradient, and this rank's pairs with their losses.
    _unread: list[tuple[int, Tensor, Tensor, IntArray, Tensor]] = field(default_factory=list)

    def skip_if_nonfinite(
        self, optimizer: Optimizer, losses: Tensor, grad_norm: Tensor, *, step: int, pairs: IntArray
    ) -> None:
        """Makes the next `optimizer.step()` change nothing if a loss or gradient of `step` is not finite.

        losses: [P] of this rank's pairs, which are `pairs` of the source's table. Waits for the device only
        if the optimizer is not fused."""
        # Gradients may be offloaded to the CPU; their norm is then on the CPU too.
        is_finite = torch.isfinite(losses.sum()) & torch.isfinite(grad_norm).to(losses.device)
        # All ranks must update, or all must skip.
        must_skip = sum_over_ranks((~is_finite).float()).clamp(max=1)
        self._unread.append((step, must_skip, grad_norm, pairs, losses))
        if self.stops and self._has_skipped is not None:
            must_skip = torch.maximum(self._has_skipped, must_skip)
        self._has_skipped = must_skip
        if all(group.get("fused") for group in optimizer.param_groups):
            device = optimizer.param_groups[0]["params"][0].device
            optimizer.found_inf = must_skip.to(device)  # type: ignore[attr-defined]
        elif bool(must_skip):
            optimizer.zero_grad(set_to_none=True)  # without gradients a step changes nothing

    def report(self, directory: Path, table: PairTable, source_names: Sequence[str]) -> Iterator[str]:
        """Yields a sentence for each non-finite step since the previous call; lists its pairs in `directory`,
        those whose own loss is not finite first. Waits for the device; every rank must call it."""
        unread, self._unread = self._unread, []
        flags = torch.stack([is_nonfinite for _, is_nonfinite, *_ in unread]).tolist() if unread else []
        for step, _, norm, own_pairs, own_losses in itertools.compress(unread, flags):
            pairs = gather_over_ranks(torch.from_numpy(own_pairs).to(own_losses.device)).cpu().numpy()
            losses = gather_over_ranks(own_losses).cpu().numpy()
            order, rows = np.lexsort((pairs, np.isfinite(losses))), table.row_numbers[pairs]
            listed = [
                {
                    "source": source_names[table.source_indices[pairs[n]]],
                    "row": int(rows[n]),
                    "pair": int(pairs[n]),
                    "loss": _json_number(losses[n]),
                }
                for n in order
            ]
            path = directory / f"nonfinite-step-{step:06d}.json"
            content = {"step": step, "grad_norm": _json_number(norm), "pairs": listed}
            if ranks.is_first():
                write_json_atomically(path, content)
            yield (
                f"step {step}: loss or gradient is not finite, and no update was made; lower optim.lr, "
                f"or look at its rows of data.train ({', '.join(map(str, np.sort(rows)[:10]))}"
                f"{', ...' if len(rows) > 10 else ''}), listed in {path}"
            )


def _json_number(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)
