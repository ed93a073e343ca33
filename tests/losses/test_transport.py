"""AOT: sorted values of a step's pairs, and what weights of pairs mean there."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import pytest
import torch
from support.loss_options import loss_options, pair_logps, softplus
from torch import Tensor

from dpo_pack.losses import LOSSES

NAMES = tuple(name for name, loss in LOSSES.items() if loss.couples_pairs)


def function(name: str) -> Callable[..., Tensor]:
    loss = LOSSES[name]
    assert loss.couples_pairs
    return loss.function


def weights(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Log-ratios chosen / rejected 2, -1, 5 (policy) and 1, 0, -3 (reference); to the reference: chosen 1, 3, 4,
# rejected 0, 4, -4.
POLICY = pair_logps([-10.0, -6.0, -5.0], [-12.0, -5.0, -10.0])
REFERENCE = pair_logps([-11.0, -9.0, -9.0], [-12.0, -9.0, -6.0])


def test_aot_compares_sorted_log_ratios_of_policy_and_reference() -> None:
    # Sorted: -1, 2, 5 of pairs 1, 0, 2 against -3, 0, 1.
    values = function("aot")(POLICY, REFERENCE, loss_options(beta=0.5), weights(1, 1, 1))
    assert values.tolist() == pytest.approx([softplus(-1), softplus(-1), softplus(-2)])
    smoothed = function("aot")(
        POLICY, REFERENCE, loss_options(beta=0.5, label_smoothing=0.1), weights(1, 1, 1)
    )
    assert float(smoothed[2]) == pytest.approx(0.9 * softplus(-2) + 0.1 * softplus(2))


def test_aot_unpaired_compares_sorted_chosen_with_sorted_rejected_log_ratios() -> None:
    # Chosen 1, 3, 4 of pairs 0, 1, 2 against rejected -4, 0, 4.
    values = function("aot_unpaired")(POLICY, REFERENCE, loss_options(beta=0.5), weights(1, 1, 1))
    assert values.tolist() == pytest.approx([softplus(-2.5), softplus(-1.5), softplus(0)])


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_of_weight_two_counts_as_two_and_one_of_weight_zero_as_none(name: str) -> None:
    options = loss_options(beta=0.3, label_smoothing=0.2)
    repeated = [pair_logps(side.chosen[[0, 1, 1]], side.rejected[[0, 1, 1]]) for side in (POLICY, REFERENCE)]
    expected = function(name)(*repeated, options, weights(1, 1, 1))
    values = function(name)(POLICY, REFERENCE, options, weights(1, 2, 0))
    assert float(values[1]) == pytest.approx(float(expected[1] + expected[2]))
    assert float(values[0]) == pytest.approx(float(expected[0])) and float(values[2]) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_fractional_weights_split_mass_between_quantiles(name: str) -> None:
    options = loss_options(beta=0.3)
    halves = function(name)(POLICY, REFERENCE, options, weights(0.5, 0.5, 0.5))
    whole = function(name)(POLICY, REFERENCE, options, weights(1, 1, 1))
    torch.testing.assert_close(halves, whole / 2)
    assert not function(name)(POLICY, REFERENCE, options, weights(0, 0, 0)).any()


@pytest.mark.parametrize("name", NAMES)
def test_extreme_logratios_stay_finite(name: str) -> None:
    """One pair of +1e4 and one of -1e4 on both sides: sorted, the right one meets the wrong one."""
    chosen = torch.tensor([1e4, -1e4], dtype=torch.float64, requires_grad=True)
    policy, zero = pair_logps(chosen, [-1e4, 1e4]), pair_logps([0.0, 0.0], [0.0, 0.0])
    values = function(name)(policy, zero, loss_options(beta=0.1), weights(1, 1))
    (slopes,) = torch.autograd.grad(values.sum(), chosen)
    # aot: margins +-2e4 against 0 and 0; unpaired: +-1e4 against +-1e4.
    expected = [0.0, 2_000.0] if name == "aot" else [log(2), log(2)]
    assert values.tolist() == pytest.approx(expected)
    assert slopes.tolist() == pytest.approx([0.0, -0.1] if name == "aot" else [-0.05, -0.05])
