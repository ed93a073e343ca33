"""AOT: losses between the sorted values of all pairs of a step, an optimal transport in one dimension.

Two samples are matched quantile by quantile. Pairs with weights are samples with weights: a pair of weight 2
counts as two equal pairs, one of weight 0 as none. With all weights equal, the i-th smallest value of one
sample meets the i-th smallest of the other.

Melnyk et al. 2024 (arXiv 2406.05882), with the logistic loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpo_pack.losses.contrastive import mixed_logistic
from dpo_pack.losses.interface import LossOptions, PairLogps, chosen_logratio, rejected_logratio


def aot(policy: PairLogps, reference: PairLogps, options: LossOptions, weights: Tensor) -> Tensor:
    """AOT for paired data: policy log-ratios chosen / rejected against the reference's, each sorted.

    With u the sorted log pi(y_w|x) - log pi(y_l|x) and v the sorted log pi_ref(y_w|x) - log pi_ref(y_l|x),
    the mean of -log sigmoid(beta (u_i - v_i)), labels smoothed as in TRL. [P] weighted values in the order
    of the pairs: each pair has those of its own u.
    """
    upper, lower = policy.chosen - policy.rejected, reference.chosen - reference.rejected
    return _quantile_losses(upper, lower, weights, options)


def aot_unpaired(policy: PairLogps, reference: PairLogps, options: LossOptions, weights: Tensor) -> Tensor:
    """AOT for unpaired data: log-ratios of chosen against those of rejected completions, each sorted.

    With u the sorted log pi(y_w|x) - log pi_ref(y_w|x) and v the same of the rejected ones, the mean of
    -log sigmoid(beta (u_i - v_i)), labels smoothed as in TRL. [P] weighted values in the order of the pairs:
    each pair has those of its chosen completion.
    """
    upper, lower = chosen_logratio(policy, reference), rejected_logratio(policy, reference)
    return _quantile_losses(upper, lower, weights, options)


def _quantile_losses(upper: Tensor, lower: Tensor, weights: Tensor, options: LossOptions) -> Tensor:
    """[P], [P] values of pairs of [P] weights -> [P] losses, summed over the mass that meets each `upper`."""
    upper_order, lower_order = upper.argsort(stable=True), lower.argsort(stable=True)
    upper_ends, lower_ends = weights[upper_order].cumsum(0), weights[lower_order].cumsum(0)
    # Between two neighbouring ends, one pair of `upper` meets one of `lower`.
    ends = torch.cat((upper_ends, lower_ends)).sort().values  # [2 P]
    masses = ends.diff(prepend=ends.new_zeros(1))
    middles = ends - masses / 2
    last = len(upper) - 1
    upper_pairs = upper_order[torch.searchsorted(upper_ends, middles).clamp(max=last)]
    lower_pairs = lower_order[torch.searchsorted(lower_ends, middles).clamp(max=last)]
    logits = options.beta * (upper[upper_pairs] - lower[lower_pairs])
    losses = masses * mixed_logistic(logits, options.label_smoothing)
    return torch.zeros_like(upper).index_add(0, upper_pairs, losses)
