"""Imports a loss that the user wrote: `loss.type: module:function`.

The module is in the working directory or installed. The function is called once for each row of a step, like
a built-in loss:

    def my_loss(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor

It returns one value for each pair, [P], differentiable in `policy.chosen` and `policy.rejected`. The value of
a pair may depend on that pair only, because the packer chooses the pairs of a row. Log-probs and values are
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpo_pack.losses.objective import Loss, LossOptions, PairLogps
from dpo_pack.system.errors import RecipeError, first_line
from dpo_pack.system.imports import load_function


def load_custom_loss(name: str, options: LossOptions) -> Loss:
    """Imports the loss `module:function` and tests it on three invented pairs. Raises RecipeError."""
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
    return Loss(function=function, needs_reference=True)


def _unmet_requirement(function: Callable[..., Any], options: LossOptions) -> str | None:
    """Calls a loss with three invented pairs; returns the requirement that its values break, or None."""
    policy, reference = _made_up([-20.0, -35.0, -8.0]), _made_up([-21.0, -33.0, -9.0])
    policy.chosen.requires_grad_()
    policy.rejected.requires_grad_()
    values = function(policy, reference, options)
    if not isinstance(values, Tensor) or values.shape != (3,):
        shape = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        return f"one value a pair, shape (3,) for three pairs, not {shape}"
    if not values.is_floating_point() or not values.requires_grad:
        return "values that are differentiable in policy.chosen and policy.rejected"
    alone = [function(_pick(policy, pair), _pick(reference, pair), options) for pair in range(len(values))]
    if not torch.allclose(torch.cat(alone), values, equal_nan=True):
        return "for each pair a value that does not depend on the other pairs, which the packer chooses"
    return None


def _made_up(chosen: list[float]) -> PairLogps:
    logps = torch.tensor(chosen, dtype=torch.float64)
    tokens = torch.tensor([7, 12, 3], dtype=torch.float64)
    return PairLogps(
        chosen=logps, rejected=logps.flip(0) - 1, chosen_tokens=tokens, rejected_tokens=tokens + 2
    )


def _pick(logps: PairLogps, pair: int) -> PairLogps:
    one = slice(pair, pair + 1)
    return PairLogps(
        chosen=logps.chosen[one],
        rejected=logps.rejected[one],
        chosen_tokens=logps.chosen_tokens[one],
        rejected_tokens=logps.rejected_tokens[one],
    )
