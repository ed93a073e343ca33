"""Preference losses: pure functions of policy and reference log-probs, and the objective of a run.

To add a loss: declare it in LOSS_DECLARATIONS of recipe/training.py, write its function, and add this to the
dict at the end of the function's file. Write -F.logsigmoid(x), not F.softplus(-x): torch rounds softplus to a
straight line above 20. A new option is a key of `LossRecipe` in recipe/training.py, and a field of
`LossOptions`. It is named `<loss>_<option>`, as `simpo_gamma`, unless several losses share it, as
`label_smoothing`.

`contrastive.py` has the losses that compare a pair with the reference, `reference_free.py` the losses without
a reference, `transport.py` the losses in which the value of a pair depends on the other pairs of the step.
`custom.py` imports a loss that the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from dpo_pack.losses.contrastive import CONTRASTIVE
from dpo_pack.losses.custom import load_custom_loss
from dpo_pack.losses.interface import Loss, LossOptions, PairLogps
from dpo_pack.losses.objective import (
    Objective,
    ScoredPairs,
    length_desensitized_sums,
    length_desensitized_weights,
    weighted_losses,
    wpo_weights,
)
from dpo_pack.losses.reference_free import REFERENCE_FREE
from dpo_pack.losses.transport import COUPLED
from dpo_pack.recipe.training import LOSS_DECLARATIONS, LossRecipe

__all__ = [
    "LOSSES", "Loss", "LossOptions", "Objective", "PairLogps", "ScoredPairs", "length_desensitized_sums",
    "length_desensitized_weights", "make_objective", "weighted_losses", "wpo_weights",
]  # fmt: skip

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {**CONTRASTIVE, **REFERENCE_FREE, **COUPLED}
_OPTIONS = {option for declared in LOSS_DECLARATIONS.values() for option in declared.options}
_FILES = "contrastive.py, reference_free.py or transport.py"
# Where a loss or an option must be -> the names that are not there.
_MISSING = {
    f"the table at the end of {_FILES} in losses/": LOSS_DECLARATIONS.keys() - _FUNCTIONS.keys(),
    "LOSS_DECLARATIONS in recipe/training.py": _FUNCTIONS.keys() - LOSS_DECLARATIONS.keys(),
    "LossRecipe in recipe/training.py": _OPTIONS - LossRecipe().options.keys(),
    "LossOptions in losses/interface.py": _OPTIONS - {field.name for field in fields(LossOptions)},
}
for _place, _names in _MISSING.items():
    assert not _names, f"add {', '.join(sorted(_names))} to {_place}"
LOSSES: dict[str, Loss] = {
    name: Loss(
        function=_FUNCTIONS[name],
        needs_reference=declared.needs_reference,
        couples_pairs=declared.couples_pairs,
    )
    for name, declared in LOSS_DECLARATIONS.items()
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
