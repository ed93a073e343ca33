"""The objective of a run: a weighted sum of losses; WPO's pair weights. Legend: P pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
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
        total = torch.zeros_like(policy.chosen)
        for function, factor in self.terms:
            total = total + factor * function(policy, reference, options)
        return total


def make_objective(
    terms: Iterable[tuple[str, float]],
    options: Mapping[str, Any],
    *,
    needs_reference: bool = True,
    weighting: str | None = None,
) -> Objective:
    """Makes the objective of a run from (name, factor) terms; `options` are the fields of `LossOptions`.
    Raises RecipeError if a loss that the user wrote cannot be used."""
    loss_options = LossOptions(**options)
    return Objective(
        terms=tuple((_load_loss(name, loss_options), factor) for name, factor in terms),
        options=loss_options,
        needs_reference=needs_reference,
        weighting=weighting,
    )


def wpo_weights(alignment: Tensor, num_tokens: Tensor) -> Tensor:
    """WPO weights, Zhou et al. 2024 (arXiv 2406.11827), eq. 2: large if both completions are likely.

    alignment: [P, 2], for each completion the sum over its tokens of log p(y_t) - log sum_v p(v)^2.
    num_tokens: [P, 2]. Returns [P] detached w(y_w|x) * w(y_l|x), where w(y|x) = exp(alignment / num_tokens).
    """
    return torch.exp((alignment.detach() / num_tokens).sum(dim=1))


def _load_loss(name: str, options: LossOptions) -> LossFunction:
    """Returns the function of a loss in preference.py, or one that the user wrote, `module:function`, after a
    try on made-up pairs. Raises RecipeError."""
    if ":" not in name:
        return load_function(f"dpo_pack.losses.preference:{name}", "loss.type")
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
