"""Answers whether a run of a recipe would start (`dpopack recipe --check`), without loading weights.

The steps are those of a run, in its order, on the first rows of each source. An error ends a step, not the
check. It writes nothing except the files that it downloads from the hub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from dpo_pack.data.ingest import columns_sentence, load_source
from dpo_pack.data.load import HELD_OUT
from dpo_pack.data.store import PairTable
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.model.config import check_positions, known_positions
from dpo_pack.model.loading import load_config
from dpo_pack.recipe.load import Recipe, source_names
from dpo_pack.recipe.schema import EvalFraction, SourceRecipe
from dpo_pack.run.evaluate import find_selection
from dpo_pack.run.models import ModelFacts, cache_directory, check_model, recipe_precision, resolve_model
from dpo_pack.run.run_dir import find_run
from dpo_pack.run.setup import check_tokens, longest_sequence, prepare_tokenizer, recipe_objective
from dpo_pack.run.strategy import check_accelerate_config
from dpo_pack.system import ranks
from dpo_pack.system.errors import DpoPackError
from dpo_pack.training.optim import check_optimizer

CHECKED_ROWS = 100  # of each source


def check_recipe(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Returns lines for what is in order, and a line for each thing that is wrong."""
    found: list[str] = []
    wrong: list[str] = []

    @contextlib.contextmanager
    def step() -> Iterator[None]:
        try:
            yield
        except DpoPackError as error:  # it would end a run
            wrong.append(str(error))

    device = torch.device("cuda" if ranks.uses_cuda() else "cpu")
    with step():
        recipe_objective(recipe)
    with step():
        check_accelerate_config(recipe, recipe_precision(recipe, device))
        check_optimizer(recipe.optim.name, device)
    with step():
        evals = recipe.data.eval
        find_selection(recipe, [HELD_OUT] if isinstance(evals, EvalFraction) else list(source_names(evals)))
    with step():
        run = find_run(recipe, overwrite=False)
        state = "its run is finished, so train has nothing to do" if run.is_finished else "a run can use it"
        found.append(f"output_dir: {run.root}, {state}")
    policy: ModelFacts | None = None
    with step():
        policy = _check_model(recipe, recipe.model.path, "model.path", device, found)
    if recipe.reference.path is not None:
        with step():
            _check_model(recipe, recipe.reference.path, "reference.path", device, found)
    for number, judge in enumerate(() if recipe.online is None else recipe.online.judges):
        if judge.path is not None:
            key, trusts = f"online.judges.{number}.path", recipe.model.trust_remote_code
            with step():
                config = load_config(judge.path, revision=None, trust_remote_code=trusts, recipe_key=key)
                found.append(f"{key}: {judge.path}, {config.model_type}")
    with step():
        tokenizer = prepare_tokenizer(recipe)
        found.append(f"tokenizer: {len(tokenizer):,} tokens")
        for part, sources in (("train", recipe.data.train), ("eval", recipe.data.eval_sources)):
            for number, source in enumerate(sources):
                with step():
                    _check_source(recipe, source, f"data.{part}.{number}", tokenizer, policy, found)
    return found, wrong


def _check_model(recipe: Recipe, path: str, key: str, device: torch.device, found: list[str]) -> ModelFacts:
    model = resolve_model(recipe, recipe_precision(recipe, device), path, recipe_key=key)
    check_model(recipe, model, device, is_trained=key == "model.path")
    model.architecture  # noqa: B018  # builds the model on the meta device
    weights = "its weights are there" if Path(model.path).is_dir() else "its weights were not checked"
    found.append(f"{key}: {model.label}, {model.config.model_type}; {weights}")
    known, max_length = known_positions(model.config), recipe.data.max_length
    if known is not None and known < max_length:
        found.append(
            f"  data.max_length is {max_length:,}, but this model is exact for {known:,} positions only, "
            f"so a longer pair would stop a run; set data.max_length: {known}"
        )
    return model


def _check_source(
    recipe: Recipe,
    source: SourceRecipe,
    key: str,
    tokenizer: Tokenizer,
    policy: ModelFacts | None,
    found: list[str],
) -> None:
    max_new_tokens = None if recipe.online is None else recipe.online.max_new_tokens
    loaded = load_source(
        source,
        key,
        data=recipe.data,
        tokenizer=tokenizer,
        tokenizer_key="",
        cache_dir=cache_directory(recipe),
        max_new_tokens=max_new_tokens,
        max_rows=CHECKED_ROWS,
    )
    counts, kept = loaded.store.summary, "pairs" if max_new_tokens is None else "prompts"
    dropped = ", ".join(f"{entry['rows']:,} {reason}" for reason, entry in counts["dropped"].items())
    found.append(
        f"{key}: {source.path}, format {counts['format']}, the first {counts['rows_read']:,} rows have "
        f"{counts[f'{kept}_kept']:,} {kept}{f', left out: {dropped}' if dropped else ''}"
    )
    columns = f"  {columns_sentence(loaded.columns_read, counts['columns_not_read'])}"
    found.extend([] if columns in found else [columns])
    if policy is not None:
        tables = [PairTable.of([loaded.store])]
        check_positions(policy.config, longest_sequence(tables) + (max_new_tokens or 0))
        check_tokens(policy, tokenizer, tables)
