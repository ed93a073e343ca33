"""The preference losses: pure functions of the log-probs of P pairs, one value for each pair, [P]. The
objective of a run is a weighted sum of them; WPO also weights the pairs.

In the formulas `logratio` is log pi(y|x) - log pi_ref(y|x), `reward` is beta * logratio, and `margin` is the
chosen score minus the rejected score. A score is the logratio, or what `options.f_divergence` makes of it.

To add a loss, see CONTRIBUTING.md. Write -F.logsigmoid(x), not F.softplus(-x), which torch rounds to a
straight line above 20. An option is named `<loss>_<option>` unless several losses share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpo_pack.system.errors import RecipeError, first_line
from dpo_pack.system.process import load_function


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLogps:
    """Summed completion log-probs of P pairs under one model, and the number of tokens in each sum."""

    chosen: Tensor  # [P] float64, nats
    rejected: Tensor  # [P] float64, nats
    chosen_tokens: Tensor  # [P] float64, above 0
    rejected_tokens: Tensor  # [P] float64, above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The options that loss functions read, named as in `LossRecipe.options`. They have no defaults, so
    that an option that only one of the two classes has raises a TypeError."""

    beta: float
    label_smoothing: float
    f_divergence: str  # name in DIVERGENCES
    f_alpha: float
    discopop_tau: float
    simpo_gamma: float
    cpo_alpha: float
    # Of the chosen completions of the global step; each step sets it. If a loss divides each pair's value by
    # this number, the mean over pairs becomes a mean over all chosen tokens.
    mean_chosen_tokens: float = math.nan


# (policy, reference, options) -> [P], one value for each pair
LossFunction = Callable[[PairLogps, PairLogps, LossOptions], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss of a run: terms, the factor of each term, and the options of all terms."""

    terms: tuple[tuple[LossFunction, float], ...]
    options: LossOptions
    needs_reference: bool  # False: the reference log-probs are zeros, and no model computes them
    weighting: str | None  # "wpo": `wpo_weights` multiply the pair weights of the data

    def __call__(self, policy: PairLogps, reference: PairLogps, *, mean_chosen_tokens: float) -> Tensor:
        """Returns the loss of each pair, [P]. The loss of a step is the mean of its pairs' values, each times
        the pair's weight. `mean_chosen_tokens`: of the global step."""
        options = replace(self.options, mean_chosen_tokens=mean_chosen_tokens)
        values = (factor * function(policy, reference, options) for function, factor in self.terms)
        return sum(values, start=torch.zeros_like(policy.chosen))


def sigmoid(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """DPO, Rafailov et al. 2023 (arXiv 2305.18290), eq. 7:

    -log sigmoid(beta (log pi(y_w|x) - log pi_ref(y_w|x)) - beta (log pi(y_l|x) - log pi_ref(y_l|x))),
    where y_w is the chosen and y_l the rejected completion of prompt x. Takes [P] log-probs, returns [P].
    With label smoothing e the loss is cDPO, Mitchell 2023 (ericmitchell.ai/cdpo.pdf), eq. 3:
    -(1 - e) log sigmoid(beta * margin) - e log sigmoid(-beta * margin).
    """
    if options.f_divergence == "reverse_kl" and options.label_smoothing == 0.0:
        margin = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)  # [P]
        return -F.logsigmoid(options.beta * margin)  # [P]
    return mixed_logistic(options.beta * _margin(policy, reference, options), options.label_smoothing)


def robust(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """Robust DPO, Chowdhury et al. 2024 (arXiv 2403.00409), sec. 3.1, for labels swapped with probability e:

    (-(1 - e) log sigmoid(beta * margin) + e log sigmoid(-beta * margin)) / (1 - 2 e).
    Its mean over random swaps equals the loss without swaps. It has no lower bound.
    """
    swapped = options.label_smoothing
    return mixed_logistic(options.beta * _margin(policy, reference, options), -swapped / (1 - 2 * swapped))


def hinge(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """SLiC's hinge on DPO's margin, Zhao et al. 2023 (arXiv 2305.10425), eq. 1 in the form of Liu et al.
    2023 (arXiv 2309.06657), sec. 3: max(0, 1 - beta * margin)."""
    return F.relu(1 - options.beta * _margin(policy, reference, options))


def ipo(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """IPO, Azar et al. 2023 (arXiv 2310.12036), eq. 17: (margin - 1 / (2 beta))^2.

    Each score is divided by the tokens of its completion, as the paper's authors confirmed to TRL.
    """
    return (_margin_per_token(policy, reference, options) - 1 / (2 * options.beta)).square()


def exo_pair(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """EXO-pref, Ji et al. 2024 (arXiv 2402.00856), eq. 16 for two completions: KL(p || (1 - e, e)).

    p is (sigmoid(beta * margin), sigmoid(-beta * margin)), and e > 0 is the label smoothing.
    """
    assert options.label_smoothing > 0, "its logarithm is taken"
    logits = options.beta * _margin(policy, reference, options)
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-options.label_smoothing))
    rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(options.label_smoothing))
    return chosen + rejected


def nca_pair(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """NCA for preference pairs, Chen et al. 2024 (arXiv 2402.05369), sec. 4.1, where beta is called alpha:

    -log sigmoid(chosen reward) - log sigmoid(-chosen reward) / 2 - log sigmoid(-rejected reward) / 2.
    """
    chosen, rejected = _rewards(policy, reference, options)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """BCO's binary cross-entropy, Jung et al. 2024 (arXiv 2404.04656), the bound of theorem 1:

    -log sigmoid(chosen reward) - log sigmoid(-rejected reward).
    This is TRL's form. The paper also shifts both rewards by a running mean, which depends on earlier steps.
    """
    chosen, rejected = _rewards(policy, reference, options)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """SPPO, Wu et al. 2024 (arXiv 2405.00675), eq. 4.7 with eta = 1 / beta:

    (chosen logratio - 1 / (2 beta))^2 + (rejected logratio + 1 / (2 beta))^2.
    This is TRL's form: win probabilities are 1 and 0, and the reference does not change.
    """
    target = 1 / (2 * options.beta)
    chosen, rejected = policy.chosen - reference.chosen, policy.rejected - reference.rejected
    return (chosen - target).square() + (rejected + target).square()


def apo_zero(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """APO-zero, D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 7:

    -sigmoid(chosen reward) + sigmoid(rejected reward) + 1, for chosen completions that are better than
    those of the model. The 1 is not in the paper; TRL adds it so that the loss is above 0.
    """
    chosen, rejected = _rewards(policy, reference, options)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """APO-down, D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 8, with TRL's 1:

    sigmoid(chosen reward) - sigmoid(chosen reward - rejected reward) + 1, for chosen completions that
    are worse than those of the model.
    """
    chosen, rejected = _rewards(policy, reference, options)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def discopop(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """DiscoPOP, Lu et al. 2024 (arXiv 2406.08414), eq. 5: with x = beta * margin, g = sigmoid(x / tau),

    -(1 - g) log sigmoid(x) + g exp(-x).
    At x = 0 it lowers margins if tau is below about 0.1. For tau > 1, g exp(-x) can overflow for x < 0.
    """
    logits = options.beta * _margin(policy, reference, options)
    modulation = logits / options.discopop_tau
    # With one exp, because g * exp(-x) could be 0 * inf for a pair in the wrong order.
    exponential = torch.exp(F.logsigmoid(modulation) - logits)
    return exponential - torch.sigmoid(-modulation) * F.logsigmoid(logits)


def sigmoid_norm(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """Length-normalised DPO, Lambert et al. 2024 (Tulu 3, arXiv 2411.15124), eq. 6.

    -log sigmoid(beta * (chosen score / chosen tokens - rejected score / rejected tokens)).
    """
    return -F.logsigmoid(options.beta * _margin_per_token(policy, reference, options))


# ---- Losses without a reference: no reference pass runs, and the `reference` log-probs are zeros


def sft(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """Negative log-likelihood of the chosen completions: a mean over the chosen tokens of the global step.

    -log pi(y_w|x) / mean chosen tokens of the step, so that its mean over pairs is a mean over tokens. The
    sum of `sigmoid` and `sft` is RPO, Liu et al. 2024 (arXiv 2405.16436), eq. 9, up to this normalisation.
    """
    return -policy.chosen / options.mean_chosen_tokens


def simpo(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """SimPO, Meng et al. 2024 (arXiv 2405.14734), eq. 6:

    -log sigmoid(beta / |y_w| log pi(y_w|x) - beta / |y_l| log pi(y_l|x) - gamma), labels smoothed as in TRL.
    """
    chosen, rejected = _mean_logps(policy)
    logits = options.beta * (chosen - rejected) - options.simpo_gamma
    return mixed_logistic(logits, options.label_smoothing)


def orpo(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """ORPO, Hong et al. 2024 (arXiv 2403.07691), eq. 6 and 7; beta is the paper's lambda:

    -log P(y_w|x) - beta * log sigmoid(log(odds(y_w|x) / odds(y_l|x))), where odds = P / (1 - P), and log P is
    the mean log-prob of a completion's tokens (eq. 3).
    """
    chosen, rejected = _mean_logps(policy)
    return -chosen - options.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def cpo(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """CPO, Xu et al. 2024 (arXiv 2401.08417), eq. 3 and 5: a preference term plus cpo_alpha times `sft`.

    -log sigmoid(beta * (log pi(y_w|x) - log pi(y_l|x))) - cpo_alpha * log pi(y_w|x). The second term is a
    mean over tokens, as in the authors' code and TRL. Labels are smoothed as in TRL.
    """
    logits = options.beta * (policy.chosen - policy.rejected)
    preference = mixed_logistic(logits, options.label_smoothing)
    if options.cpo_alpha == 0.0:
        return preference
    return preference + options.cpo_alpha * sft(policy, reference, options)


# ---- Terms that losses share


def mixed_logistic(logits: Tensor, swapped: float) -> Tensor:
    """Returns -(1 - swapped) log sigmoid(logits) - swapped log sigmoid(-logits), in the shape of `logits`."""
    loss = -F.logsigmoid(logits) * (1 - swapped)
    if swapped != 0.0:  # 0 * inf is NaN for infinite margins
        loss = loss - F.logsigmoid(-logits) * swapped
    return loss


def _rewards(policy: PairLogps, reference: PairLogps, options: LossOptions) -> tuple[Tensor, Tensor]:
    chosen, rejected = policy.chosen - reference.chosen, policy.rejected - reference.rejected
    return options.beta * chosen, options.beta * rejected


def _scores(policy: PairLogps, reference: PairLogps, options: LossOptions) -> tuple[Tensor, Tensor]:
    score = DIVERGENCES[options.f_divergence]
    chosen, rejected = policy.chosen - reference.chosen, policy.rejected - reference.rejected
    return score(chosen, options.f_alpha), score(rejected, options.f_alpha)


def _margin(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    chosen, rejected = _scores(policy, reference, options)
    return chosen - rejected


def _margin_per_token(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    chosen, rejected = _scores(policy, reference, options)
    return chosen / policy.chosen_tokens - rejected / policy.rejected_tokens


def _mean_logps(policy: PairLogps) -> tuple[Tensor, Tensor]:
    return policy.chosen / policy.chosen_tokens, policy.rejected / policy.rejected_tokens


def _log_odds(mean_logps: Tensor) -> Tensor:
    """Returns log(P / (1 - P)) of log P <= 0."""
    mean_logps = mean_logps.clamp(max=-1e-9)  # in fp32 P can round to 1, with infinite odds
    return mean_logps - torch.log(-torch.expm1(mean_logps))


# ---- Scores of logratios
# The f-divergence decides which score a loss uses instead of a logratio: Wang et al. 2023, arXiv 2309.16240,
# table 1. A score is f'(t) for t = exp(logratio), plus a constant that makes the score zero at t = 1. It must
# be this constant in losses that divide scores by token counts, because there it does not cancel.


def reverse_kl(logratio: Tensor, alpha: float) -> Tensor:
    """f(t) = t log t; the score is the logratio, as in DPO."""
    return logratio


def forward_kl(logratio: Tensor, alpha: float) -> Tensor:
    """f(t) = -log t, score 1 - 1 / t."""
    return -_expm1(-logratio)


def js_divergence(logratio: Tensor, alpha: float) -> Tensor:
    """f(t) = t log t - (t + 1) log((t + 1) / 2), score log(2 t / (1 + t))."""
    return math.log(2) + F.logsigmoid(logratio)


def alpha_divergence(logratio: Tensor, alpha: float) -> Tensor:
    """Score (t^(alpha - 1) - 1) / (alpha - 1) for 0 < alpha < 1, TRL's form; alpha is 1 - the paper's.

    It tends to reverse KL's score for alpha -> 1, and to forward KL's for alpha -> 0.
    """
    return _expm1((alpha - 1) * logratio) / (alpha - 1)


def _expm1(exponent: Tensor) -> Tensor:
    """Returns exp(exponent) - 1 in float64; above 600 its tangent at 600, because exp overflows at 709.

    So a huge positive margin has loss 0 and slope 0, not NaN; a huge negative one makes a step not finite.
    """
    limit = 600.0  # leaves room for the losses
    return torch.expm1(exponent.clamp(max=limit)) + math.exp(limit) * F.relu(exponent - limit)


# Functions (logratio [P] in nats, alpha) -> score [P].
DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    score.__name__: score for score in (reverse_kl, forward_kl, js_divergence, alpha_divergence)
}


# ---- The objective of a run


def make_objective(
    terms: Iterable[tuple[str, float]],
    options: Mapping[str, Any],
    *,
    needs_reference: bool = True,
    weighting: str | None = None,
) -> Objective:
    """Makes the objective of a run from (name, factor) terms; `options` are the fields of `LossOptions`.
    Raises RecipeError if a loss that the user wrote cannot be used."""
    loss_options, functions = LossOptions(**options), []
    for name, factor in terms:
        functions.append((_user_loss(name, loss_options) if ":" in name else globals()[name], factor))
    return Objective(
        terms=tuple(functions), options=loss_options, needs_reference=needs_reference, weighting=weighting
    )


def wpo_weights(alignment: Tensor, num_tokens: Tensor) -> Tensor:
    """WPO weights, Zhou et al. 2024 (arXiv 2406.11827), eq. 2: large if both completions are likely.

    alignment: [P, 2], for each completion the sum over its tokens of log p(y_t) - log sum_v p(v)^2.
    num_tokens: [P, 2]. Returns [P] detached w(y_w|x) * w(y_l|x), where w(y|x) = exp(alignment / num_tokens).
    """
    return torch.exp((alignment.detach() / num_tokens).sum(dim=1))


def _user_loss(name: str, options: LossOptions) -> LossFunction:
    """Returns `module:function` of the user, after a try on made-up pairs. Raises RecipeError."""
    function = load_function(name, "loss.type")
    try:
        required = _unmet_requirement(function, options)
    except Exception as error:
        raise RecipeError(
            f"loss.type: {name} failed on made-up pairs: {type(error).__name__}: {first_line(error)}; "
            "dpo-pack calls it as function(policy, reference, options), see docs/losses.md"
        ) from error
    if required is not None:
        raise RecipeError(f"loss.type: {name} must return {required}")
    return function


def _unmet_requirement(function: LossFunction, options: LossOptions) -> str | None:
    def made_up(logps: Tensor, pairs: Sequence[int] = (0, 1, 2)) -> PairLogps:
        """Returns `pairs` of three. logps: [(chosen, rejected), 3] in nats."""
        tokens = torch.tensor([[7, 12, 3], [9, 14, 5]], dtype=torch.float64)
        names = ("chosen", "rejected", "chosen_tokens", "rejected_tokens")
        return PairLogps(**dict(zip(names, torch.cat((logps, tokens))[:, list(pairs)], strict=True)))

    policy = torch.tensor([[-20, -35, -8], [-9, -36, -21]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-21, -33, -9], [-10, -34, -22]], dtype=torch.float64)
    values = function(made_up(policy), made_up(reference), options)
    if not isinstance(values, Tensor) or values.shape != (3,):
        shape = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        return f"one value a pair, shape (3,) for three pairs, not {shape}"
    if not values.is_floating_point() or not values.requires_grad:
        return "values that are differentiable in policy.chosen and policy.rejected"
    alone = [function(made_up(policy, [i]), made_up(reference, [i]), options) for i in range(3)]
    if not torch.allclose(torch.cat(alone), values, equal_nan=True):
        return "for each pair a value that does not depend on the other pairs, which the packer chooses"
    return None
