"""Losses of log-ratios to a reference: by hand, gradients, extreme margins; what a run minimises of them."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from math import exp, log
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.loss_options import function, loss_options, pair_logps, softplus
from torch import Tensor

from dpo_pack.losses import preference
from dpo_pack.losses.preference import DIVERGENCES, LossOptions, make_objective, mixed_logistic, wpo_weights
from dpo_pack.model.scorer import RowLogps
from dpo_pack.recipe.training import LOSSES, LossRecipe
from dpo_pack.training.batches import PairRow
from dpo_pack.training.step_loss import pair_losses

NAMES = tuple(name for name, loss in LOSSES.items() if loss.needs_reference)


def options_for(name: str, *, beta: float, label_smoothing: float = 0.0) -> LossOptions:
    """exo_pair takes the logarithm of its label smoothing."""
    if name == "exo_pair":
        label_smoothing = label_smoothing or 0.1
    return loss_options(beta=beta, label_smoothing=label_smoothing)


def logistic(x: float) -> float:
    return 1 / (1 + exp(-x))


# One pair: logratios +2 (chosen, 4 tokens) and -1 (rejected, 2 tokens), so a margin of 3 and one of
# 2 / 4 - -1 / 2 = 1 a token. beta = 0.5: rewards 1 and -0.5.
POLICY = pair_logps(-10.0, -8.0)
REFERENCE = pair_logps(-12.0, -7.0)


@pytest.mark.parametrize(
    ("name", "label_smoothing", "expected"),
    [
        ("sigmoid", 0.0, softplus(-1.5)),
        ("sigmoid", 0.2, 0.8 * softplus(-1.5) + 0.2 * softplus(1.5)),
        ("robust", 0.0, softplus(-1.5)),
        ("robust", 0.2, (0.8 * softplus(-1.5) - 0.2 * softplus(1.5)) / 0.6),
        ("hinge", 0.0, 0.0),  # max(0, 1 - 0.5 * 3)
        ("ipo", 0.0, 0.0),  # (1 - 1 / (2 * 0.5))^2
        (
            "exo_pair",
            0.2,
            logistic(1.5) * log(logistic(1.5) / 0.8) + logistic(-1.5) * log(logistic(-1.5) / 0.2),
        ),
        ("nca_pair", 0.0, softplus(-1) + softplus(1) / 2 + softplus(-0.5) / 2),
        ("bco_pair", 0.0, softplus(-1) + softplus(-0.5)),
        ("sppo_hard", 0.0, 1.0),  # (2 - 1)^2 + (-1 + 1)^2
        ("apo_zero", 0.0, 1 - logistic(1) + logistic(-0.5)),
        ("apo_down", 0.0, logistic(1) + 1 - logistic(1.5)),
        ("discopop", 0.0, logistic(-30) * softplus(-1.5) + logistic(30) * exp(-1.5)),  # 1.5 / 0.05 = 30
        ("sigmoid_norm", 0.0, softplus(-0.5)),
    ],
)
def test_a_loss_is_what_its_formula_gives_by_hand(name: str, label_smoothing: float, expected: float) -> None:
    options = loss_options(beta=0.5, label_smoothing=label_smoothing)
    value = function(name)(POLICY, REFERENCE, options)
    assert value.shape == (1,) and value.dtype == torch.float64
    assert float(value) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sigmoid", softplus(0.3)),
        ("robust", softplus(0.3)),
        ("hinge", 1.3),  # 1 - 0.1 * -3
        ("ipo", 36.0),  # (-2 / 4 - 1 / 2 - 1 / 0.2)^2
        ("exo_pair", logistic(-0.3) * log(logistic(-0.3) / 0.9) + logistic(0.3) * log(logistic(0.3) / 0.1)),
        ("nca_pair", softplus(0.2) + softplus(-0.2) / 2 + softplus(0.1) / 2),
        ("bco_pair", softplus(0.2) + softplus(0.1)),
        ("sppo_hard", 85.0),  # (-2 - 5)^2 + (1 + 5)^2
        ("apo_zero", 1 - logistic(-0.2) + logistic(0.1)),
        ("apo_down", logistic(-0.2) + 1 - logistic(-0.3)),
        ("discopop", logistic(6) * softplus(0.3) + logistic(-6) * exp(0.3)),  # -0.3 / 0.05 = -6
        ("sigmoid_norm", softplus(0.1)),
    ],
)
def test_a_pair_in_the_wrong_order_costs_what_the_formula_gives_by_hand(name: str, expected: float) -> None:
    """Policy and reference exchanged: a margin of -3, and of -1 a token; rewards -0.2 and 0.1."""
    value = function(name)(REFERENCE, POLICY, options_for(name, beta=0.1))
    assert float(value) == pytest.approx(expected, abs=1e-12)


# The losses that put a divergence's scores in the place of logratios, of those there are.
WITH_DIVERGENCE = tuple(name for name in NAMES if name in LOSSES and LOSSES[name].takes_divergences)
OTHER_DIVERGENCES = tuple(name for name in DIVERGENCES if name != "reverse_kl")


@pytest.mark.parametrize(
    ("name", "label_smoothing", "divergence"),
    [
        *((name, label_smoothing, "reverse_kl") for name in LOSSES for label_smoothing in (0.0, 0.1)),
        *((name, 0.0, divergence) for name in WITH_DIVERGENCE for divergence in OTHER_DIVERGENCES),
    ],
)
def test_gradients_are_those_of_the_formula(name: str, label_smoothing: float, divergence: str) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 5 if divergence == "reverse_kl" else 1
    chosen, rejected = size * torch.randn(2, 6, generator=generator, dtype=torch.float64)
    zeros = torch.zeros(6, dtype=torch.float64)
    options = options_for(name, beta=0.3, label_smoothing=label_smoothing)
    options = replace(options, f_divergence=divergence, mean_chosen_tokens=2.5)

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        policy, reference = pair_logps(chosen - 40, rejected - 40), pair_logps(zeros - 40, zeros - 40)
        return function(name)(policy, reference, options)

    assert torch.autograd.gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))


def slopes(name: str, chosen: float, rejected: float, *, beta: float = 0.1) -> tuple[float, float]:
    """Of the loss in the logratios."""
    sides = [torch.tensor([side], dtype=torch.float64, requires_grad=True) for side in (chosen, rejected)]
    loss = function(name)(pair_logps(sides[0], sides[1]), pair_logps(0.0, 0.0), options_for(name, beta=beta))
    gradients = torch.autograd.grad(loss.sum(), sides)
    return gradients[0].item(), gradients[1].item()


# For logratios of +-10,000 on both sides: a margin of +-20,000, of +-7,500 a token; beta = 0.1, so rewards of
# +-1,000. Loss and the size of its slope in the chosen log-prob, for the right order and for the wrong one.
EXTREMES = {
    "sigmoid": ((0.0, 0.0), (2_000.0, 0.1)),
    "robust": ((0.0, 0.0), (2_000.0, 0.1)),
    "hinge": ((0.0, 0.0), (2_001.0, 0.1)),
    "ipo": ((7_495.0**2, 3_747.5), (7_505.0**2, 3_752.5)),
    "exo_pair": ((-log(0.9), 0.0), (-log(0.1), 0.0)),
    "nca_pair": ((500.0, 0.05), (1_500.0, 0.1)),
    "bco_pair": ((0.0, 0.0), (2_000.0, 0.1)),
    "sppo_hard": ((2 * 9_995.0**2, 19_990.0), (2 * 10_005.0**2, 20_010.0)),
    "apo_zero": ((0.0, 0.0), (2.0, 0.0)),
    "apo_down": ((1.0, 0.0), (1.0, 0.0)),
    "discopop": ((0.0, 0.0), (2_000.0, 0.1)),
    "sigmoid_norm": ((0.0, 0.0), (750.0, 0.025)),
}


@pytest.mark.parametrize("name", NAMES)
def test_extreme_logratios_give_the_finite_values_and_slopes_of_the_mathematics(name: str) -> None:
    assert name in EXTREMES, f"add {name} to EXTREMES in tests/losses/test_losses.py"
    for sign, (expected_loss, expected_slope) in zip((1, -1), EXTREMES[name], strict=True):
        chosen = torch.tensor([sign * 1e4], dtype=torch.float64, requires_grad=True)
        policy = pair_logps(chosen, -sign * 1e4)
        loss = function(name)(policy, pair_logps(0.0, 0.0), options_for(name, beta=0.1))
        (slope,) = torch.autograd.grad(loss.sum(), chosen)
        assert loss.item() == pytest.approx(expected_loss, abs=1e-9)
        assert abs(slope.item()) == pytest.approx(expected_slope, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "expected_losses", "expected_slopes"),
    [
        ("sigmoid", [500.0, 1_500.0], [0.025, -0.075]),
        ("robust", [-1_000.0, 3_000.0], [-0.05, -0.15]),  # (0.75 * 0 - 0.25 * 2,000) / 0.5
    ],
)
def test_extreme_logratios_stay_finite_with_label_smoothing(
    name: str, expected_losses: list[float], expected_slopes: list[float]
) -> None:
    chosen = torch.tensor([1e4, -1e4], dtype=torch.float64, requires_grad=True)
    policy = pair_logps(chosen, [-1e4, 1e4])
    options = loss_options(beta=0.1, label_smoothing=0.25)
    loss = function(name)(policy, pair_logps([0.0, 0.0], [0.0, 0.0]), options)
    (gradient,) = torch.autograd.grad(loss.sum(), chosen)
    assert loss.tolist() == pytest.approx(expected_losses)
    assert gradient.tolist() == pytest.approx(expected_slopes)


def test_an_infinite_margin_without_label_smoothing_is_no_nan() -> None:
    policy = pair_logps(0.0, -torch.inf)
    assert function("sigmoid")(policy, pair_logps(0.0, 0.0), loss_options(beta=0.1)).item() == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_s_loss_does_not_depend_on_the_other_pairs(name: str) -> None:
    options = options_for(name, beta=0.1)
    policy, reference = pair_logps([-10.0, -3.0], [-8.0, -9.0]), pair_logps([-12.0, -4.0], [-7.0, -5.0])
    alone = function(name)(pair_logps(-3.0, -9.0), pair_logps(-4.0, -5.0), options)
    assert torch.equal(function(name)(policy, reference, options)[1:], alone)


class Watched:
    """Stands in for a value, and notes which of its attributes are read."""

    def __init__(self, value: object) -> None:
        self.value, self.read = value, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.value, name)


def test_each_loss_and_each_option_is_in_all_tables() -> None:
    """A forgotten line is named: the function, LossRecipe or LossOptions."""
    options = {option for loss in LOSSES.values() for option in loss.options}
    assert not [name for name in LOSSES if not hasattr(preference, name)], "losses/preference.py"
    assert options <= LossRecipe().options.keys(), "add it to LossRecipe in recipe/training.py"
    assert options <= {field.name for field in fields(LossOptions)}, "add it to losses/preference.py"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_declares_all_that_its_function_reads(name: str) -> None:
    declared = LOSSES[name]
    divergence = "alpha_divergence" if declared.takes_divergences else "reverse_kl"
    options: Any = Watched(loss_options(beta=0.5, label_smoothing=0.1, f_divergence=divergence))
    reference: Any = Watched(REFERENCE)
    function(name)(POLICY, reference, options)
    is_measured = declared.takes_divergences and declared.needs_reference
    divergence_options = {"f_divergence", "f_alpha"} if is_measured else set()
    assert options.read - {"beta", "mean_chosen_tokens"} == {*declared.options, *divergence_options}
    assert bool(reference.read) == declared.needs_reference


def test_an_option_that_recipe_or_functions_lack_is_an_error_and_no_silent_default() -> None:
    options = LossRecipe().options
    make_objective([("sigmoid", 1.0)], options)
    for name in options:
        with pytest.raises(TypeError, match=name):
            make_objective([("sigmoid", 1.0)], {key: options[key] for key in options if key != name})
    with pytest.raises(TypeError, match="forgotten"):
        make_objective([("sigmoid", 1.0)], {**options, "forgotten": 1.0})


def test_dpo_written_out_is_bitwise_the_loss_that_takes_smoothing_and_divergences() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (50 * torch.randn(2, 64, generator=generator, dtype=torch.float64)).requires_grad_()
    reference = pair_logps(torch.zeros(64), torch.zeros(64))
    options = loss_options(beta=0.3)
    written_out = function("sigmoid")(pair_logps(chosen, rejected), reference, options)
    general = mixed_logistic(options.beta * (chosen - rejected), 0.0)
    assert torch.equal(written_out, general)
    slopes = [torch.autograd.grad(values.sum(), (chosen, rejected)) for values in (written_out, general)]
    assert all(map(torch.equal, *slopes))


@pytest.mark.parametrize(
    ("divergence", "chosen_score", "rejected_score"),
    [
        ("forward_kl", 1 - exp(-2), 1 - exp(1)),
        ("js_divergence", log(2 * logistic(2)), log(2 * logistic(-1))),
        ("alpha_divergence", (exp(-1.4) - 1) / -0.7, (exp(0.7) - 1) / -0.7),  # alpha = 0.3
    ],
)
def test_a_divergence_replaces_logratios(divergence: str, chosen_score: float, rejected_score: float) -> None:
    options = loss_options(beta=0.5, f_divergence=divergence, f_alpha=0.3)
    loss = function("sigmoid")(POLICY, REFERENCE, options)
    assert float(loss) == pytest.approx(softplus(-0.5 * (chosen_score - rejected_score)), abs=1e-12)
    per_token = chosen_score / 4 - rejected_score / 2
    loss = function("sigmoid_norm")(POLICY, REFERENCE, options)
    assert float(loss) == pytest.approx(softplus(-0.5 * per_token), abs=1e-12)
    loss = function("ipo")(POLICY, REFERENCE, options)
    assert float(loss) == pytest.approx((per_token - 1) ** 2, abs=1e-12)


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "exo_pair", "discopop", "sigmoid_norm"])
@pytest.mark.parametrize("divergence", OTHER_DIVERGENCES)
def test_a_pair_far_on_the_right_side_has_no_slope_in_any_divergence(name: str, divergence: str) -> None:
    """Also where a score is beyond float64, and when both scores are."""
    for chosen_logratio, rejected_logratio in ((1e4, -1e4), (0.0, -1e4), (-3_000.0, -1e4)):
        sides = [
            torch.tensor([side], dtype=torch.float64, requires_grad=True)
            for side in (chosen_logratio, rejected_logratio)
        ]
        options = replace(options_for(name, beta=0.1), f_divergence=divergence)
        policy = pair_logps(sides[0], sides[1], tokens=(2, 2))
        loss = function(name)(policy, pair_logps(0.0, 0.0), options)
        gradients = torch.autograd.grad(loss.sum(), sides)
        assert loss.item() == pytest.approx(-log(0.9) if name == "exo_pair" else 0.0, abs=1e-9)
        assert [gradient.item() for gradient in gradients] == pytest.approx([0.0, 0.0], abs=1e-9)


# --------------------------------------------------------------------------------------- what a run minimises


def losses_of(*terms: tuple[str, float], mean_chosen_tokens: float = 4.0) -> list[float]:
    """Of two pairs of margins 3 and 1."""
    objective = make_objective(terms, asdict(loss_options(beta=0.5)))
    policy, reference = pair_logps([-10.0, -3.0], [-8.0, -9.0]), pair_logps([-12.0, -4.0], [-7.0, -9.0])
    values: list[float] = objective(policy, reference, mean_chosen_tokens=mean_chosen_tokens).tolist()
    return values


def test_a_weighted_sum_adds_its_terms_pair_by_pair() -> None:
    total = losses_of(("sigmoid", 1.0), ("hinge", 0.25))
    assert total == pytest.approx([softplus(-1.5), softplus(-0.5) + 0.25 * 0.5])


def test_likelihood_terms_divide_by_the_step_s_token_count() -> None:
    total = losses_of(("sigmoid", 2.0), ("sft", 0.5), mean_chosen_tokens=8.0)
    assert total == pytest.approx([2 * softplus(-1.5) + 5 / 8, 2 * softplus(-0.5) + 1.5 / 8])


@pytest.mark.parametrize("weighting", [None, "wpo"])
def test_weights_of_pairs_multiply_every_term(weighting: str | None) -> None:
    """Probabilities 1/2 of every token, whose squares sum to 1/4 (chosen) and to 1/2 (rejected)."""
    objective = make_objective([("sigmoid", 1.0)], asdict(loss_options(beta=0.5)), weighting=weighting)
    sums = torch.tensor([-2.0, -3.0, -1.0, -1.0], dtype=torch.float64) * log(2)
    lengths = torch.tensor([2, 3, 1, 1])
    statistics = torch.zeros(4, 5, dtype=torch.float64)
    statistics[:, 3] = torch.tensor([-4.0, -3.0, -2.0, -1.0], dtype=torch.float64) * log(2)
    nothing = torch.zeros(0)
    output = RowLogps(sums, lengths, nothing, statistics, nothing, nothing)
    weights = torch.tensor([3.0, 0.5], dtype=torch.float64)
    row = PairRow(
        row=None,  # type: ignore[arg-type]
        reference=torch.zeros(2, 2, dtype=torch.float64),
        pair_weights=weights,
        pair_indices=np.arange(2),
        score_margins=np.zeros(2),
    )
    plain = [softplus(-0.5 * log(2)), softplus(0.0)]
    times = [2.0, 2.0] if weighting else [1.0, 1.0]
    found = pair_losses(objective, output, row, 1.0)
    assert found.tolist() == pytest.approx([3 * times[0] * plain[0], 0.5 * times[1] * plain[1]])


def test_wpo_weights_by_hand() -> None:
    """Two tokens of probability 1/4 where sum p^2 is 5/8; three tokens whose mean is one half of e^-1."""
    chosen = 2 * (log(1 / 4) - log(5 / 8))
    alignment = torch.tensor([[chosen, -3.0]], dtype=torch.float64, requires_grad=True)
    weights = wpo_weights(alignment, torch.tensor([[2, 3]]))
    assert weights.tolist() == pytest.approx([(1 / 4) / (5 / 8) * exp(-1)])
    assert not weights.requires_grad


LOGRATIOS = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)


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
