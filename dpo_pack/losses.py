"""Preference losses: pure functions of policy and reference log-probs.

Each takes summed completion log-probs of P pairs and returns one value a pair, [P]; the caller weights
them, sums them over the step's rows and divides by the global step's pair count. `logratio` is
log pi(y|x) - log pi_ref(y|x), `margin` the chosen logratio minus the rejected one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
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
    """What the loss functions take besides log-probs; the recipe's `loss` section without its types."""

    beta: float
    label_smoothing: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An entry of LOSSES.

    `needs_reference` is False for reference-free losses, which then skip the reference pass.
    `couples_pairs` is True when a pair's value depends on the other pairs of the global step; such a loss
    is given the whole step's log-probs at once, whatever rows they were computed in.
    """

    function: Callable[[PairLogps, PairLogps, LossOptions], Tensor]
    needs_reference: bool = True
    couples_pairs: bool = False


def chosen_logratio(policy: PairLogps, reference: PairLogps) -> Tensor:
    return policy.chosen - reference.chosen


def rejected_logratio(policy: PairLogps, reference: PairLogps) -> Tensor:
    return policy.rejected - reference.rejected


def sigmoid(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """DPO, Rafailov et al. 2023 (arXiv 2305.18290), eq. 7: -log sigmoid(beta * margin).

    With label smoothing e it is cDPO, Mitchell 2023 (ericmitchell.ai/cdpo.pdf), eq. 3:
    -(1 - e) log sigmoid(beta * margin) - e log sigmoid(-beta * margin).
    """
    margin = chosen_logratio(policy, reference) - rejected_logratio(policy, reference)
    return _smoothed_logistic(options.beta * margin, options.label_smoothing)


def hinge(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """SLiC's hinge on DPO's margin, Zhao et al. 2023 (arXiv 2305.10425), eq. 1 in the form of Liu et al.
    2023 (arXiv 2309.06657), sec. 3: max(0, 1 - beta * margin)."""
    margin = chosen_logratio(policy, reference) - rejected_logratio(policy, reference)
    return F.relu(1 - options.beta * margin)


def ipo(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """IPO, Azar et al. 2023 (arXiv 2310.12036), eq. 17: (margin - 1 / (2 beta))^2.

    Logratios are averaged over completion tokens, the form the paper's authors confirmed to TRL.
    """
    return (_margin_per_token(policy, reference) - 1 / (2 * options.beta)).square()


def sigmoid_norm(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """Length-normalised DPO, Lambert et al. 2024 (Tulu 3, arXiv 2411.15124), eq. 6.

    -log sigmoid(beta * (chosen logratio / chosen tokens - rejected logratio / rejected tokens)).
    """
    return -F.logsigmoid(options.beta * _margin_per_token(policy, reference))


def weighted_sum(
    terms: Sequence[tuple[str, float]], policy: PairLogps, reference: PairLogps, options: LossOptions
) -> Tensor:
    """[P]: the sum over `terms`, (name in LOSSES, weight) each."""
    values = [weight * LOSSES[name].function(policy, reference, options) for name, weight in terms]
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _margin_per_token(policy: PairLogps, reference: PairLogps) -> Tensor:
    chosen = chosen_logratio(policy, reference) / policy.chosen_tokens
    rejected = rejected_logratio(policy, reference) / policy.rejected_tokens
    return chosen - rejected


def _smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    loss = -F.logsigmoid(logits) * (1 - label_smoothing)
    if label_smoothing > 0.0:
        # Left out at zero: 0 * inf would be NaN for extreme margins.
        loss = loss - F.logsigmoid(-logits) * label_smoothing
    return loss


LOSSES: dict[str, Loss] = {
    "sigmoid": Loss(function=sigmoid),
    "hinge": Loss(function=hinge),
    "ipo": Loss(function=ipo),
    "sigmoid_norm": Loss(function=sigmoid_norm),
}
