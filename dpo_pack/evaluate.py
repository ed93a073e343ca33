"""Evaluate models on a recipe's held-out sets: while training, on demand, and against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dpo_pack import ranks
from dpo_pack.console import progress_bar
from dpo_pack.errors import ModelError, RecipeError
from dpo_pack.held_out import HeldOutResult, compare_results, evaluate_pairs, held_out_result
from dpo_pack.lora import is_adapter
from dpo_pack.losses import Objective
from dpo_pack.models import CompletionLogps
from dpo_pack.moving_reference import MovingReference
from dpo_pack.prepare import Prepared, load_trained, prepare, recipe_objective
from dpo_pack.prepare_batches import row_builder
from dpo_pack.prepare_reference import prepare_reference
from dpo_pack.recipe import Recipe, source_names
from dpo_pack.recipe_checks import HUB_ID
from dpo_pack.recipe_models import reference_token_budget
from dpo_pack.recipe_schema import EvalFraction
from dpo_pack.reference import FrozenReference
from dpo_pack.reference_pass import release_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models on one held-out set, and what the second has more than the first, pair by pair."""

    first: HeldOutResult
    second: HeldOutResult
    difference: dict[str, Any]


def evaluate_sets(
    prepared: Prepared,
    policy: CompletionLogps,
    reference: FrozenReference | MovingReference | None,
    objective: Objective,
    *,
    between_rows: Callable[[], None] = lambda: None,
) -> Iterator[HeldOutResult]:
    """What `policy` does on each held-out set. Collective where there are several ranks.

    `reference` may be None for an objective that needs none. `between_rows` is called by every rank as often.
    """
    moving = reference if isinstance(reference, MovingReference) else None
    frozen = reference if isinstance(reference, FrozenReference) else None
    recipe = prepared.recipe
    # A fraction holds pairs of all training sources; a set named in data.eval is one source.
    sources = source_names(recipe.data.train) if isinstance(recipe.data.eval, EvalFraction) else None
    for held_out in prepared.data.eval:
        builder = row_builder(prepared, held_out.pairs, frozen)
        described = f"Evaluating {held_out.name}"
        with progress_bar(prepared.console, described, held_out.pairs.num_pairs, "pairs") as bar:
            values = evaluate_pairs(
                policy,
                builder,
                objective,
                token_budget=reference_token_budget(recipe, prepared.device),
                rank=ranks.rank(),
                num_ranks=ranks.num_ranks(),
                moving=moving,
                progress=bar,
                between_rows=between_rows,
            )
        yield held_out_result(
            held_out.name,
            values,
            builder,
            objective,
            source_names=sources or (held_out.name,),
            seed=recipe.seed,
        )


def evaluate_recipe(recipe: Recipe, model: str | None, console: Console) -> dict[str, HeldOutResult]:
    """What a model does on the recipe's held-out sets, by name; None: the model the recipe's run has left.

    `model` is a directory or a hub id. Raises RecipeError without held-out sets, ModelError when the model
    cannot be loaded.
    """
    return _evaluate_models(recipe, [model], console)[0]


def compare_models(recipe: Recipe, first: str, second: str, console: Console) -> dict[str, Comparison]:
    """Two models on the recipe's held-out sets, by name. Raises as `evaluate_recipe` does."""
    ours, theirs = _evaluate_models(recipe, [first, second], console)
    return {
        name: Comparison(
            first=ours[name],
            second=theirs[name],
            difference=compare_results(ours[name], theirs[name], seed=recipe.seed),
        )
        for name in ours
    }


def _model_path(recipe: Recipe, model: str | None) -> Path:
    path = recipe.output_dir / "model" if model is None else Path(model)
    is_hub_id = model is not None and HUB_ID.fullmatch(model) is not None and not path.exists()
    if not is_hub_id and not (is_adapter(path) or (path / "config.json").is_file()):
        raise ModelError(
            f"{path}: no trained model there; finish the run first, or give another with --model"
        )
    return path


def _evaluate_models(
    recipe: Recipe, models: Sequence[str | None], console: Console
) -> list[dict[str, HeldOutResult]]:
    """The results of each model by held-out set; one model is in memory at a time."""
    if not recipe.data.eval:
        raise RecipeError("data.eval: the recipe holds nothing out; name a source or a fraction")
    paths = [_model_path(recipe, model) for model in models]
    objective = recipe_objective(recipe)
    prepared = prepare(recipe, console)
    frozen = None
    if objective.needs_reference:
        filled = prepare_reference(prepared, None)
        frozen = FrozenReference.take(filled.cache, prepared.tables, per_token=filled.per_token)
    results = []
    for path in paths:
        release_memory()
        policy = load_trained(prepared, path).scorer
        results.append({r.name: r for r in evaluate_sets(prepared, policy, frozen, objective)})
        del policy
    return results
