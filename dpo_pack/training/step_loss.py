"""The loss of one global step, to which each row adds its share, and the log-probs of a row's pairs.

    loss = sum over the step's pairs of weight * l(pair) / number of pairs

Two kinds of losses need a pass without gradients over the step's rows first, and use the same one: those that
couple the pairs of a step (coupling.py), and the load-balancing loss of a mixture of experts (balancing.py).

Legend: P pairs of a row, S sequences, N scored tokens (tokens of completions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpo_pack.losses import (
    Objective,
    PairLogps,
    ScoredPairs,
    length_desensitized_weights,
    weighted_losses,
    wpo_weights,
)
from dpo_pack.model.facts import RouterBalance
from dpo_pack.model.logps import TokenStatistics, sequence_sums
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.system import ranks
from dpo_pack.training.balancing import StepBalance
from dpo_pack.training.batches import GlobalBatch, PairRow
from dpo_pack.training.coupling import Tangent, row_tangents


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The loss of one step, from `begin_step_loss`."""

    objective: Objective
    batch: GlobalBatch
    tangents: list[Tangent] | None  # of each row, if the loss couples pairs
    balance: StepBalance | None  # of a mixture of experts

    def of_row(self, number: int, output: RowLogps, pairs: ScoredPairs) -> tuple[Tensor, Tensor]:
        """Returns [P] weighted losses of row `number` (the first is 1), and [] the row's share of the loss. R
        ranks average their gradients, so each rank divides the sum of its losses by num_pairs / R."""
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
    Every rank must call it."""
    balance = None if router is None else StepBalance(settings=router)
    tangents = None
    if objective.couples_pairs or balance is not None:
        tangents = _first_pass(objective, batch, scorer, balance, device)
    return StepLoss(objective=objective, batch=batch, tangents=tangents, balance=balance)


def _first_pass(
    objective: Objective,
    batch: GlobalBatch,
    scorer: CompletionLogps,
    balance: StepBalance | None,
    device: torch.device,
) -> list[Tangent] | None:
    """Returns the tangents of a loss that couples pairs; counts the experts that the rows choose."""
    rows = [*(pair_row.row for pair_row in batch.rows), *batch.idle_rows]
    if objective.couples_pairs:
        with scorer.measuring(False):
            outputs = [scorer(row) for row in rows]
        if balance is not None:
            for output in outputs[1:]:
                balance.add(output.expert_counts)
        scored = [score_pairs(objective, *pair) for pair in zip(outputs, batch.rows, strict=False)]
        mean_chosen_tokens = batch.mean_chosen_tokens
        return row_tangents(objective, scored, mean_chosen_tokens=mean_chosen_tokens, device=device)
    assert balance is not None
    for row in rows[1:]:  # the forward pass of the rank's first row counts that row's experts
        balance.add(scorer.with_own_weights(partial(scorer.expert_counts, row)))
    return None


# ------------------------------------------------------------------ log-probs of a row, pair by pair


def score_pairs(objective: Objective, output: RowLogps, row: PairRow) -> ScoredPairs:
    """Returns log-probs of policy and reference, weights and statistics, [P] each, of a row's pairs. `output`
    is what the policy computed."""
    if row.sequence_index is not None or row.token_weights is not None:
        output = _by_pair(output, row)
    num_tokens = output.num_tokens.view(-1, 2)  # [P, (chosen, rejected)]
    policy, reference = output.sums.view(-1, 2), row.reference
    pair_weights, lengths = row.pair_weights, row.row.completion_lengths
    if row.sequence_index is not None:
        lengths = lengths.index_select(0, row.sequence_index)
    if objective.weighting == "wpo":
        squares = _sums(output.token_statistics.log_sum_squares, lengths, row.token_weights)
        pair_weights = pair_weights * wpo_weights(policy - squares.view(-1, 2), num_tokens)
    if objective.ld_alpha is not None:
        assert row.reference_tokens is not None, "the reference was frozen without per-token values"
        weights = row.token_weights
        weights = torch.ones_like(output.token_logps, dtype=torch.float64) if weights is None else weights
        weights = length_desensitized_weights(weights, lengths, objective.ld_alpha)
        both = (output.token_logps, row.reference_tokens)
        policy, reference = (weighted_sums(values, weights, lengths).view(-1, 2) for values in both)
    statistics = [_sums(values, lengths, row.token_weights) for values in output.token_statistics[:3]]
    counts = dict(zip(("chosen_tokens", "rejected_tokens"), num_tokens.double().unbind(dim=1), strict=True))
    return ScoredPairs(
        policy=PairLogps(chosen=policy[:, 0], rejected=policy[:, 1], **counts),
        reference=PairLogps(chosen=reference[:, 0], rejected=reference[:, 1], **counts),
        pair_weights=pair_weights,
        statistics=torch.stack(statistics, dim=1).view(-1, 2, len(statistics)),
    )


def with_reference(row: PairRow, output: RowLogps) -> PairRow:
    """Returns the row with the reference's log-probs in it, from what the reference computed."""
    if row.sequence_index is not None or row.token_weights is not None:
        output = _by_pair(output, row)
    return replace(row, reference=output.sums.view(-1, 2), reference_tokens=output.token_logps)


def _by_pair(output: RowLogps, row: PairRow) -> RowLogps:
    """Returns a row's outputs pair by pair: [2 P] chosen, rejected, ...; weighted if tokens have weights."""
    if row.sequence_index is not None and row.token_index is not None:
        statistics = (values.index_select(0, row.token_index) for values in output.token_statistics)
        output = output._replace(
            sums=output.sums.index_select(0, row.sequence_index),
            num_tokens=output.num_tokens.index_select(0, row.sequence_index),
            token_logps=output.token_logps.index_select(0, row.token_index),
            token_statistics=TokenStatistics(*statistics),
        )
    if row.token_weights is None:
        return output
    return output._replace(
        sums=weighted_sums(output.token_logps, row.token_weights, output.num_tokens),
        num_tokens=sequence_sums(row.token_weights, output.num_tokens),
    )


def _sums(token_values: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
    """Returns [S] sums over the tokens of each sequence; weighted if tokens have weights."""
    if weights is None:
        return sequence_sums(token_values, lengths)
    return weighted_sums(token_values, weights, lengths)


def weighted_sums(token_values: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
    """Returns [S] float64 weighted sums of each sequence's tokens, of [N] values and weights. A token of
    weight zero adds nothing, also if its value is not finite."""
    return sequence_sums(token_values.double().masked_fill(weights == 0, 0.0) * weights, lengths)
