"""The values that a run remembers: what changes while it trains, what identifies it, and where it can go on.

`Evaluations` holds the evaluations so far; `judge` updates it, and `ends_run` ends the run early. A
checkpoint holds it, so a resumed run ends at the same step as a run that was not interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rich.console import Console
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.recipe.load import Recipe
from dpo_pack.recipe.text import show
from dpo_pack.recipe.training import LOWER_IS_BETTER, POLYNOMIAL_LR_END, EarlyStoppingRecipe, OptimRecipe
from dpo_pack.system.errors import RecipeError
from dpo_pack.training.batches import BatchSource
from dpo_pack.training.health import Health
from dpo_pack.training.optim import build_optimizer, rate_factor, schedule_warnings
from dpo_pack.training.references import check_followable


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """How evaluations are compared."""

    metric: str
    eval_set: str
    num_best: int  # number of best evaluations to remember
    stopping: EarlyStoppingRecipe | None = None

    def gain(self, value: float, other: float) -> float:
        """Returns by how much `value` is better than `other`."""
        return other - value if self.metric in LOWER_IS_BETTER else value - other


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """The results of the evaluations so far, as plain values that a checkpoint can hold."""

    start: float | None = None  # the value before the first step
    best: tuple[tuple[int, float], ...] = ()  # (step, value) after at least one step; the best is first
    bar: float | None = None  # a new value must be better than this
    num_since_improvement: int = 0  # number of evaluations

    @property
    def best_steps(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.best)


def find_criterion(recipe: Recipe, eval_sets: Sequence[str]) -> Criterion | None:
    """Returns how the recipe compares evaluations; None if nothing is held out. Raises RecipeError."""
    if not eval_sets:
        return None
    wanted = recipe.checkpoint.eval_set
    if wanted is not None and wanted not in eval_sets:
        raise RecipeError(
            f"checkpoint.eval_set: no held-out set is called {show(wanted)}; there are {', '.join(eval_sets)}"
        )
    default = "loss" if recipe.online is None else "online/win_rate"
    return Criterion(
        metric=recipe.checkpoint.metric or default,
        eval_set=wanted or eval_sets[0],
        num_best=max(1, recipe.checkpoint.keep_best),
        stopping=recipe.train.early_stopping,
    )


def ends_run(criterion: Criterion | None, standing: Evaluations) -> bool:
    """Whether so many evaluations in `standing` had no improvement that early stopping ends the run."""
    stopping = None if criterion is None else criterion.stopping
    return stopping is not None and standing.num_since_improvement >= stopping.patience


def judge(
    standing: Evaluations, criterion: Criterion, evaluation: Mapping[str, Mapping[str, Any]], *, step: int
) -> Evaluations:
    """Returns what is known after an evaluation; `evaluation` maps each held-out set to its metrics. A value
    that is not finite or is missing is no improvement, and of two equal values the earlier one is better."""
    value = evaluation[criterion.eval_set].get(criterion.metric)
    if value is None or not math.isfinite(value):
        return replace(standing, num_since_improvement=standing.num_since_improvement + (step > 0))
    if step == 0:  # it must be surpassed, but no checkpoint has it
        return replace(standing, start=value, bar=value)
    least = 0.0 if criterion.stopping is None else criterion.stopping.min_delta
    improves = standing.bar is None or criterion.gain(value, standing.bar) > least
    best = sorted((*standing.best, (step, value)), key=lambda one: (criterion.gain(0.0, one[1]), one[0]))
    return replace(
        standing,
        best=tuple(best[: criterion.num_best]),
        bar=value if improves else standing.bar,
        num_since_improvement=0 if improves else standing.num_since_improvement + 1,
    )


@dataclass(slots=True, kw_only=True)
class TrainState:
    """All values that change during training. A checkpoint holds them."""

    scorer: CompletionLogps
    optimizer: Optimizer
    scheduler: LRScheduler
    source: BatchSource
    reference: CompletionLogps | None = None  # a reference that follows the policy, else None
    step: int = 0  # optimizer steps taken
    num_pairs: int = 0  # pairs trained on so far; copies of a pair count
    num_tokens: int = 0  # tokens that the policy has computed so far
    num_flops: float = 0.0  # FLOPs of training on this rank's rows, see packing/lengths.py
    train_seconds: float = 0.0  # seconds in steps, without start-up, evaluation, checkpoints
    evaluation: dict[str, dict[str, Any]] = field(default_factory=dict)  # latest metrics, by held-out set
    owes_evaluation: bool = True  # the evaluation after `step` steps is due and not finished
    standing: Evaluations = field(default_factory=Evaluations)
    health: Health = field(default_factory=Health)


def new_state(
    settings: OptimRecipe,
    scorer: CompletionLogps,
    source: BatchSource,
    reference: CompletionLogps | None,
    console: Console,
) -> TrainState:
    """Returns the state at step 0, and prints warnings of the schedule. Raises RecipeError, ModelError."""
    if reference is not None:
        check_followable(scorer, reference)
    numbers = settings.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    optimizer = build_optimizer(settings.name, scorer, **numbers)
    steps = {"num_steps": source.num_steps, "warmup_steps": settings.num_warmup_steps(source.num_steps)}
    name, end = settings.schedule, settings.min_lr_ratio
    if name == "polynomial":
        end = POLYNOMIAL_LR_END / settings.lr
    scheduler = LambdaLR(optimizer, partial(rate_factor, name=name, min_lr_ratio=end, **steps))
    for warning in schedule_warnings(optimizer, lr=settings.lr, **steps):
        console.print(warning)
    return TrainState(
        scorer=scorer, optimizer=optimizer, scheduler=scheduler, source=source, reference=reference
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A point from which the run can resume. A run that resumes there must repeat all later work."""

    step: int  # the point is after this step
    metrics_offset: int  # length of metrics.jsonl, bytes
    metrics_crc32: int = 0  # of these bytes
    source: dict[str, Any]  # state of the source of batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identifies a run. `fingerprints` must not change when the run resumes; other changes are reported."""

    fingerprints: dict[str, str]  # of data, plan, reference, ...
    versions: dict[str, str]  # versions of packages that may change the last bits of results
    ranks: str  # "2 processes (ddp)"
    judged_by: str  # the metric and held-out set that compare evaluations


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The content of checkpoint.json: plain values of TrainState, ResumePoint and Identity."""

    step: int
    num_pairs: int
    num_tokens: int
    num_flops: float
    train_seconds: float
    evaluation: dict[str, dict[str, Any]]
    owes_evaluation: bool
    standing: Evaluations
    health: Health
    metrics_offset: int
    metrics_crc32: int
    identity: dict[str, str]
    versions: dict[str, str]
    ranks: str
    judged_by: str
