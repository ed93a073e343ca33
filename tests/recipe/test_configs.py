"""Every recipe the project ships is in order; other tests run the quickstart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dpo_pack.recipe.load import BEGINNING, dump_recipe, load_recipe, parse_recipe

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*") if path.suffix in (".yaml", ".yml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_loads_and_says_in_a_comment_what_it_is_for(path: Path) -> None:
    recipe = load_recipe(path)
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe
    assert path.read_text(encoding="utf-8").startswith("# ")
    # Recipes are run from the repository root, and what they leave must not be committed.
    assert recipe.output_dir.parts[0] == "runs"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_recipe_reads_a_known_data_set_as_the_page_of_data_says(path: Path) -> None:
    page = (CONFIGS.parent / "docs" / "data.md").read_text(encoding="utf-8")
    for source in load_recipe(path).data.train:
        for found in re.findall(rf"`(\{{path: {re.escape(str(source.path))}[,}}].*?)` \|", page):
            assert source.columns == yaml.safe_load(found).get("columns", {}), source.path


def test_recipes_write_to_different_directories() -> None:
    directories = [load_recipe(path).output_dir for path in FILES]
    assert len(set(directories)) == len(directories) <= 10


def test_the_short_beginning_is_a_whole_recipe_of_defaults(tmp_path: Path) -> None:
    lines = BEGINNING.splitlines()
    assert len(lines) <= 16 and max(map(len, lines)) <= 100
    data = {"train": "pairs.jsonl", "eval": {"fraction": 0.02}}
    smallest = {"output_dir": "runs/my-run", "model": {"path": "Qwen/Qwen3-0.6B"}, "data": data}
    (tmp_path / "recipe.yaml").write_text(BEGINNING)
    assert load_recipe(tmp_path / "recipe.yaml") == parse_recipe(smallest)
    (tmp_path / "recipe.yaml").write_text(BEGINNING.replace("# lora", "lora"))
    assert load_recipe(tmp_path / "recipe.yaml").model.lora is not None
