"""Compares two recipes: finds the keys that differ and change the training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpo_pack.recipe.data import EvalFraction
from dpo_pack.recipe.schema import Recipe
from dpo_pack.recipe.text import Tree

# A run may be resumed with other values of these keys, because they do not change training. (If a run could
# start with data.on_bad_row: error, there are no bad rows. What shares a row changes rounding only.)
NEUTRAL_KEYS: tuple[str, ...] = (
    "output_dir", "model.attention", "model.gradient_checkpointing", "model.compile",
    "model.activation_offload", "model.mlp_tile_tokens", "model.unused_tensors",
    "packing.mode", "packing.token_budget", "packing.share_prompt",
    "reference.cache_dir", "reference.token_budget", "data.on_bad_row",
    "data.num_workers", "train.eval_every_steps", "train.eval_precision", "train.stop_on_nonfinite",
    "checkpoint", "logging", "export",
    "distributed.num_processes", "distributed.strategy", "distributed.hybrid", "distributed.cpu_offload",
    "distributed.accumulate_unsharded", "online.generator.token_budget",
    "online.generator.gpu_memory_utilization", "online.generator.endpoint", "online.offload_reference",
)  # fmt: skip
# With train.early_stopping these keys decide when the run ends, so they change training.
EARLY_STOPPING_KEYS = ("checkpoint.metric", "checkpoint.eval_set", "train.eval_every_steps")
# With train.early_stopping or checkpoint.load_best all evaluations must be comparable.
COMPARING_KEYS = ("train.eval_precision",)


def changed_values(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys that differ and change the steps of a run in exact arithmetic, with the values
    of both recipes. What changes only the rounding of results does not count."""
    stops_early = old.train.early_stopping is not None or new.train.early_stopping is not None
    compares = stops_early or old.checkpoint.load_best or new.checkpoint.load_best
    neutral = tuple(f"{key}." for key in NEUTRAL_KEYS)
    counting = (*(EARLY_STOPPING_KEYS if stops_early else ()), *(COMPARING_KEYS if compares else ()))
    before, after = (_what_trains(recipe, stops_early=stops_early) for recipe in (old, new))
    return {
        key: values
        for key, values in _differences(before, after)
        if key in counting or not f"{key}.".startswith(neutral)
    }


def only_goes_on(old: Recipe, new: Recipe) -> bool:
    """Whether `new` only trains for more steps, and no earlier step depends on their number."""
    optim, changed = new.optim, changed_values(old, new)
    has_warmup = optim.warmup_steps is None and optim.warmup_ratio > 0
    compares = new.train.early_stopping is not None or new.checkpoint.load_best
    are_more = all(most is None or (least is not None and most > least) for least, most in changed.values())
    depends = not optim.schedule.startswith("constant") or has_warmup or compares
    return (
        bool(changed) and changed.keys() <= {"train.epochs", "train.max_steps"} and are_more and not depends
    )


def _what_trains(recipe: Recipe, *, stops_early: bool) -> Tree:
    tree = recipe.model_dump(mode="json")
    tree["loss"]["type"] = [{"type": name, "weight": weight} for name, weight in recipe.loss.terms]
    for source in tree["data"]["train"]:
        del source["name"]
    for judge in (tree["online"] or {"judges": ()})["judges"]:
        del judge["retries"], judge["max_new_tokens"]
        if judge["endpoint"] is not None:  # training depends on the model, not on its server
            judge["endpoint"] = {"model": judge["endpoint"]["model"]}
    if not isinstance(recipe.data.eval, EvalFraction) and not stops_early:
        tree["data"]["eval"] = None  # eval changes training only if it holds out training pairs
    return tree


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    are_lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if are_lists and all(isinstance(item, dict) for item in (*old, *new)):
        old, new = ({str(number): item for number, item in enumerate(items)} for items in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, (old, new)
