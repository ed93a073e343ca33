"""Which evaluation was best, and when there is nothing to wait for any more.

A pure state machine: `judge(standing, selection, ...)` returns the standing after an evaluation. It is in
the checkpoint, so that a run that goes on stops where it would have stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpo_pack.errors import RecipeError
from dpo_pack.recipe import Recipe
from dpo_pack.recipe_checkpoint import LOWER_IS_BETTER
from dpo_pack.recipe_errors import show


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What evaluations are compared by, from the recipe."""

    metric: str
    eval_set: str
    num_best: int  # evaluations to remember
    patience: int | None = None  # evaluations without an improvement, then the run stops; None: it does not
    min_delta: float = 0.0  # what counts as an improvement, for patience

    @property
    def lower_is_better(self) -> bool:
        return self.metric in LOWER_IS_BETTER

    def stops(self, standing: Standing) -> bool:
        """Whether the run ends here."""
        return self.patience is not None and standing.num_since_improvement >= self.patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the evaluations so far have shown; plain values, for a checkpoint."""

    best: tuple[tuple[int, float], ...] = ()  # (step, value), the best first
    bar: float | None = None  # the value that an improvement must pass
    num_since_improvement: int = 0  # evaluations

    @property
    def best_steps(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.best)

    def state_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def load(state: Mapping[str, Any]) -> Standing:
        return Standing(**{**state, "best": tuple((int(step), value) for step, value in state["best"])})


def judge(
    standing: Standing, selection: Selection, evaluation: Mapping[str, Mapping[str, Any]], *, step: int
) -> Standing:
    """The standing after an evaluation, metrics by held-out set.

    Of equal values the earlier is better. A value that is not finite, or not there because no prompt of an
    online run could be scored, is no improvement.
    """
    value = evaluation[selection.eval_set].get(selection.metric)
    sign = 1.0 if selection.lower_is_better else -1.0
    if value is None or not math.isfinite(value):
        return Standing(
            best=standing.best, bar=standing.bar, num_since_improvement=standing.num_since_improvement + 1
        )
    improves = standing.bar is None or sign * value < sign * standing.bar - selection.min_delta
    best = sorted((*standing.best, (step, value)), key=lambda entry: (sign * entry[1], entry[0]))
    return Standing(
        best=tuple(best[: selection.num_best]),
        bar=value if improves else standing.bar,
        num_since_improvement=0 if improves else standing.num_since_improvement + 1,
    )


def find_selection(recipe: Recipe, eval_sets: Sequence[str]) -> Selection | None:
    """The recipe's way to compare evaluations; None where nothing is held out.

    Raises RecipeError for a set that there is not.
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
