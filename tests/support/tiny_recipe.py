"""The smallest recipe, for tests to load with overrides, and what every refusal must be like."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from dpo_pack.recipe.load import Recipe, changed_values, load_recipe, recipe_fields
from dpo_pack.system.errors import RecipeError
from support.refusals import refusal

SMALLEST = "output_dir: runs/x\nmodel: {path: org/model}\ndata: {train: pairs.jsonl}\n"
KEYS = sorted(recipe_fields())


def load(*overrides: str, text: str = SMALLEST) -> Recipe:
    """Loads a recipe.yaml that holds the text, with overrides."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return load_recipe(path, overrides)


def changed_keys(old: Recipe, new: Recipe) -> list[str]:
    """Dotted keys that differ and change training."""
    return list(changed_values(old, new))


def message_of(function: Callable[[], object]) -> str:
    """The message of the RecipeError, which must be one line in the recipe's own words."""
    message = refusal(function, RecipeError)
    for jargon in ("pydantic", "Input should", "ValidationError", "[type=", "literal_error"):
        assert jargon not in message
    return message
