"""Losses that couple pairs: whatever rows pairs lie in, the loss and its gradient are the whole step's."""

from __future__ import annotations

import pytest
import torch
from support.device_reads import no_reads
from support.loss_options import loss_options
from support.two_ranks import run_on_ranks
from torch import Tensor

from dpo_pack.losses import LOSSES, Objective, PairLogps, ScoredPairs, weighted_losses
from dpo_pack.system import ranks
from dpo_pack.training.coupling import row_tangents

OBJECTIVE = Objective(
    terms=((LOSSES["aot"], 1.0), (LOSSES["ipo"], 0.5), (LOSSES["sft"], 0.1)),
    options=loss_options(beta=0.3, label_smoothing=0.1),
)
CPU = torch.device("cpu")
SIZES = (3, 1, 4)  # pairs of each row


def step_values() -> Tensor:
    """[8, 7]: policy chosen and rejected, reference chosen and rejected, weight of each pair, tokens of each
    completion."""
    generator = torch.Generator().manual_seed(0)
    logps = -20 * torch.rand(sum(SIZES), 4, generator=generator, dtype=torch.float64)
    weights = torch.tensor([1, 1, 2, 0.5, 1, 0, 1, 1], dtype=torch.float64)
    tokens = torch.arange(2 * sum(SIZES), dtype=torch.float64).view(-1, 2) + 1
    return torch.cat((logps, weights[:, None], tokens), dim=1)


def pairs_of(values: Tensor) -> ScoredPairs:
    chosen_tokens, rejected_tokens = values[:, 5:].detach().unbind(dim=1)
    policy, reference = (
        PairLogps(
            chosen=values[:, side],
            rejected=values[:, side + 1],
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
        )
        for side in (0, 2)
    )
    return ScoredPairs(policy=policy, reference=reference, pair_weights=values[:, 4])


def whole_step() -> tuple[Tensor, Tensor]:
    """[8] losses and [8, 2] slopes of the step at once."""
    values = step_values().requires_grad_()
    losses = weighted_losses(OBJECTIVE, pairs_of(values), mean_chosen_tokens=2.0)
    (slopes,) = torch.autograd.grad(losses.sum(), values)
    return losses.detach(), slopes[:, :2]


def by_rows(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The same through a tangent a row."""
    tangents = row_tangents(OBJECTIVE, [pairs_of(row) for row in rows], mean_chosen_tokens=2.0, device=CPU)
    losses, slopes = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, 2, dtype=torch.float64)]
    for row, tangent in zip(rows, tangents, strict=True):
        row = row.clone().requires_grad_()
        value = tangent.losses(pairs_of(row).policy)
        losses.append(value.detach())
        slopes.append(torch.autograd.grad(value.sum(), row)[0][:, :2])
    return torch.cat(losses), torch.cat(slopes)


def test_tangents_of_rows_have_the_value_and_gradient_of_the_whole_step() -> None:
    with torch.no_grad():  # as in training, where the first phase computes no gradients
        rows = list(step_values().split(SIZES))
        pairs = [pairs_of(row) for row in rows]
        tangents = row_tangents(OBJECTIVE, pairs, mean_chosen_tokens=2.0, device=CPU)
    assert len(tangents) == 3 and not tangents[0].values.requires_grad
    for ours, expected in zip(by_rows(rows), whole_step(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)


def test_tangents_of_rows_wait_for_nothing() -> None:
    rows = [pairs_of(row) for row in step_values().split(SIZES)]
    with no_reads():
        row_tangents(OBJECTIVE, rows, mean_chosen_tokens=2.0, device=CPU)
    mask = torch.ones(3, dtype=torch.bool)
    with pytest.raises(AssertionError, match="waits"), no_reads():
        mask[mask]


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_rows", [2, 3])  # of the first rank; the second has the others, or none
def test_pairs_are_coupled_over_ranks(num_rows: int) -> None:
    rows = list(step_values().split(SIZES))
    parts = run_on_ranks(lambda: by_rows(rows[:num_rows] if ranks.is_first() else rows[num_rows:]))
    for index, expected in enumerate(whole_step()):
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), expected, rtol=0, atol=1e-14)
