"""Losses without a reference, against plain transcriptions of the papers' formulas in Python floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log, nan

import pytest
import torch
from support.loss_options import function, loss_options, pair_logps

from dpo_pack.recipe.training import LOSSES

NAMES = tuple(name for name, loss in LOSSES.items() if not loss.needs_reference)
OPTIONS = loss_options(beta=0.4, simpo_gamma=0.3, cpo_alpha=0.7, mean_chosen_tokens=2.5)
# Summed log-probs and token counts of three pairs.
CHOSEN, CHOSEN_TOKENS = [-12.0, -3.5, -0.02], [4, 2, 3]
REJECTED, REJECTED_TOKENS = [-9.0, -8.0, -40.0], [3, 5, 4]


POLICY = pair_logps(CHOSEN, REJECTED, (CHOSEN_TOKENS, REJECTED_TOKENS))
NOTHING = pair_logps([nan] * 3, [nan] * 3)  # what stands in for the reference must not matter


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def sft(pair: int) -> float:
    """A token mean over the step: the sum over pairs of this, divided by pairs, has all tokens below it."""
    return -CHOSEN[pair] / 2.5


def simpo(pair: int) -> float:
    """Meng et al. 2024, eq. 6."""
    chosen = 0.4 / CHOSEN_TOKENS[pair] * CHOSEN[pair]
    rejected = 0.4 / REJECTED_TOKENS[pair] * REJECTED[pair]
    return -log(sigmoid(chosen - rejected - 0.3))


def orpo(pair: int) -> float:
    """Hong et al. 2024, eq. 3 to 7."""

    def probability(logps: float, tokens: int) -> float:
        return exp(logps / tokens)

    def odds(p: float) -> float:
        return p / (1 - p)

    chosen = probability(CHOSEN[pair], CHOSEN_TOKENS[pair])
    rejected = probability(REJECTED[pair], REJECTED_TOKENS[pair])
    return -log(chosen) + 0.4 * -log(sigmoid(log(odds(chosen) / odds(rejected))))


def cpo(pair: int) -> float:
    """Xu et al. 2024, eq. 3 and 5, the likelihood a mean over tokens."""
    return -log(sigmoid(0.4 * CHOSEN[pair] - 0.4 * REJECTED[pair])) + 0.7 * -CHOSEN[pair] / 2.5


@pytest.mark.parametrize("formula", [sft, simpo, orpo, cpo])
def test_a_loss_is_the_paper_s_formula(formula: Callable[[int], float]) -> None:
    values = function(formula.__name__)(POLICY, NOTHING, OPTIONS)
    assert values.dtype == torch.float64
    assert values.tolist() == pytest.approx([formula(pair) for pair in range(3)], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "logit", "likelihood"),
    [("simpo", 0.4 * (-12 / 4 + 9 / 3) - 0.3, 0.0), ("cpo", 0.4 * (-12 + 9), 0.7 * 12 / 2.5)],
)
def test_smoothed_labels_are_trl_s(name: str, logit: float, likelihood: float) -> None:
    value = function(name)(POLICY, NOTHING, replace(OPTIONS, label_smoothing=0.2))[0]
    assert float(value) == pytest.approx(
        -0.8 * log(sigmoid(logit)) - 0.2 * log(sigmoid(-logit)) + likelihood, rel=1e-12
    )


def test_cpo_without_likelihood_asks_for_no_token_count() -> None:
    values = function("cpo")(POLICY, NOTHING, loss_options(beta=0.4, cpo_alpha=0.0))
    assert float(values[0]) == pytest.approx(-log(sigmoid(0.4 * -3)))
    assert function("sft")(POLICY, NOTHING, loss_options(beta=0.4)).isnan().all()


# At log-probs of (0, -1e4) and (-1e4, 0), of 4 and 3 tokens: value and slope in the chosen log-prob. With
# certain completions odds are infinite; the orpo term then is log(1 - P) of the clamped P.
EXTREMES = {
    "sft": ((0.0, -0.4), (4_000.0, -0.4)),
    "simpo": ((0.0, 0.0), (1_000.3, -0.1)),
    "orpo": ((0.0, -0.25), (2_500 + 0.4 * (2_500 - log(1e-9)), -0.25 - 0.1)),
    "cpo": ((0.0, -0.28), (4_000 + 2_800, -0.4 - 0.28)),
}


@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_probs_stay_finite(name: str) -> None:
    assert name in EXTREMES, f"add {name} to EXTREMES in tests/losses/test_reference_free.py"
    for (chosen, rejected), (value, slope) in zip(([0.0, -1e4], [-1e4, 0.0]), EXTREMES[name], strict=True):
        leaves = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (chosen, rejected)]
        loss = function(name)(pair_logps(leaves[0], leaves[1], (4, 3)), NOTHING, OPTIONS)
        gradients = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
        assert loss.item() == pytest.approx(value, rel=1e-9, abs=1e-9)
        assert gradients[0].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)
        assert gradients[1].isfinite()
