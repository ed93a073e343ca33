"""Whole runs with each kind of loss: coupled, reference-free, weighted, one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.marks import slow
from support.run_files import records

from dpo_pack.model.building import load_model
from dpo_pack.model.facts import ModelFacts
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.run import models as recipe_models
from dpo_pack.trainer import train

Make = Callable[..., Recipe]


@pytest.fixture
def make(assets: Path, tmp_path: Path) -> Make:
    """A recipe of the tiny run with overrides, in an output_dir of the given name. Tests share its cache."""

    def recipe(name: str, *overrides: str) -> Recipe:
        return load_recipe(assets / "recipe.yaml", [f"output_dir={tmp_path / name}", *overrides])

    return recipe


@pytest.mark.parametrize("name", ["simpo", "sft", *slow("orpo", "cpo")])
def test_a_loss_without_a_reference_computes_and_keeps_none(
    name: str, make: Make, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("dpo_pack.run.inputs.prepare_reference", lambda *_: pytest.fail("a reference pass"))
    loaded: list[str] = []

    def spy(facts: ModelFacts, **settings: Any) -> Any:
        loaded.append(facts.settings.path)
        return load_model(facts, **settings)

    monkeypatch.setattr(recipe_models, "load_model", spy)
    own_cache = f"reference.cache_dir={cache}"
    recipe = make("run", f"loss.type={name}", "train.epochs=3", "optim.lr=3e-3", own_cache)
    train(recipe, console)
    assert len(loaded) == 1
    assert not (recipe.output_dir / "reference.parquet").exists()
    before, after = records(recipe.output_dir, "eval")[0], records(recipe.output_dir, "eval")[-1]
    assert after["loss"] < before["loss"]
    assert not (cache / "reference").exists()
