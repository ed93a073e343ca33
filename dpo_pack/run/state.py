"""The values that a run remembers: what changes while it trains, what identifies it, and where it can go on.

This file lies below log, evaluation and checkpoint, which all read and write these values; their rules are
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.recipe.training import LOWER_IS_BETTER
from dpo_pack.training.batches import BatchSource
from dpo_pack.training.health import Health

Evaluation = Mapping[str, Mapping[str, Any]]  # the metrics of each held-out set, by its name


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
        """Whether `value` is better than `other`, and by more than `by`."""
        return value < other - by if self.lower_is_better else value > other + by

    def stops(self, standing: Standing) -> bool:
        """Whether `patience` evaluations in `standing` had no improvement, so the run must end."""
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
    num_flops: float = 0.0  # FLOPs of training on this rank's rows, see packing/flops.py
    train_seconds: float = 0.0  # seconds in steps, without start-up, evaluation, checkpoints
    evaluation: dict[str, dict[str, Any]] = field(default_factory=dict)  # latest metrics, by held-out set
    owes_evaluation: bool = True  # the evaluation after `step` steps is due and not finished
    standing: Standing = field(default_factory=Standing)
    health: Health = field(default_factory=Health)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A point from which the run can resume. A run that resumes there must repeat all later work."""

    step: int  # the place is after this step
    metrics_offset: int  # length of metrics.jsonl, bytes
    metrics_crc32: int = 0  # of these bytes
    source: dict[str, Any]  # state of the source of batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identifies a run. `fingerprints` must not change when the run resumes; other changes are reported."""

    fingerprints: dict[str, str]  # of data, plan, reference, ...
    words: dict[str, str]  # the same facts in words, for messages
    versions: dict[str, str]  # versions of packages that may change the last bits of results
    ranks: str  # "2 processes (ddp)"
    judged_by: str  # the metric and held-out set that compare evaluations


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The content of checkpoint.json: all plain values (no tensors) of TrainState, Place and Identity."""

    step: int
    num_pairs: int
    num_tokens: int
    num_flops: float
    train_seconds: float
    evaluation: dict[str, dict[str, Any]]
    owes_evaluation: bool
    standing: Standing
    health: Health
    metrics_offset: int
    metrics_crc32: int
    identity: dict[str, str]
    words: dict[str, str]
    versions: dict[str, str]
    ranks: str
    judged_by: str


def is_multiple(step: int, every_steps: int | None) -> bool:
    """Whether `step` is a multiple of `every_steps`; False if `every_steps` is None."""
    return every_steps is not None and step % every_steps == 0
