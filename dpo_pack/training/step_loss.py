"""The loss of one global step, which each row of the step adds its share of.

    loss = sum over the step's pairs of weight * l(pair) / number of pairs

Most objectives look at one pair at a time. Two kinds need a pass without gradients over the step's rows
first: losses that couple the pairs of a step (coupling.py), and the load-balancing loss of a mixture of
experts (balancing.py). Both use the same pass.

Legend: P pairs of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpo_pack.losses import Objective, ScoredPairs, weighted_losses
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.model.shape import RouterBalance
from dpo_pack.system import ranks
from dpo_pack.training.balancing import StepBalance
from dpo_pack.training.batches import GlobalBatch, score_pairs
from dpo_pack.training.coupling import Tangent, row_tangents


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The loss of one step. `begin_step_loss` makes it before the first row."""

    objective: Objective
    batch: GlobalBatch
    tangents: list[Tangent] | None  # of each row, if the loss couples pairs
    balance: StepBalance | None  # of a mixture of experts

    def of_row(self, number: int, output: RowLogps, pairs: ScoredPairs) -> tuple[Tensor, Tensor]:
        """Returns [P] weighted losses of row `number` (the first is 1), and [] the row's share of the loss.

        R ranks average their gradients, so each rank divides the sum of its losses by num_pairs / R.
        """
        if self.tangents is None:
            mean_chosen_tokens = self.batch.mean_chosen_tokens
            losses = weighted_losses(self.objective, pairs, mean_chosen_tokens=mean_chosen_tokens)
        else:
            losses = self.tangents[number - 1].losses(pairs.policy)
        share = losses.sum() / (self.batch.num_pairs / ranks.num_ranks())
        if self.balance is not None:
            if number == 1:
                self.balance.complete(output)
            share = share + self.balance.row_loss(output)
        return losses, share

    def of_idle_row(self, number: int) -> Callable[[RowLogps], object] | None:
        """Returns what takes the output of idle row `number` before its backward pass; None: nothing does."""
        return self.balance.complete if self.balance is not None and number == 1 else None

    def metrics(self, averages: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the step's averages with what the load-balancing loss adds. Waits for the device."""
        if self.balance is None:
            return dict(averages)
        metrics = {**averages, **self.balance.metrics()}
        metrics["loss"] += self.balance.settings.coefficient * metrics["aux_loss"]
        return metrics


@torch.no_grad()
def begin_step_loss(
    objective: Objective,
    batch: GlobalBatch,
    scorer: CompletionLogps,
    router: RouterBalance | None,
    *,
    device: torch.device,
) -> StepLoss:
    """Returns the loss of the step. Runs the pass over its rows first, if the objective or a router needs it.

    `batch` has the reference's log-probs. Every rank must call it.
    """
    balance = None if router is None else StepBalance(settings=router)
    tangents = None
    if objective.couples_pairs:
        with scorer.measuring(False):
            outputs = [scorer(pair_row.row) for pair_row in batch.rows]
            idle_outputs = [scorer(idle_row) for idle_row in batch.idle_rows]
        if balance is not None:
            for output in [*outputs, *idle_outputs][1:]:
                balance.add(output.expert_counts)
        rows = [
            score_pairs(objective, output, pair_row)
            for output, pair_row in zip(outputs, batch.rows, strict=True)
        ]
        mean_chosen_tokens = batch.mean_chosen_tokens
        tangents = row_tangents(objective, rows, mean_chosen_tokens=mean_chosen_tokens, device=device)
    elif balance is not None:  # the forward pass of the rank's first row counts that row's experts
        for row in [*(pair_row.row for pair_row in batch.rows), *batch.idle_rows][1:]:
            balance.add(scorer.with_own_weights(partial(scorer.expert_counts, row)))
    return StepLoss(objective=objective, batch=batch, tangents=tangents, balance=balance)
