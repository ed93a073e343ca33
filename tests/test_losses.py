"""Losses: hand-computed values, gradients, extreme margins."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from torch import Tensor

from dpo_pack.losses import LOSSES, LossOptions, PairLogps, weighted_sum

NAMES = tuple(LOSSES)


def pair_logps(
    chosen: float | list[float] | Tensor,
    rejected: float | list[float] | Tensor,
    *,
    chosen_tokens: int = 4,
    rejected_tokens: int = 2,
) -> PairLogps:
    sides = [torch.as_tensor(side, dtype=torch.float64).reshape(-1) for side in (chosen, rejected)]
    return PairLogps(
        chosen=sides[0],
        rejected=sides[1],
        chosen_tokens=torch.full((len(sides[0]),), chosen_tokens),
        rejected_tokens=torch.full((len(sides[1]),), rejected_tokens),
    )


# One pair: logratios +2 (chosen, 4 tokens) and -1 (rejected, 2 tokens), so a margin of 3 and one of
# 2 / 4 - -1 / 2 = 1 a token. beta = 0.5.
POLICY = pair_logps(-10.0, -8.0)
REFERENCE = pair_logps(-12.0, -7.0)


@pytest.mark.parametrize(
    ("name", "label_smoothing", "expected"),
    [
        ("sigmoid", 0.0, log(1 + exp(-1.5))),
        ("sigmoid", 0.2, 0.8 * log(1 + exp(-1.5)) + 0.2 * log(1 + exp(1.5))),
        ("hinge", 0.0, 0.0),  # max(0, 1 - 0.5 * 3)
        ("ipo", 0.0, 0.0),  # (1 - 1 / (2 * 0.5))^2
        ("sigmoid_norm", 0.0, log(1 + exp(-0.5))),
    ],
)
def test_a_loss_is_what_its_formula_gives_by_hand(name: str, label_smoothing: float, expected: float) -> None:
    options = LossOptions(beta=0.5, label_smoothing=label_smoothing)
    value = LOSSES[name].function(POLICY, REFERENCE, options)
    assert value.shape == (1,) and value.dtype == torch.float64
    assert float(value) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sigmoid", log(1 + exp(0.3))),
        ("hinge", 1.3),  # 1 - 0.1 * -3
        ("ipo", 36.0),  # (-2 / 4 - 1 / 2 - 1 / 0.2)^2
        ("sigmoid_norm", log(1 + exp(0.1))),
    ],
)
def test_a_pair_in_the_wrong_order_costs_more(name: str, expected: float) -> None:
    """Policy and reference exchanged: a margin of -3, and of -1 a token."""
    value = LOSSES[name].function(REFERENCE, POLICY, LossOptions(beta=0.1))
    assert float(value) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_gradients_are_those_of_the_formula(name: str, label_smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = 5 * torch.randn(2, 6, generator=generator, dtype=torch.float64)
    reference = pair_logps(torch.zeros(6), torch.zeros(6))
    options = LossOptions(beta=0.3, label_smoothing=label_smoothing)

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return LOSSES[name].function(pair_logps(chosen, rejected), reference, options)

    assert torch.autograd.gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_down_the_gradient_raises_chosen_and_lowers_rejected(name: str) -> None:
    sides = [torch.tensor([-9.0], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    loss = LOSSES[name].function(pair_logps(*sides), pair_logps(-9.0, -9.0), LossOptions(beta=0.1))
    gradients = torch.autograd.grad(loss.sum(), sides)
    assert gradients[0].item() < 0 < gradients[1].item()


# For logratios of +-10,000 on both sides: a margin of +-20,000, of +-7,500 a token; beta = 0.1.
EXTREMES = {
    "sigmoid": ((0.0, 0.0), (2_000.0, 0.1)),
    "hinge": ((0.0, 0.0), (2_001.0, 0.1)),
    "ipo": ((7_495.0**2, 3_747.5), (7_505.0**2, 3_752.5)),
    "sigmoid_norm": ((0.0, 0.0), (750.0, 0.025)),
}


@pytest.mark.parametrize("name", NAMES)
def test_extreme_logratios_give_the_finite_values_and_slopes_of_the_mathematics(name: str) -> None:
    for sign, (expected_loss, expected_slope) in zip((1, -1), EXTREMES[name], strict=True):
        chosen = torch.tensor([sign * 1e4], dtype=torch.float64, requires_grad=True)
        policy = pair_logps(chosen, -sign * 1e4)
        loss = LOSSES[name].function(policy, pair_logps(0.0, 0.0), LossOptions(beta=0.1))
        (slope,) = torch.autograd.grad(loss.sum(), chosen)
        assert loss.item() == pytest.approx(expected_loss, abs=1e-9)
        assert abs(slope.item()) == pytest.approx(expected_slope, abs=1e-9)


def test_extreme_logratios_stay_finite_with_label_smoothing() -> None:
    chosen = torch.tensor([1e4, -1e4], dtype=torch.float64, requires_grad=True)
    policy = pair_logps(chosen, [-1e4, 1e4])
    options = LossOptions(beta=0.1, label_smoothing=0.25)
    loss = LOSSES["sigmoid"].function(policy, pair_logps([0.0, 0.0], [0.0, 0.0]), options)
    (slopes,) = torch.autograd.grad(loss.sum(), chosen)
    assert loss.tolist() == pytest.approx([500.0, 1_500.0])
    assert slopes.tolist() == pytest.approx([0.025, -0.075])


def test_an_infinite_margin_without_label_smoothing_is_no_nan() -> None:
    policy = pair_logps(0.0, -torch.inf)
    assert LOSSES["sigmoid"].function(policy, pair_logps(0.0, 0.0), LossOptions(beta=0.1)).item() == 0.0


def test_a_weighted_sum_adds_its_terms_pair_by_pair() -> None:
    policy, reference = pair_logps([-10.0, -3.0], [-8.0, -9.0]), pair_logps([-12.0, -4.0], [-7.0, -5.0])
    options = LossOptions(beta=0.5)
    total = weighted_sum([("sigmoid", 1.0), ("hinge", 0.25)], policy, reference, options)
    # Margins: 3 and 5; the hinge is zero for both.
    assert total.tolist() == pytest.approx([log(1 + exp(-1.5)), log(1 + exp(-2.5))])
    total = weighted_sum([("hinge", 2.0), ("sigmoid_norm", 3.0)], reference, policy, options)
    # Margins -3 and -5; a token: -1 and -1 / 4 - 4 / 2 = -2.25.
    expected = [2 * 2.5 + 3 * log(1 + exp(0.5)), 2 * 3.5 + 3 * log(1 + exp(1.125))]
    assert total.tolist() == pytest.approx(expected)
    one_term = weighted_sum([("ipo", 1.0)], policy, reference, options)
    assert torch.equal(one_term, LOSSES["ipo"].function(policy, reference, options))


@pytest.mark.parametrize("name", [name for name in NAMES if not LOSSES[name].couples_pairs])
def test_a_pair_s_loss_does_not_depend_on_the_other_pairs(name: str) -> None:
    options = LossOptions(beta=0.1)
    policy, reference = pair_logps([-10.0, -3.0], [-8.0, -9.0]), pair_logps([-12.0, -4.0], [-7.0, -5.0])
    alone = LOSSES[name].function(pair_logps(-3.0, -9.0), pair_logps(-4.0, -5.0), options)
    assert torch.equal(LOSSES[name].function(policy, reference, options)[1:], alone)
