"""f-divergences: scores by hand, limits in alpha, logratios beyond what exp can hold."""

from __future__ import annotations

from math import exp, log
from typing import get_args

import pytest
import torch

from dpo_pack.losses.preference import DIVERGENCES
from dpo_pack.recipe.schema import LossRecipe

LOGRATIOS = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reverse_kl", [2.0, 0.0, -1.0]),
        ("forward_kl", [1 - exp(-2), 0.0, 1 - exp(1)]),
        ("js_divergence", [log(2 * exp(2) / (exp(2) + 1)), 0.0, log(2 * exp(-1) / (exp(-1) + 1))]),
        ("alpha_divergence", [2 - 2 * exp(-1), 0.0, 2 - 2 * exp(0.5)]),
    ],
)
def test_a_score_is_what_its_formula_gives_by_hand(name: str, expected: list[float]) -> None:
    assert DIVERGENCES[name](LOGRATIOS, 0.5).tolist() == pytest.approx(expected, abs=1e-14)


def test_the_recipe_names_the_divergences_there_are() -> None:
    assert set(get_args(LossRecipe.model_fields["f_divergence"].annotation)) == set(DIVERGENCES)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_scores_rise_with_the_logratio_and_stay_finite_at_extremes(name: str) -> None:
    logratios = torch.tensor([-1e4, -9e3, -650.0, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
    scores = DIVERGENCES[name](logratios, 0.1)
    (slopes,) = torch.autograd.grad(scores.sum(), logratios)
    assert torch.isfinite(scores).all() and torch.isfinite(slopes).all()
    assert (scores.diff() > 0).all() and (slopes > 0).all()
    far = torch.tensor([1e4], dtype=torch.float64)
    bound = {"reverse_kl": 1e4, "forward_kl": 1.0, "js_divergence": log(2), "alpha_divergence": 1 / 0.9}
    assert DIVERGENCES[name](far, 0.1).item() == pytest.approx(bound[name])


def test_a_score_that_float64_holds_is_exact() -> None:
    logratios = torch.tensor([-599.0, -100.0], dtype=torch.float64)
    assert DIVERGENCES["forward_kl"](logratios, 0.5).tolist() == pytest.approx([-exp(599), -exp(100)])


def test_a_pair_too_wrong_for_float32_gives_a_gradient_that_is_not_finite() -> None:
    """So that the step is stopped or skipped, instead of going on as if the pair were not there."""
    logprob = torch.tensor([-1e4], dtype=torch.float32, requires_grad=True)
    DIVERGENCES["forward_kl"](logprob.double(), 0.5).sum().backward()
    assert logprob.grad is not None and not torch.isfinite(logprob.grad).any()
