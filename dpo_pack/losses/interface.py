"""The interface of losses: a loss is a pure function of the log-probs of pairs under policy and reference.

Legend: P pairs of one row or of a whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLogps:
    """Summed completion log-probs of P pairs under one model, and the number of tokens in each sum.

    If tokens have weights, a sum is a weighted sum, and its number of tokens is the sum of the weights.
    """

    chosen: Tensor  # [P] float64, nats
    rejected: Tensor  # [P] float64, nats
    chosen_tokens: Tensor  # [P] float64, above 0
    rejected_tokens: Tensor  # [P] float64, above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The options of loss functions; their names are those in `LossRecipe.options`.

    They have no defaults here, so that an option that only one of the two classes has raises a TypeError.
    `ld_alpha` and `weighting` are not here: `Objective` has them, because loss functions do not read them.
    """

    beta: float
    label_smoothing: float
    f_divergence: str  # name in DIVERGENCES
    f_alpha: float
    discopop_tau: float
    simpo_gamma: float
    cpo_alpha: float
    # The mean number of tokens of the chosen completions in the global step; each step sets it. If a loss
    # divides each pair's value by this number, the mean over pairs becomes a mean over all chosen tokens.
    mean_chosen_tokens: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss function: (policy, reference, options) -> [P], one value for each pair.

    A function that couples pairs takes a fourth argument, the [P] weights of pairs, because a pair's weight
    changes the values of other pairs too. It returns weighted values. One call gets all pairs of the global
    step, of all rows and ranks.
    """

    function: Callable[..., Tensor]
    needs_reference: bool  # False: the reference log-probs are zeros, and no model computes them
    couples_pairs: bool = False  # True: the value of a pair depends on the other pairs
