"""Losses that compare a pair's log-ratios to the reference: DPO and its relatives.

Each takes summed completion log-probs of P pairs and returns one value a pair, [P]. `logratio` is
log pi(y|x) - log pi_ref(y|x), `reward` is beta * logratio, and `margin` the chosen score minus the rejected
one, where a score is what `options.f_divergence` makes of a logratio (divergences.py): the logratio itself
unless another divergence is asked for.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dpo_pack.divergences import DIVERGENCES
from dpo_pack.losses.interface import LossOptions, PairLogps, chosen_logratio, rejected_logratio


def sigmoid(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """DPO, Rafailov et al. 2023 (arXiv 2305.18290), eq. 7: -log sigmoid(beta * margin).

    With label smoothing e it is cDPO, Mitchell 2023 (ericmitchell.ai/cdpo.pdf), eq. 3:
    -(1 - e) log sigmoid(beta * margin) - e log sigmoid(-beta * margin).
    """
    return mixed_logistic(options.beta * _margin(policy, reference, options), options.label_smoothing)


def robust(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """Robust DPO, Chowdhury et al. 2024 (arXiv 2403.00409), sec. 3.1, labels swapped with probability e:

    (-(1 - e) log sigmoid(beta * margin) + e log sigmoid(-beta * margin)) / (1 - 2 e).
    Unbiased for the loss without swaps, and so unbounded below: a right pair's loss falls with its margin.
    """
    swapped = options.label_smoothing
    return mixed_logistic(options.beta * _margin(policy, reference, options), -swapped / (1 - 2 * swapped))


def hinge(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """SLiC's hinge on DPO's margin, Zhao et al. 2023 (arXiv 2305.10425), eq. 1 in the form of Liu et al.
    2023 (arXiv 2309.06657), sec. 3: max(0, 1 - beta * margin)."""
    return F.relu(1 - options.beta * _margin(policy, reference, options))


def ipo(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """IPO, Azar et al. 2023 (arXiv 2310.12036), eq. 17: (margin - 1 / (2 beta))^2.

    Scores are averaged over completion tokens, the form the paper's authors confirmed to TRL.
    """
    return (_margin_per_token(policy, reference, options) - 1 / (2 * options.beta)).square()


def exo_pair(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """EXO-pref, Ji et al. 2024 (arXiv 2402.00856), eq. 16 for two completions: KL(p || (1 - e, e)).

    p is (sigmoid(beta * margin), sigmoid(-beta * margin)), e > 0 the label smoothing. The slope fades on both
    sides: a pair the policy is sure of, rightly or wrongly, no longer pulls.
    """
    assert options.label_smoothing > 0, "its logarithm is taken"
    logits = options.beta * _margin(policy, reference, options)
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-options.label_smoothing))
    rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(options.label_smoothing))
    return chosen + rejected


def nca_pair(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """NCA for preference pairs, Chen et al. 2024 (arXiv 2402.05369), sec. 4.1, where beta is called alpha:

    -log sigmoid(chosen reward) - log sigmoid(-chosen reward) / 2 - log sigmoid(-rejected reward) / 2.
    """
    chosen, rejected = _rewards(policy, reference, options)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """BCO's binary cross-entropy, Jung et al. 2024 (arXiv 2404.04656), the bound of theorem 1:

    -log sigmoid(chosen reward) - log sigmoid(-rejected reward).
    TRL's form: the paper then shifts both rewards by a running mean, which depends on the steps before.
    """
    chosen, rejected = _rewards(policy, reference, options)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """SPPO, Wu et al. 2024 (arXiv 2405.00675), eq. 4.7 with eta = 1 / beta:

    (chosen logratio - 1 / (2 beta))^2 + (rejected logratio + 1 / (2 beta))^2.
    TRL's form: win probabilities are 1 and 0, where the paper estimates them with a preference model, and
    the reference is fixed, where the paper takes the policy of the iteration before.
    """
    target = 1 / (2 * options.beta)
    chosen, rejected = chosen_logratio(policy, reference), rejected_logratio(policy, reference)
    return (chosen - target).square() + (rejected + target).square()


def apo_zero(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """APO-zero, D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 7, for chosen better than the model's own:

    -sigmoid(chosen reward) + sigmoid(rejected reward), and 1 added, as TRL does, for a loss above 0.
    """
    chosen, rejected = _rewards(policy, reference, options)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """APO-down, D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 8, for chosen worse than the model's own:

    sigmoid(chosen reward) - sigmoid(chosen reward - rejected reward), and 1 added, as TRL does. Lowers the
    rejected completion, and the chosen one too as soon as their margin is larger than its reward.
    """
    chosen, rejected = _rewards(policy, reference, options)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def discopop(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """DiscoPOP, Lu et al. 2024 (arXiv 2406.08414), eq. 5: with x = beta * margin, g = sigmoid(x / tau),

    -(1 - g) log sigmoid(x) + g exp(-x).
    Not monotone: its slope at x = 0, where a policy that is the reference starts, is
    (1 - log 2) / (4 tau) - 3 / 4, which pushes margins down for tau below about 0.1. For tau > 1, exp(-x)
    outgrows g, and overflows below about x = -709 / (1 - 1 / tau).
    """
    logits = options.beta * _margin(policy, reference, options)
    modulation = logits / options.discopop_tau
    # One exp for g exp(-x): apart they would be 0 * inf for a wrong pair.
    exponential = torch.exp(F.logsigmoid(modulation) - logits)
    return exponential - torch.sigmoid(-modulation) * F.logsigmoid(logits)


def sigmoid_norm(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """Length-normalised DPO, Lambert et al. 2024 (Tulu 3, arXiv 2411.15124), eq. 6.

    -log sigmoid(beta * (chosen score / chosen tokens - rejected score / rejected tokens)).
    """
    return -F.logsigmoid(options.beta * _margin_per_token(policy, reference, options))


def mixed_logistic(logits: Tensor, swapped: float) -> Tensor:
    """-(1 - swapped) log sigmoid(logits) - swapped log sigmoid(-logits), of any shape."""
    loss = -F.logsigmoid(logits) * (1 - swapped)
    if swapped != 0.0:
        # Left out at zero: 0 * inf would be NaN for infinite margins.
        loss = loss - F.logsigmoid(-logits) * swapped
    return loss


def _rewards(policy: PairLogps, reference: PairLogps, options: LossOptions) -> tuple[Tensor, Tensor]:
    chosen, rejected = chosen_logratio(policy, reference), rejected_logratio(policy, reference)
    return options.beta * chosen, options.beta * rejected


def _scores(policy: PairLogps, reference: PairLogps, options: LossOptions) -> tuple[Tensor, Tensor]:
    score = DIVERGENCES[options.f_divergence]
    chosen, rejected = chosen_logratio(policy, reference), rejected_logratio(policy, reference)
    return score(chosen, options.f_alpha), score(rejected, options.f_alpha)


def _margin(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    chosen, rejected = _scores(policy, reference, options)
    return chosen - rejected


def _margin_per_token(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    chosen, rejected = _scores(policy, reference, options)
    return chosen / policy.chosen_tokens - rejected / policy.rejected_tokens
