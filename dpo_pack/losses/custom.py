"""Your own loss: `loss.type: module:function`, found in the working directory or among installed modules.

The function is called as the built-in ones are, once for each row of a step:

    def my_loss(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor

and returns one value a pair, [P], differentiable in `policy.chosen` and `policy.rejected`. A pair's value
may depend on that pair only, since which pairs share a row is the packer's choice. Everything is float64.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor

from dpo_pack.errors import RecipeError
from dpo_pack.losses.interface import Loss, LossOptions, PairLogps


def load_custom_loss(name: str, options: LossOptions) -> Loss:
    """The loss `module:function`, tried out on three made-up pairs. Raises RecipeError in one line."""
    module_name, _, function_name = name.partition(":")
    try:
        function: Any = getattr(_import(module_name), function_name)
    except AttributeError:
        raise RecipeError(f"loss.type: module {module_name} has no function {function_name}") from None
    except (Exception, SystemExit) as error:
        where = f"(looked in {os.getcwd()} and among installed modules)"
        raise RecipeError(f"loss.type: cannot import {module_name}: {_one_line(error)} {where}") from error
    if not callable(function):
        raise RecipeError(f"loss.type: {name} is {type(function).__name__}, not a function")
    try:
        problem = _problem(function, options)
    except Exception as error:
        raise RecipeError(
            f"loss.type: {name} failed on made-up pairs: {_one_line(error)}; it is called as "
            "function(policy, reference, options), see docs/losses.md"
        ) from error
    if problem is not None:
        raise RecipeError(f"loss.type: {name} must return {problem}")
    return Loss(function=function)


def _import(module_name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    finally:
        sys.path.remove(os.getcwd())


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")


def _problem(function: Any, options: LossOptions) -> str | None:
    """What is wrong with a loss, as what it must return, found on three pairs; None: nothing."""
    policy, reference = _made_up([-20.0, -35.0, -8.0]), _made_up([-21.0, -33.0, -9.0])
    policy.chosen.requires_grad_()
    policy.rejected.requires_grad_()
    values = function(policy, reference, options)
    if not isinstance(values, Tensor) or values.shape != (3,):
        shape = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        return f"one value a pair, shape (3,) for three pairs, not {shape}"
    if not values.is_floating_point() or not values.requires_grad:
        return "values that are differentiable in policy.chosen and policy.rejected"
    alone = [function(_pick(policy, pair), _pick(reference, pair), options) for pair in range(3)]
    if not torch.allclose(torch.cat(alone), values, equal_nan=True):
        return "for each pair a value that does not depend on the other pairs, which the packer chooses"
    return None


def _made_up(chosen: list[float]) -> PairLogps:
    logps = torch.tensor(chosen, dtype=torch.float64)
    tokens = torch.tensor([7, 12, 3])
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
