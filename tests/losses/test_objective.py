"""What a run minimises: weighted sums of losses, pairs' weights, WPO and LD-DPO."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from support.loss_options import loss_options, pair_logps, softplus

from dpo_pack.losses import (
    LOSSES,
    Objective,
    ScoredPairs,
    length_desensitized_weights,
    weighted_losses,
    wpo_weights,
)


def objective(*terms: tuple[str, float], beta: float = 0.5) -> Objective:
    return Objective(
        terms=tuple((LOSSES[name], factor) for name, factor in terms), options=loss_options(beta=beta)
    )


def scored(*weights: float) -> ScoredPairs:
    """Margins 3 and 1."""
    return ScoredPairs(
        policy=pair_logps([-10.0, -3.0], [-8.0, -9.0]),
        reference=pair_logps([-12.0, -4.0], [-7.0, -9.0]),
        pair_weights=torch.tensor(weights, dtype=torch.float64),
    )


def test_a_weighted_sum_adds_its_terms_pair_by_pair() -> None:
    total = weighted_losses(
        objective(("sigmoid", 1.0), ("hinge", 0.25)), scored(1, 1), mean_chosen_tokens=4.0
    )
    assert total.tolist() == pytest.approx([softplus(-1.5), softplus(-0.5) + 0.25 * 0.5])


def test_likelihood_terms_divide_by_the_step_s_token_count() -> None:
    total = weighted_losses(objective(("sigmoid", 2.0), ("sft", 0.5)), scored(1, 1), mean_chosen_tokens=8.0)
    assert total.tolist() == pytest.approx([2 * softplus(-1.5) + 5 / 8, 2 * softplus(-0.5) + 1.5 / 8])


def test_pair_weights_multiply_every_term() -> None:
    sums = objective(("sigmoid", 1.0), ("sft", 0.5))
    plain = weighted_losses(sums, scored(1, 1), mean_chosen_tokens=8.0)
    weighted = weighted_losses(sums, scored(3, 0.5), mean_chosen_tokens=8.0)
    assert weighted.tolist() == pytest.approx([3 * float(plain[0]), 0.5 * float(plain[1])])


def test_a_coupled_term_takes_the_weights_itself() -> None:
    coupled = weighted_losses(objective(("aot", 2.0)), scored(1, 1), mean_chosen_tokens=4.0)
    # Policy log-ratios -2, 6 against the reference's -5, 5, sorted: 3 and 1 apart.
    assert coupled.tolist() == pytest.approx([2 * softplus(-1.5), 2 * softplus(-0.5)])
    alone = weighted_losses(objective(("aot", 2.0)), scored(0, 1), mean_chosen_tokens=4.0)
    assert alone.tolist() == pytest.approx([0.0, 2 * softplus(-0.5)])


def test_wpo_weights_by_hand() -> None:
    """Two tokens of probability 1/4 where sum p^2 is 5/8; three tokens whose mean is one half of e^-1."""
    chosen = 2 * (log(1 / 4) - log(5 / 8))
    alignment = torch.tensor([[chosen, -3.0]], dtype=torch.float64, requires_grad=True)
    weights = wpo_weights(alignment, torch.tensor([[2, 3]]))
    assert weights.tolist() == pytest.approx([(1 / 4) / (5 / 8) * exp(-1)])
    assert not weights.requires_grad


def test_length_desensitized_factors_by_hand() -> None:
    """Pairs of 3 and 2 tokens, of 1 and 4, of 2 and 2."""
    weights, lengths = torch.ones(14, dtype=torch.float64), torch.tensor([3, 2, 1, 4, 2, 2])
    factors = length_desensitized_weights(weights, lengths, 0.25)
    assert factors.tolist() == [1, 1, 0.25, 1, 1, 1, 1, 0.25, 0.25, 0.25, 1, 1, 1, 1]
