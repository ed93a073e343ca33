"""Finds the best evaluation of a run, and decides when early stopping ends the run.

A `Standing` holds what a run remembers of its evaluations. `judge(standing, selection, ...)` has no side
effects: it returns the standing after one more evaluation. A checkpoint holds the standing, so a resumed run
ends at the same step as a run that was not interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpo_pack.recipe.text import show
from dpo_pack.recipe.load import Recipe
from dpo_pack.recipe.training import LOWER_IS_BETTER
from dpo_pack.system.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The recipe's settings for comparing evaluations."""

    metric: str
    eval_set: str
    num_best: int  # number of best evaluations to remember
    patience: int | None = None  # evaluations without improvement that end the run; None: no early stop
    min_delta: float = 0.0  # smallest change that counts as an improvement

    @property
    def lower_is_better(self) -> bool:
        return self.metric in LOWER_IS_BETTER

    def is_better(self, value: float, other: float, *, by: float = 0.0) -> bool:
        """Returns whether `value` is better than `other`, and by more than `by`."""
        return value < other - by if self.lower_is_better else value > other + by

    def stops(self, standing: Standing) -> bool:
        """Returns whether `patience` evaluations in `standing` had no improvement, so the run must end."""
        return self.patience is not None and standing.num_since_improvement >= self.patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The results of the evaluations so far, as plain values that a checkpoint can hold."""

    start: float | None = None  # the value before the first step
    best: tuple[tuple[int, float], ...] = ()  # (step, value) after at least one step; the best is first
    bar: float | None = None  # a new value must be better than this
    num_since_improvement: int = 0  # number of evaluations

    @property
    def best_steps(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.best)


def judge(
    standing: Standing, selection: Selection, evaluation: Mapping[str, Mapping[str, Any]], *, step: int
) -> Standing:
    """Returns the standing after an evaluation; `evaluation` maps each held-out set to its metrics.

    If two values are equal, the earlier one is better. A value that is not finite or is missing is no
    improvement; an online run has no value if no prompt could be scored. A later value must be better than
    the value before the first step (`step` 0) to count as an improvement. But the value of step 0 is never
    among the best, because the run saves no checkpoint of the weights from which it starts.
    """
    value = evaluation[selection.eval_set].get(selection.metric)
    if value is None or not math.isfinite(value):
        return replace(standing, num_since_improvement=standing.num_since_improvement + (step > 0))
    if step == 0:
        return replace(standing, start=value, bar=value)
    improves = standing.bar is None or selection.is_better(value, standing.bar, by=selection.min_delta)
    sign = 1.0 if selection.lower_is_better else -1.0
    best = sorted((*standing.best, (step, value)), key=lambda entry: (sign * entry[1], entry[0]))
    return replace(
        standing,
        best=tuple(best[: selection.num_best]),
        bar=value if improves else standing.bar,
        num_since_improvement=0 if improves else standing.num_since_improvement + 1,
    )


def find_selection(recipe: Recipe, eval_sets: Sequence[str]) -> Selection | None:
    """Returns the recipe's settings for comparing evaluations; None if nothing is held out.

    Raises RecipeError if the recipe names a held-out set that does not exist.
    """
    if not eval_sets:
        return None
    wanted, stopping = recipe.checkpoint.eval_set, recipe.train.early_stopping
    if wanted is not None and wanted not in eval_sets:
        raise RecipeError(
            f"checkpoint.eval_set: no held-out set is called {show(wanted)}; there are {', '.join(eval_sets)}"
        )
    default = "loss" if recipe.online is None else "online/win_rate"
    return Selection(
        metric=recipe.checkpoint.metric or default,
        eval_set=wanted or eval_sets[0],
        num_best=max(1, recipe.checkpoint.keep_best),
        patience=None if stopping is None else stopping.patience,
        min_delta=0.0 if stopping is None else stopping.min_delta,
    )
