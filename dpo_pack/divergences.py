"""f-divergences from the reference: what takes the place of a logratio in a loss, its score.

Wang et al. 2023 (arXiv 2309.16240), table 1. A policy held near the reference by the f-divergence has the
implicit reward beta * f'(pi / pi_ref), up to a part that depends on the prompt alone and cancels between
the completions of a pair. Each score is f' of the ratio t = exp(logratio), with the constant that makes it
zero at t = 1: a loss that divides scores by token counts would not cancel another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Where `_expm1` goes on as a line: far enough below float64's exp(709) for what losses do to a score.
_LINEAR_FROM = 600.0


def reverse_kl(logratio: Tensor, alpha: float) -> Tensor:
    """f(t) = t log t: DPO itself."""
    return logratio


def forward_kl(logratio: Tensor, alpha: float) -> Tensor:
    """f(t) = -log t, score 1 - 1 / t."""
    return -_expm1(-logratio)


def js_divergence(logratio: Tensor, alpha: float) -> Tensor:
    """f(t) = t log t - (t + 1) log((t + 1) / 2), score log(2 t / (1 + t))."""
    return math.log(2) + F.logsigmoid(logratio)


def alpha_divergence(logratio: Tensor, alpha: float) -> Tensor:
    """Score (t^(alpha - 1) - 1) / (alpha - 1) for 0 < alpha < 1, TRL's form; the paper's alpha is 1 - ours.

    Tends to reverse KL for alpha -> 1 and to forward KL for alpha -> 0.
    """
    return _expm1((alpha - 1) * logratio) / (alpha - 1)


def _expm1(exponent: Tensor) -> Tensor:
    """exp(exponent) - 1 for float64; beyond exp(600) its tangent, since exp itself soon overflows.

    The tangent keeps order and sign, so that a pair with a huge margin has the loss 0 and the slope 0 that
    belong to it, instead of 0 * inf. A pair that is as wrong has a gradient that float32 parameters cannot
    hold, and the step counts as not finite.
    """
    beyond = math.exp(_LINEAR_FROM) * F.relu(exponent - _LINEAR_FROM)
    return torch.expm1(exponent.clamp(max=_LINEAR_FROM)) + beyond


# Score of a logratio [P], nats, and alpha.
DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}
