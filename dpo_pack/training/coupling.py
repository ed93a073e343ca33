"""Splits a loss that couples the pairs of a step (aot) into one part for each row.

The step begins with a pass over its rows without gradients, and gathers the log-probs of all rows and ranks.
The loss is differentiated once in all of them: each pair gets a loss, each log-prob a slope (derivative).
Each row then trains on its tangent: linear in the row's log-probs, with the value and gradient of the loss.

Legend: P pairs of a row, A pairs of the step over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpo_pack.losses import Objective, PairLogps, ScoredPairs, weighted_losses
from dpo_pack.system.ranks import gather_and_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Tangent:
    """A row's part of a coupled loss, linear around the log-probs of the first pass."""

    values: Tensor  # [P] weighted losses
    chosen_slopes: Tensor  # [P] derivatives of the whole step's loss by each log-prob
    rejected_slopes: Tensor  # [P]

    def losses(self, policy: PairLogps) -> Tensor:
        """Returns `values`, with the gradient that the step's loss has with respect to `policy`. [P]"""
        chosen = self.chosen_slopes * (policy.chosen - policy.chosen.detach())
        rejected = self.rejected_slopes * (policy.rejected - policy.rejected.detach())
        return self.values + chosen + rejected


def row_tangents(
    objective: Objective, rows: Sequence[ScoredPairs], *, mean_chosen_tokens: float, device: torch.device
) -> list[Tangent]:
    """Returns the tangent of each of this rank's rows. Every rank must call it, even a rank without rows."""
    columns = [torch.zeros((0, 7), dtype=torch.float64, device=device)]
    for row in rows:  # all values of pairs that a loss may use
        policy, reference = row.policy, row.reference
        ours = (policy.chosen, policy.rejected, policy.chosen_tokens, policy.rejected_tokens)
        others = (reference.chosen, reference.rejected, row.pair_weights)
        columns.append(torch.stack((*ours, *others), dim=1).detach())
    gathered, own = gather_and_place(torch.cat(columns))  # [A, 7], and the slice of this rank's pairs
    chosen, rejected = (gathered[:, side].clone().requires_grad_() for side in (0, 1))
    tokens = {"chosen_tokens": gathered[:, 2], "rejected_tokens": gathered[:, 3]}
    pairs = ScoredPairs(
        policy=PairLogps(chosen=chosen, rejected=rejected, **tokens),
        reference=PairLogps(chosen=gathered[:, 4], rejected=gathered[:, 5], **tokens),
        pair_weights=gathered[:, 6],
    )
    with torch.enable_grad():
        losses = weighted_losses(objective, pairs, mean_chosen_tokens=mean_chosen_tokens)
        slopes = torch.autograd.grad(losses.sum(), (chosen, rejected))
    of_pairs = torch.stack((losses.detach(), *slopes), dim=1)[own]
    return [
        Tangent(values=part[:, 0], chosen_slopes=part[:, 1], rejected_slopes=part[:, 2])
        for part in of_pairs.split([len(row.pair_weights) for row in rows])
    ]
