"""What a loss is: a pure function of the log-probs of pairs under policy and reference.

Legend: P pairs, of a row or of a whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLogps:
    """Summed completion log-probs of P pairs under one model, and how many tokens each sum has."""

    chosen: Tensor  # [P] float64, nats
    rejected: Tensor  # [P] float64, nats
    chosen_tokens: Tensor  # [P] int64
    rejected_tokens: Tensor  # [P] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What the loss functions take besides log-probs: keys of the recipe's `loss` section.

    `ld_alpha` and `weighting` are not among them: they are applied around the functions.
    """

    beta: float
    label_smoothing: float = 0.0
    f_divergence: str = "reverse_kl"  # name in DIVERGENCES
    f_alpha: float = 0.5
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    cpo_alpha: float = 1.0
    # Tokens of a chosen completion, averaged over the global step; no part of the recipe, each step has its
    # own. A mean over pairs of values divided by it is a mean over the step's chosen tokens.
    mean_chosen_tokens: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss that takes each pair by itself: (policy, reference, options) -> [P], one value a pair.

    `needs_reference` is False for reference-free losses, for which no reference is computed.
    """

    function: Callable[[PairLogps, PairLogps, LossOptions], Tensor]
    needs_reference: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledLoss:
    """A loss in which pairs depend on each other: (policy, reference, options, weights) -> [P].

    It is given all pairs of the global step at once, whatever rows and ranks they were computed on. It
    takes the pairs' weights [P] itself, since a weight is then no mere factor, and returns weighted values.
    """

    function: Callable[[PairLogps, PairLogps, LossOptions, Tensor], Tensor]
    needs_reference: bool = True


def chosen_logratio(policy: PairLogps, reference: PairLogps) -> Tensor:
    """[P]: log pi(y|x) - log pi_ref(y|x) of the chosen completions, nats."""
    return policy.chosen - reference.chosen


def rejected_logratio(policy: PairLogps, reference: PairLogps) -> Tensor:
    """[P]: log pi(y|x) - log pi_ref(y|x) of the rejected completions, nats."""
    return policy.rejected - reference.rejected
