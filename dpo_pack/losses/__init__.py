"""Preference losses: pure functions of policy and reference log-probs, and the objective of a run.

To add a loss: declare it in LOSS_DECLARATIONS of recipe/loss.py, write its function, and add the function to
the dict at the end of the function's file. Write -F.logsigmoid(x), not F.softplus(-x): torch rounds softplus
to a straight line above 20. A new option is a key of `LossRecipe` in recipe/loss.py, and a field of
`LossOptions`. It is named `<loss>_<option>`, as `simpo_gamma`, unless several losses share it, as
`label_smoothing`.

`contrastive.py` has the losses that compare a pair with the reference, `reference_free.py` the losses without
a reference, `transport.py` the losses in which the value of a pair depends on the other pairs of the step.
`custom.py` imports a loss that the user wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dpo_pack.losses.contrastive import CONTRASTIVE
from dpo_pack.losses.custom import load_custom_loss
from dpo_pack.losses.objective import (
    Loss,
    LossOptions,
    Objective,
    PairLogps,
    ScoredPairs,
    length_desensitized_sums,
    length_desensitized_weights,
    weighted_losses,
    wpo_weights,
)
from dpo_pack.losses.reference_free import REFERENCE_FREE
from dpo_pack.losses.transport import COUPLED

__all__ = [
    "LOSSES", "Loss", "LossOptions", "Objective", "PairLogps", "ScoredPairs", "length_desensitized_sums",
    "length_desensitized_weights", "make_objective", "weighted_losses", "wpo_weights",
]  # fmt: skip

LOSSES: dict[str, Loss] = {
    **{name: Loss(function=loss, needs_reference=True) for name, loss in CONTRASTIVE.items()},
    **{name: Loss(function=loss, needs_reference=False) for name, loss in REFERENCE_FREE.items()},
    **{name: Loss(function=loss, needs_reference=True, couples_pairs=True) for name, loss in COUPLED.items()},
}


def make_objective(
    terms: Iterable[tuple[str, float]],
    options: Mapping[str, Any],
    *,
    weighting: str | None = None,
    ld_alpha: float | None = None,
) -> Objective:
    """Makes the objective of a run from (name, factor) terms; `options` are the fields of `LossOptions`.

    Raises RecipeError if a loss that the user wrote cannot be used.
    """
    loss_options = LossOptions(**options)
    loaded = tuple(
        (load_custom_loss(name, loss_options) if ":" in name else LOSSES[name], factor)
        for name, factor in terms
    )
    return Objective(terms=loaded, options=loss_options, weighting=weighting, ld_alpha=ld_alpha)
