"""Options of loss functions, with the recipe's defaults for those that a test does not give."""

from __future__ import annotations

from typing import Any

from dpo_pack.losses import LossOptions
from dpo_pack.recipe.training import LossRecipe


def loss_options(**given: Any) -> LossOptions:
    return LossOptions(**{**LossRecipe().options, **given})
