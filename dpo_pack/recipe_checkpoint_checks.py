"""Rules of checkpoints and early stopping, and of the other sections beside them."""

from collections.abc import Iterator
from typing import get_args

from dpo_pack.recipe_checkpoint import EvalMetric
from dpo_pack.recipe_errors import Problem
from dpo_pack.recipe_schema import Recipe


def broken_checkpoint_rules(recipe: Recipe) -> Iterator[Problem]:
    """Problems that only several keys together show."""
    checkpoint = recipe.checkpoint
    judging = {
        "checkpoint.keep_best": checkpoint.keep_best > 0,
        "checkpoint.load_best": checkpoint.load_best,
        "train.early_stopping": recipe.train.early_stopping is not None,
    }
    naming = {
        "checkpoint.metric": checkpoint.metric is not None,
        "checkpoint.eval_set": checkpoint.eval_set is not None,
    }
    either = "checkpoint.keep_best or train.early_stopping"
    for key in (name for name, is_set in {**judging, **naming}.items() if is_set):
        if not recipe.data.eval:
            yield key, "compares evaluations, and data.eval holds nothing out; name a source or a fraction"
        elif recipe.train.eval_every_steps is None and key in judging:
            yield key, "compares evaluations, and there is only one; set train.eval_every_steps"
        elif key in naming and not any(judging.values()):
            yield key, f"nothing compares evaluations; set {either}, or leave it out"
    if checkpoint.load_best and not checkpoint.keep_best:
        yield "checkpoint.load_best", "needs checkpoint.keep_best: 1 or more, or the best weights are gone"
    is_online, metric = recipe.online is not None, checkpoint.metric
    if metric is not None and metric.startswith("online/") != is_online:
        known = [name for name in get_args(EvalMetric) if name.startswith("online/") == is_online]
        yield (
            "checkpoint.metric",
            f"evaluations of an {'online' if is_online else 'offline'} run have no {metric}; "
            f"theirs are {', '.join(known)}",
        )
