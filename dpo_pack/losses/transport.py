"""AOT: losses that compare sorted values of all pairs of a step (optimal transport in one dimension).

Each loss compares two sets of values. If all pairs have the same weight, the i-th smallest value of one set
is compared with the i-th smallest value of the other. A pair of weight 2 counts as two equal pairs, a pair of
weight 0 does not count.

Source: Melnyk et al. 2024 (arXiv 2406.05882), with the logistic loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpo_pack.losses.contrastive import mixed_logistic
from dpo_pack.losses.objective import LossOptions, PairLogps


def aot(policy: PairLogps, reference: PairLogps, options: LossOptions, weights: Tensor) -> Tensor:
    """AOT for paired data: compares the policy's log-ratios chosen / rejected with those of the reference.

    u is the sorted log pi(y_w|x) - log pi(y_l|x), and v is the sorted log pi_ref(y_w|x) - log pi_ref(y_l|x).
    The loss is the mean of -log sigmoid(beta (u_i - v_i)), with labels smoothed as in TRL. Returns [P]
    weighted values in the order of the pairs; the value of a pair is that of the pair's u_i.
    """
    upper, lower = policy.chosen - policy.rejected, reference.chosen - reference.rejected
    return _quantile_losses(upper, lower, weights, options)


def aot_unpaired(policy: PairLogps, reference: PairLogps, options: LossOptions, weights: Tensor) -> Tensor:
    """AOT for unpaired data: compares log-ratios to the reference of chosen and of rejected completions.

    u is the sorted log pi(y_w|x) - log pi_ref(y_w|x), and v is the sorted log pi(y_l|x) - log pi_ref(y_l|x).
    Otherwise as `aot`; the value of a pair is that of its chosen completion's u_i.
    """
    upper, lower = policy.chosen - reference.chosen, policy.rejected - reference.rejected
    return _quantile_losses(upper, lower, weights, options)


def _quantile_losses(upper: Tensor, lower: Tensor, weights: Tensor, options: LossOptions) -> Tensor:
    """[P] upper, lower, weights -> [P] losses: the loss of an `upper` sums over all `lower` that meet it."""
    upper_order, lower_order = upper.argsort(stable=True), lower.argsort(stable=True)
    upper_ends, lower_ends = weights[upper_order].cumsum(0), weights[lower_order].cumsum(0)
    # From one of the sorted ends to the next, a single value of `upper` meets a single value of `lower`.
    ends = torch.cat((upper_ends, lower_ends)).sort().values  # [2 P]
    masses = ends.diff(prepend=ends.new_zeros(1))
    middles = ends - masses / 2
    last = len(upper) - 1
    upper_pairs = upper_order[torch.searchsorted(upper_ends, middles).clamp(max=last)]
    lower_pairs = lower_order[torch.searchsorted(lower_ends, middles).clamp(max=last)]
    logits = options.beta * (upper[upper_pairs] - lower[lower_pairs])
    losses = masses * mixed_logistic(logits, options.label_smoothing)
    return torch.zeros_like(upper).index_add(0, upper_pairs, losses)
