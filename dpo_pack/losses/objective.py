"""The objective of a run: a weighted sum of losses; WPO's pair weights, LD-DPO's sums.

Legend: P pairs of one row or of a whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLogps:
    """Summed completion log-probs of P pairs under one model, and the number of tokens in each sum; weighted
    sums and sums of weights if tokens have weights."""

    chosen: Tensor  # [P] float64, nats
    rejected: Tensor  # [P] float64, nats
    chosen_tokens: Tensor  # [P] float64, above 0
    rejected_tokens: Tensor  # [P] float64, above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The options that loss functions read, named as in `LossRecipe.options`. They have no defaults, so
    that an option that only one of the two classes has raises a TypeError."""

    beta: float
    label_smoothing: float
    f_divergence: str  # name in DIVERGENCES
    f_alpha: float
    discopop_tau: float
    simpo_gamma: float
    cpo_alpha: float
    # Of the chosen completions of the global step; each step sets it. If a loss divides each pair's value by
    # this number, the mean over pairs becomes a mean over all chosen tokens.
    mean_chosen_tokens: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss function: (policy, reference, options) -> [P], one value for each pair.

    A function that couples pairs gets all pairs of the global step, and as a fourth argument their [P]
    weights; it returns weighted values.
    """

    function: Callable[..., Tensor]
    needs_reference: bool = True  # False: the reference log-probs are zeros, and no model computes them
    couples_pairs: bool = False  # True: the value of a pair depends on the other pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss of a run: terms, the factor of each term, and the options of all terms."""

    terms: tuple[tuple[Loss, float], ...]
    options: LossOptions
    weighting: str | None = None  # "wpo": `wpo_weights` multiply the pair weights of the data
    ld_alpha: float | None = None  # the alpha of `length_desensitized_weights` (LD-DPO); None: off

    @property
    def needs_reference(self) -> bool:
        return any(loss.needs_reference for loss, _ in self.terms)

    @property
    def couples_pairs(self) -> bool:
        return any(loss.couples_pairs for loss, _ in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPairs:
    """The log-probs of P pairs under policy and reference: the inputs of an objective, and of metrics."""

    policy: PairLogps
    reference: PairLogps
    pair_weights: Tensor  # [P] float64, detached: the data's weights, times `wpo_weights` if used
    # [P, (chosen, rejected), (entropy, top-1 hits, mean logit)] sums over tokens; only metrics read them
    statistics: Tensor | None = None


def weighted_losses(objective: Objective, pairs: ScoredPairs, *, mean_chosen_tokens: float) -> Tensor:
    """Returns the weighted value of each pair, [P]. The loss of a step is the mean of its pairs' values.

    `mean_chosen_tokens`: of the global step. A loss that couples pairs needs all pairs of the global step.
    """
    options = replace(objective.options, mean_chosen_tokens=mean_chosen_tokens)
    total = torch.zeros_like(pairs.pair_weights)
    for loss, factor in objective.terms:
        if loss.couples_pairs:
            values = loss.function(pairs.policy, pairs.reference, options, pairs.pair_weights)
        else:
            values = loss.function(pairs.policy, pairs.reference, options) * pairs.pair_weights
        total = total + factor * values
    return total


def wpo_weights(alignment: Tensor, num_tokens: Tensor) -> Tensor:
    """WPO weights, Zhou et al. 2024 (arXiv 2406.11827), eq. 2: large if both completions are likely.

    alignment: [P, 2], for each completion the sum over its tokens of log p(y_t) - log sum_v p(v)^2.
    num_tokens: [P, 2]. Returns [P] detached w(y_w|x) * w(y_l|x), where w(y|x) = exp(alignment / num_tokens).
    """
    return torch.exp((alignment.detach() / num_tokens).sum(dim=1))


def length_desensitized_weights(token_weights: Tensor, lengths: Tensor, alpha: float) -> Tensor:
    """LD-DPO's factors of tokens, Liu et al. 2024 (arXiv 2409.06411), sec. 3.2, times the tokens' weights.

    token_weights: [N] float64, pair after pair, first those of chosen, then those of rejected. lengths: [2 P]
    tokens of chosen, rejected, ... |y| is the sum of a completion's weights: a token's weight counts in full
    up to a sum of min(|y_w|, |y_l|) over the completion's first tokens, and times alpha beyond. Returns [N].
    """
    upto = torch.nn.functional.pad(token_weights.cumsum(0), (1, 0))  # [N + 1]
    ends = lengths.cumsum(0)
    before = upto[ends - lengths]  # [2 P] the sum of all weights before each completion
    shorter = (upto[ends] - before).view(-1, 2).amin(dim=1).repeat_interleave(2)
    num_tokens = len(token_weights)
    limits = (before + shorter).repeat_interleave(lengths, output_size=num_tokens)
    beyond = (upto[1:] - limits).clamp(min=0).minimum(token_weights)
    return token_weights - (1 - alpha) * beyond
