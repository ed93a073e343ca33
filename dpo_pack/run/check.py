"""Answers whether a run of a recipe would start (`dpopack recipe --check`), without loading weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpo_pack.data.ingest import check_source
from dpo_pack.data.splits import HELD_OUT
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.model.config import check_positions, known_positions
from dpo_pack.model.loading import load_config
from dpo_pack.recipe.load import Recipe, source_names
from dpo_pack.recipe.schema import EvalFraction, SourceRecipe
from dpo_pack.run.evaluate import find_selection
from dpo_pack.run.models import check_model, recipe_precision, resolve_model, resolve_policy
from dpo_pack.run.run_dir import find_run
from dpo_pack.run.setup import longest_sequence, prepare_tokenizer, recipe_objective
from dpo_pack.system import ranks
from dpo_pack.system.errors import DpoPackError
from dpo_pack.training.optim import check_optimizer


def check_recipe(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Returns lines for each thing that is in order, and a line for each thing that is wrong.

    Reads configs, the tokenizer and the first rows of each source. Writes nothing except the files that it
    downloads from the hub.
    """
    found: list[str] = []
    wrong: list[str] = []
    data, online = recipe.data, recipe.online

    def check(function: Callable[..., str], *arguments: Any) -> None:
        try:
            found.extend(line for line in function(*arguments).split("\n") if line not in found)
        except DpoPackError as error:
            wrong.append(str(error))

    check(_check_settings, recipe)
    check(_check_model, recipe, recipe.model.path, "model.path")
    if recipe.reference.path is not None:
        check(_check_model, recipe, recipe.reference.path, "reference.path")
    for number, judge in enumerate(() if online is None else online.judges):
        if judge.path is not None:
            check(_check_judge, recipe, judge.path, f"online.judges.{number}.path")
    try:
        tokenizer = prepare_tokenizer(recipe)
    except DpoPackError as error:
        return found, [*wrong, str(error)]  # without it, no row can be read
    found.append(f"tokenizer: {len(tokenizer):,} tokens")
    for part, sources in (("train", data.train), ("eval", data.eval_sources)):
        for number, source in enumerate(sources):
            check(_check_source, recipe, source, f"data.{part}.{number}", tokenizer)
    return found, wrong


def _check_settings(recipe: Recipe) -> str:
    """Checks the loss, the optimizer and the output directory of the recipe."""
    recipe_objective(recipe)
    check_optimizer(recipe.optim.name, _device())
    evals = recipe.data.eval
    find_selection(recipe, [HELD_OUT] if isinstance(evals, EvalFraction) else list(source_names(evals)))
    run = find_run(recipe, overwrite=False)
    state = "its run is finished, so train has nothing to do" if run.is_finished else "a run can use it"
    return f"output_dir: {run.root}, {state}"


def _device() -> torch.device:
    return torch.device("cuda" if ranks.uses_cuda() else "cpu")


def _check_model(recipe: Recipe, path: str, key: str) -> str:
    device = _device()
    facts = resolve_model(recipe, recipe_precision(recipe, device), path, recipe_key=key)
    check_model(recipe, facts, device, is_trained=key == "model.path")
    weights = "its weights are there" if Path(facts.path).is_dir() else "its weights were not checked"
    known, max_length = known_positions(facts.config), recipe.data.max_length
    positions = ""
    if known is not None and known < max_length:
        positions = (
            f"\n  data.max_length is {max_length:,}, but this model is exact for {known:,} positions only, "
            f"so a longer pair would stop a run; set data.max_length: {known}"
        )
    return f"{key}: {facts.label}, {facts.config.model_type}; {weights}{positions}"


def _check_source(recipe: Recipe, source: SourceRecipe, key: str, tokenizer: Tokenizer) -> str:
    """Checks the first rows of a source, and that the model is exact for their longest sequence."""
    max_new_tokens = None if recipe.online is None else recipe.online.max_new_tokens
    lines, pairs = check_source(source, key, recipe.data, tokenizer, max_new_tokens)
    try:
        model = resolve_policy(recipe, recipe_precision(recipe, _device()))
    except DpoPackError:
        return lines  # `_check_model` says what is wrong with it
    check_positions(model.config, longest_sequence([pairs]) + (max_new_tokens or 0))
    return lines


def _check_judge(recipe: Recipe, path: str, key: str) -> str:
    trusts = recipe.model.trust_remote_code
    config = load_config(path, revision=None, trust_remote_code=trusts, recipe_key=key)
    return f"{key}: {path}, {config.model_type}"
