"""The first phase of a step whose loss couples its pairs: the loss at all pairs' log-probs, and its slopes.

Such a loss cannot be taken row by row. So the log-probs of the step's pairs are computed without gradients,
put together over rows and ranks, and the loss is differentiated in them once. What is left of it for a row
is its tangent: linear in the row's log-probs, with the same value and the same gradient as the loss.

Legend: P pairs of a row, A pairs of the step over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpo_pack.collectives import gather_and_place
from dpo_pack.losses import Objective, PairLogps, ScoredPairs, concatenate_pairs, weighted_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Tangent:
    """A row's part of a coupled loss around the log-probs it was differentiated at."""

    values: Tensor  # [P] weighted losses
    chosen_slopes: Tensor  # [P] of the whole step's loss in each log-prob
    rejected_slopes: Tensor  # [P]

    def losses(self, policy: PairLogps) -> Tensor:
        """[P]: the values, with the gradient of the step's loss in `policy`'s log-probs."""
        chosen = self.chosen_slopes * (policy.chosen - policy.chosen.detach())
        rejected = self.rejected_slopes * (policy.rejected - policy.rejected.detach())
        return self.values + chosen + rejected


def row_tangents(
    objective: Objective, rows: Sequence[ScoredPairs], *, mean_chosen_tokens: float, device: torch.device
) -> list[Tangent]:
    """The tangent of each of this rank's rows, whose log-probs have no gradients.

    A collective operation where there are several ranks; one of them may have no rows.
    """
    pairs, own = _gather_pairs(rows, device)
    leaves = (pairs.policy.chosen.requires_grad_(), pairs.policy.rejected.requires_grad_())
    with torch.enable_grad():
        losses = weighted_losses(objective, pairs, mean_chosen_tokens=mean_chosen_tokens)
        slopes = torch.autograd.grad(losses.sum(), leaves)
    columns = torch.stack((losses.detach(), *slopes), dim=1)[own]
    return [
        Tangent(values=part[:, 0], chosen_slopes=part[:, 1], rejected_slopes=part[:, 2])
        for part in columns.split([len(row) for row in rows])
    ]


def _gather_pairs(rows: Sequence[ScoredPairs], device: torch.device) -> tuple[ScoredPairs, slice]:
    """[A] the pairs of all ranks, and where this rank's are among them."""
    none = torch.zeros((0, 7), dtype=torch.float64, device=device)
    gathered, own = gather_and_place(_columns(concatenate_pairs(rows)) if rows else none)
    policy_chosen, policy_rejected, chosen_tokens, rejected_tokens, *others = gathered.unbind(dim=1)
    reference_chosen, reference_rejected, weights = others
    tokens = {"chosen_tokens": chosen_tokens.long(), "rejected_tokens": rejected_tokens.long()}
    pairs = ScoredPairs(
        policy=PairLogps(chosen=policy_chosen.clone(), rejected=policy_rejected.clone(), **tokens),
        reference=PairLogps(chosen=reference_chosen, rejected=reference_rejected, **tokens),
        weights=weights,
    )
    return pairs, own


def _columns(pairs: ScoredPairs) -> Tensor:
    """[P, 7] float64: everything about the pairs that a loss may look at."""
    columns = (
        pairs.policy.chosen,
        pairs.policy.rejected,
        pairs.policy.chosen_tokens.double(),
        pairs.policy.rejected_tokens.double(),
        pairs.reference.chosen,
        pairs.reference.rejected,
        pairs.weights,
    )
    return torch.stack(columns, dim=1).detach()
