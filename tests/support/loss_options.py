"""Arguments of loss functions: options with the recipe's defaults, log-probs of pairs; a plain softplus."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import Any

import torch
from torch import Tensor

from dpo_pack.losses import preference
from dpo_pack.losses.preference import LossOptions, PairLogps
from dpo_pack.recipe.training import LossRecipe


def function(name: str) -> Callable[..., Tensor]:
    """The function of a loss."""
    found: Callable[..., Tensor] = getattr(preference, name)
    return found


Values = float | list[float] | Tensor


def loss_options(**given: Any) -> LossOptions:
    return LossOptions(**{**LossRecipe().options, **given})


def pair_logps(chosen: Values, rejected: Values, tokens: tuple[Any, Any] = (4, 2)) -> PairLogps:
    """One pair or several; `tokens`: of chosen and rejected completions, a number or one a pair."""
    sides = [torch.as_tensor(side, dtype=torch.float64).reshape(-1) for side in (chosen, rejected)]
    counts = [torch.as_tensor(count).expand(len(sides[0])) for count in tokens]
    return PairLogps(chosen=sides[0], rejected=sides[1], chosen_tokens=counts[0], rejected_tokens=counts[1])


def softplus(x: float) -> float:
    return log(1 + exp(x))
