"""The loss of a row's pairs. The loss of a global step is the mean over its pairs of weight * l(pair).

Legend: P pairs of a row.
"""

from __future__ import annotations

from torch import Tensor

from dpo_pack.losses.objective import Objective, PairLogps, wpo_weights
from dpo_pack.model.scorer import RowLogps
from dpo_pack.training.batches import PairRow


def pair_losses(objective: Objective, output: RowLogps, row: PairRow, mean_chosen_tokens: float) -> Tensor:
    """Returns weight * l(pair) of each pair, [P] float64, differentiable in what the policy has computed.
    `mean_chosen_tokens`: of the pairs of the global step."""
    policy, num_tokens = output.sums.view(-1, 2), output.num_tokens.view(-1, 2)  # [P, (chosen, rejected)]
    counts = dict(zip(("chosen_tokens", "rejected_tokens"), num_tokens.double().unbind(dim=1), strict=True))
    losses = objective(
        PairLogps(chosen=policy[:, 0], rejected=policy[:, 1], **counts),
        PairLogps(chosen=row.reference[:, 0], rejected=row.reference[:, 1], **counts),
        mean_chosen_tokens=mean_chosen_tokens,
    )
    weights = row.pair_weights
    if objective.weighting == "wpo":
        log_squares = output.statistics.view(-1, 2, 4)[:, :, 3]
        weights = weights * wpo_weights(policy - log_squares, num_tokens)
    return losses * weights
