"""Recipes to begin with: valid, short, and listed where an unknown one is asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dpo_pack.recipe.load import Recipe, load_recipe, parse_recipe
from dpo_pack.recipe.templates import BEGINNING, MODELS, TEMPLATES, recipe_template
from dpo_pack.run.models import training_bytes


def load(text: str, tmp_path: Path) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(text)
    return load_recipe(tmp_path / "recipe.yaml")


def test_the_short_beginning_is_a_whole_recipe_of_defaults(tmp_path: Path) -> None:
    lines = BEGINNING.splitlines()
    assert len(lines) <= 16 and max(map(len, lines)) <= 100
    smallest = {
        "output_dir": "runs/my-run",
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": {"train": "pairs.jsonl"},
    }
    expected = parse_recipe({**smallest, "data": {"train": "pairs.jsonl", "eval": {"fraction": 0.02}}})
    assert load(BEGINNING, tmp_path) == expected
    commented = re.search(r"# (lora: .*?})", BEGINNING)
    assert commented is not None
    lora = yaml.safe_load(commented[1])["lora"]
    assert parse_recipe({**smallest, "model": {"path": "a/b", "lora": lora}}).model.lora is not None


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_a_recipe_that_says_what_it_is_for(name: str, tmp_path: Path) -> None:
    text = recipe_template(name)
    recipe = load(text, tmp_path)
    model, setup = TEMPLATES[name]
    assert recipe.model.path == model.path and text.startswith(f"# {model.path}: {setup.title}")
    assert (recipe.model.lora is not None, recipe.model.quantize) == (
        setup.is_lora,
        "nf4" if setup.is_quantised else None,
    )
    assert str(recipe.output_dir) == f"runs/{name}" and max(map(len, text.splitlines())) <= 110


def test_a_template_tells_the_model_s_size_and_the_memory_of_its_weights() -> None:
    assert "\n# 8.19 billion parameters: weights in bfloat16 take 16 GB.\n" in recipe_template(
        "qwen3-8b-lora-1gpu"
    )
    assert "weights in 4 bits take 6 GB.\n" in recipe_template("qwen3-8b-qlora-1gpu")


@pytest.mark.parametrize(("model", "weight_bytes"), [("qwen3-14b", 4), ("qwen3-32b", 2)])
def test_a_template_of_full_training_tells_the_memory_that_is_estimated(
    model: str, weight_bytes: int
) -> None:
    state = sum(training_bytes(num_trained=MODELS[model].parameters, trained_bytes=weight_bytes)) / 1e9
    text = recipe_template(f"{model}-full-2nodes")
    assert f" take {state:.0f} GB,\n# {state / 16:.0f} GB on each GPU" in text
