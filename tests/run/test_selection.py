"""Which evaluation is best, and when a run has waited long enough for a better one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny_recipe import load, message_of

from dpo_pack.recipe.training import EarlyStoppingRecipe, OptimRecipe
from dpo_pack.run.evaluate import conclusions
from dpo_pack.run.state import Criterion, Evaluations, ends_run, find_criterion, judge
from dpo_pack.system.errors import RecipeError

JUDGES = ("data.eval=held.jsonl", "train.eval_every_steps=5")


def after(
    values: list[float | None], *, start: float | None = None, **settings: Any
) -> tuple[Evaluations, list[bool]]:
    """The standing after evaluations at steps 0, 10, 20, ..., and whether the run stops at each but 0."""
    stopping = EarlyStoppingRecipe(**settings.pop("stopping")) if "stopping" in settings else None
    criterion = Criterion(
        **{"metric": "loss", "eval_set": "held", "num_best": 2, "stopping": stopping, **settings}
    )
    before = {} if start is None else {criterion.metric: start}
    standing, stops = judge(Evaluations(), criterion, {"held": before}, step=0), []
    for step, value in enumerate(values, start=1):
        record = {} if value is None else {criterion.metric: value}
        standing = judge(standing, criterion, {"held": record, "other": {"loss": 0.0}}, step=10 * step)
        stops.append(ends_run(criterion, standing))
    return standing, stops


def test_the_lowest_loss_and_the_highest_of_everything_else_is_best() -> None:
    values: list[float | None] = [0.5, 0.3, 0.4, 0.3]
    assert after(values)[0].best == ((20, 0.3), (40, 0.3))  # of equal ones the earlier
    assert after(values, metric="rewards/accuracies")[0].best == ((10, 0.5), (30, 0.4))
    assert after(values, num_best=1)[0].best_steps == (20,)


def test_a_run_stops_after_so_many_evaluations_without_an_improvement() -> None:
    values: list[float | None] = [0.5, 0.3, 0.4, 0.35, 0.29, 0.3, 0.3, 0.3]
    assert after(values, stopping={"patience": 2})[1] == [False, False, False, True, False, False, True, True]
    assert not any(after(values)[1])
    higher = after(values, stopping={"patience": 1}, metric="rewards/margins")[1]
    assert higher == [False, True, True, True, True, True, True, True]


def test_an_improvement_is_more_than_min_delta_since_the_last_one() -> None:
    slowly: list[float | None] = [0.50, 0.46, 0.42, 0.38]  # the third is 0.08 from the first
    standing, stops = after(slowly, stopping={"patience": 1, "min_delta": 0.05})
    assert stops == [False, True, False, True] and standing.bar == 0.42
    assert standing.best_steps == (40, 30)  # the best is the best, however little


def test_the_evaluation_before_the_first_step_must_be_beaten_and_is_no_checkpoint() -> None:
    worse: list[float | None] = [0.7, 0.71, 0.69]
    standing, stops = after(worse, start=0.693, stopping={"patience": 2})
    assert stops == [False, True, False]  # at 10 and 20 nothing is better than the start
    assert standing.start == 0.693 and standing.bar == 0.69 and standing.best == ((30, 0.69), (10, 0.7))
    higher: list[float | None] = [0.4, 0.5, 0.6]
    assert after(higher, start=0.5, stopping={"patience": 2}, metric="rewards/accuracies")[1] == [
        False,
        True,
        False,
    ]
    assert after(worse, start=math.nan, stopping={"patience": 2})[0].start is None


def test_what_is_not_finite_or_not_there_is_no_improvement() -> None:
    standing, stops = after([0.5, math.nan, None], stopping={"patience": 2})
    assert stops == [False, False, True] and standing.best == ((10, 0.5),)


def test_the_recipe_says_what_is_compared() -> None:
    assert find_criterion(load(), []) is None
    first = find_criterion(load(*JUDGES), ["held", "other"])
    assert first == Criterion(metric="loss", eval_set="held", num_best=1)
    stopping = "train.early_stopping={patience: 2, min_delta: 0.01}"
    chosen = ("checkpoint.metric=rewards/margins", "checkpoint.eval_set=other", "checkpoint.keep_best=3")
    assert find_criterion(load(*JUDGES, stopping, *chosen), ["held", "other"]) == Criterion(
        metric="rewards/margins",
        eval_set="other",
        num_best=3,
        stopping=EarlyStoppingRecipe(patience=2, min_delta=0.01),
    )
    with pytest.raises(RecipeError, match=r"checkpoint\.eval_set: .*'other'; there are held$"):
        find_criterion(load(*JUDGES, *chosen), ["held"])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["checkpoint.keep_best=1"], "checkpoint.keep_best"),
        (["train.early_stopping={}"], "train.early_stopping"),
        ([*JUDGES[:1], "checkpoint.keep_best=1"], "checkpoint.keep_best"),
        ([*JUDGES, "checkpoint.load_best=true"], "checkpoint.load_best"),
        ([*JUDGES, "checkpoint.metric=loss"], "checkpoint.metric"),
        ([*JUDGES, "checkpoint.keep_best=1", "checkpoint.metric=online/scores"], "checkpoint.metric"),
        ([*JUDGES, "checkpoint.metric=kl/chosen"], "checkpoint.metric"),
    ],
)
def test_what_cannot_be_compared_is_refused(overrides: list[str], key: str) -> None:
    assert message_of(lambda: load(*overrides)).startswith(f"{key}: ")


def test_where_all_steps_were_warm_up_nobody_is_told_to_lower_the_rate() -> None:
    standing, _ = after([0.7, 0.8], start=0.69)
    state: Any = SimpleNamespace(standing=standing, step=2, source=SimpleNamespace(num_steps=2))
    criterion = Criterion(metric="loss", eval_set="held", num_best=2)
    for num_warmup, is_told in ((2, False), (1, True)):
        (told,) = conclusions(state, criterion, OptimRecipe(warmup_steps=num_warmup))
        assert "no evaluation is better" in told and ("lower optim.lr" in told) == is_told


@pytest.mark.parametrize(
    ("metric", "start", "later", "hardly_moved"),
    [
        ("loss", 0.69315, 0.69316, True),
        ("loss", 0.6931, 0.6941, False),
        ("rewards/accuracies", 0.5, 0.5, False),
    ],
)
def test_a_run_that_hardly_moved_is_not_told_to_go_slower(
    metric: str, start: float, later: float, hardly_moved: bool
) -> None:
    standing = Evaluations(start=start, best=((1, later),))
    state: Any = SimpleNamespace(standing=standing, step=1, source=SimpleNamespace(num_steps=1))
    (told,) = conclusions(state, Criterion(metric=metric, eval_set="held", num_best=1), OptimRecipe())
    assert ("The run hardly moved: train more steps, or raise optim.lr" in told) == hardly_moved
    assert ("swapped" in told) != hardly_moved
