"""Preference losses: pure functions of policy and reference log-probs, and the objective of a run.

To add a loss, see CONTRIBUTING.md. Write -F.logsigmoid(x), not F.softplus(-x), which torch rounds to a
straight line above 20. An option is named `<loss>_<option>` unless several losses share it.

`contrastive.py` has the losses that compare a pair with the reference, `reference_free.py` the losses without
a reference, `transport.py` the losses in which the value of a pair depends on the other pairs of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpo_pack.losses import contrastive, reference_free, transport
from dpo_pack.losses.objective import (
    Loss,
    LossOptions,
    Objective,
    PairLogps,
    ScoredPairs,
    length_desensitized_weights,
    weighted_losses,
    wpo_weights,
)
from dpo_pack.system.errors import RecipeError, first_line
from dpo_pack.system.process import load_function

__all__ = [
    "LOSSES", "Loss", "LossOptions", "Objective", "PairLogps", "ScoredPairs",
    "length_desensitized_weights", "load_custom_loss", "make_objective", "weighted_losses", "wpo_weights",
]  # fmt: skip

LOSSES: dict[str, Loss] = {
    "sigmoid": Loss(function=contrastive.sigmoid),
    "robust": Loss(function=contrastive.robust),
    "hinge": Loss(function=contrastive.hinge),
    "ipo": Loss(function=contrastive.ipo),
    "exo_pair": Loss(function=contrastive.exo_pair),
    "nca_pair": Loss(function=contrastive.nca_pair),
    "bco_pair": Loss(function=contrastive.bco_pair),
    "sppo_hard": Loss(function=contrastive.sppo_hard),
    "apo_zero": Loss(function=contrastive.apo_zero),
    "apo_down": Loss(function=contrastive.apo_down),
    "discopop": Loss(function=contrastive.discopop),
    "sigmoid_norm": Loss(function=contrastive.sigmoid_norm),
    "sft": Loss(function=reference_free.sft, needs_reference=False),
    "simpo": Loss(function=reference_free.simpo, needs_reference=False),
    "orpo": Loss(function=reference_free.orpo, needs_reference=False),
    "cpo": Loss(function=reference_free.cpo, needs_reference=False),
    "aot": Loss(function=transport.aot, couples_pairs=True),
    "aot_unpaired": Loss(function=transport.aot_unpaired, couples_pairs=True),
}


def make_objective(
    terms: Iterable[tuple[str, float]],
    options: Mapping[str, Any],
    *,
    weighting: str | None = None,
    ld_alpha: float | None = None,
) -> Objective:
    """Makes the objective of a run from (name, factor) terms; `options` are the fields of `LossOptions`.
    Raises RecipeError if a loss that the user wrote cannot be used."""
    loss_options = LossOptions(**options)
    loaded = tuple(
        (load_custom_loss(name, loss_options) if ":" in name else LOSSES[name], factor)
        for name, factor in terms
    )
    return Objective(terms=loaded, options=loss_options, weighting=weighting, ld_alpha=ld_alpha)


def load_custom_loss(name: str, options: LossOptions) -> Loss:
    """Imports a loss that the user wrote, `module:function`: function(policy, reference, options) -> [P]
    float64 values of each row, differentiable in the policy's log-probs, each of its own pair only. Raises
    RecipeError."""
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
    return Loss(function=function)


def _unmet_requirement(function: Callable[..., Any], options: LossOptions) -> str | None:
    policy = torch.tensor([[-20, -35, -8], [-9, -36, -21]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-21, -33, -9], [-10, -34, -22]], dtype=torch.float64)
    values = function(_made_up(policy), _made_up(reference), options)
    if not isinstance(values, Tensor) or values.shape != (3,):
        shape = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        return f"one value a pair, shape (3,) for three pairs, not {shape}"
    if not values.is_floating_point() or not values.requires_grad:
        return "values that are differentiable in policy.chosen and policy.rejected"
    alone = [function(_made_up(policy, [i]), _made_up(reference, [i]), options) for i in range(3)]
    if not torch.allclose(torch.cat(alone), values, equal_nan=True):
        return "for each pair a value that does not depend on the other pairs, which the packer chooses"
    return None


def _made_up(logps: Tensor, pairs: Sequence[int] = (0, 1, 2)) -> PairLogps:
    """Returns `pairs` of three. logps: [(chosen, rejected), 3] in nats."""
    tokens = torch.tensor([[7, 12, 3], [9, 14, 5]], dtype=torch.float64)
    names = ("chosen", "rejected", "chosen_tokens", "rejected_tokens")
    return PairLogps(**dict(zip(names, torch.cat((logps, tokens))[:, list(pairs)], strict=True)))
