"""Your own judge: `module:function`, found in the working directory or among installed modules.

The function gets a batch by keyword, one entry a completion, and returns one number each, the higher the
better:

    def score(*, prompts: list[str | list[dict]], completions: list[str]) -> list[float]

A prompt is text, or messages where the data is conversational; its completions follow one another. `None`
or a number that is not finite sets the prompt aside.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpo_pack.errors import RecipeError, RunError
from dpo_pack.online.interface import Failure, Rollout, Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionJudge:
    """Scores by a Python function. A call that raises is repeated, then made prompt by prompt."""

    name: str  # module:function
    function: Callable[..., Any]
    retries: int

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        """Raises RunError when the function returns something else than a number a completion."""
        together = self._try(rollouts)
        if not isinstance(together, Failure):
            return together
        if len(rollouts) == 1:
            return [together]
        # One bad prompt must not take the others with it.
        results: list[Scores | Failure] = []
        for rollout in rollouts:
            alone = self._try([rollout])
            results += [alone] if isinstance(alone, Failure) else alone
        return results

    def _try(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure] | Failure:
        prompts: list[Any] = []
        completions: list[str] = []
        for rollout in rollouts:
            prompt = rollout.draw.prompt
            for completion in rollout.completions:
                prompts.append(prompt.text if prompt.messages is None else list(prompt.messages))
                completions.append(completion.text)
        reason = ""
        for _ in range(1 + self.retries):
            try:
                values = self.function(prompts=prompts, completions=completions)
            except Exception as error:  # it is the user's code, which may raise anything
                reason = f"{self.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            return self._split(values, rollouts)
        return Failure(reason=reason)

    def _split(self, values: Any, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        numbers = self._numbers(values, sum(len(rollout.completions) for rollout in rollouts))
        results: list[Scores | Failure] = []
        for rollout in rollouts:
            scores = np.array(numbers[: len(rollout.completions)], dtype=np.float64)
            numbers = numbers[len(rollout.completions) :]
            is_good = bool(np.isfinite(scores).all())
            results.append(scores if is_good else Failure(reason=f"{self.name}: a score is not finite"))
        return results

    def _numbers(self, values: Any, expected: int) -> list[float]:
        """Scores as floats, None as not a number. Raises RunError, for a mistake no repetition mends."""
        try:
            numbers = [math.nan if value is None else float(value) for value in values]
        except (TypeError, ValueError):
            raise RunError(
                f"online.judges: {self.name} must return a list of numbers, one a completion, not "
                f"{type(values).__name__} {str(values)[:60]!r}"
            ) from None
        if len(numbers) != expected:
            raise RunError(
                f"online.judges: {self.name} returned {len(numbers)} scores for {expected} completions; "
                "return one for each"
            )
        return numbers


def load_function(name: str, recipe_key: str) -> Callable[..., Any]:
    """The function `module:function`. Raises RecipeError in one line."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: Any = getattr(importlib.import_module(module_name), function_name)
    except AttributeError:
        raise RecipeError(f"{recipe_key}: module {module_name} has no function {function_name}") from None
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        where = f"looked in {os.getcwd()} and among installed modules"
        raise RecipeError(f"{recipe_key}: cannot import {module_name}: {what} ({where})") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(function):
        raise RecipeError(f"{recipe_key}: {name} is {type(function).__name__}, not a function")
    loaded: Callable[..., Any] = function
    return loaded
