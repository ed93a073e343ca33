"""Loads, checks and writes recipes (YAML), with overrides. Imports no torch, so commands start at once.

text.py turns the text of a recipe into a tree of plain values and puts overrides into the tree. The schema
(schema.py) checks each key and the rules between keys. errors.py turns all problems into one RecipeError of
one line.
"""

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dpo_pack.recipe.data import SourceRecipe, as_eval, as_sources, source_names
from dpo_pack.recipe.errors import Tree, fail, fail_if_any, nested_sections, recipe_problems, show
from dpo_pack.recipe.machine import check_environment
from dpo_pack.recipe.schema import Recipe
from dpo_pack.recipe.text import apply_override, read_yaml, to_yaml
from dpo_pack.recipe.types import allowed_values

__all__ = [
    "Recipe", "check_environment", "default_in_yaml", "dump_recipe", "load_recipe", "parse_recipe",
    "recipe_defaults", "recipe_schema", "source_names",
]  # fmt: skip

MAX_RECIPE_BYTES = 1 << 17  # PyYAML takes some seconds for so many bytes


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and applies `key=value` overrides. The last override of a key counts.

    Raises RecipeError for every mistake in the recipe itself; `check_environment` finds what is missing on
    this machine, such as files and packages.
    """
    begin = "'dpopack recipe --defaults' prints one to begin with"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
        if len(content) > MAX_RECIPE_BYTES:
            fail(f"{path}: larger than {MAX_RECIPE_BYTES:,} bytes, so it is not a recipe; {begin}")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        fail(f"{path}: no such recipe; {begin}")
    except UnicodeDecodeError as error:
        fail(f"{path}: not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); save it as UTF-8")
    except OSError as error:
        fail(f"{path}: cannot read the recipe: {error.strerror}")
    tree = read_yaml(text, where=str(path))
    if tree is None:
        fail(f"{path}: the recipe is empty; {begin}")
    if not isinstance(tree, dict):
        fail(f"{path}: a recipe is a mapping of 'key: value' lines, not {show(tree)}")
    return parse_recipe(tree, overrides, recipe_dir=path.parent)


def parse_recipe(
    tree: Mapping[str, Any], overrides: Sequence[str] = (), *, recipe_dir: Path = Path()
) -> Recipe:
    """Makes a recipe from a mapping read from YAML. Replaces `${recipe_dir}` in paths by `recipe_dir`.

    Raises RecipeError.
    """
    tree = _without_shorthands(tree)
    for override in overrides:
        tree = _without_shorthands(apply_override(tree, override))
    try:
        return Recipe.model_validate(tree, context={"recipe_dir": os.path.abspath(recipe_dir)})
    except ValidationError as invalid:
        fail_if_any(recipe_problems(invalid.errors(include_url=False), tree))
        raise


def _without_shorthands(tree: Mapping[str, Any]) -> Tree:
    """Adds empty sections; makes lists of single sources. The schema refuses values of a wrong type later."""
    sections = {name for name, field in Recipe.model_fields.items() if _is_section(field)}
    full: Tree = {name: {} for name in sections - tree.keys()}
    full |= {name: {} if value is None and name in sections else value for name, value in tree.items()}
    if isinstance(full["data"], dict):
        data = full["data"] = dict(full["data"])
        if "train" in data:
            data["train"] = as_sources(data["train"])
        if "eval" in data:
            data["eval"] = [] if data["eval"] is None else as_eval(data["eval"])
    return full


def dump_recipe(recipe: Recipe, *, for_others: bool = False) -> str:
    """Returns the recipe with all its keys as YAML. Loading this YAML gives an equal recipe.

    With `for_others`, paths on this machine are only their last parts.
    """
    return to_yaml(recipe.model_dump(mode="json", context={"for_others": for_others}))


def recipe_schema() -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of a recipe, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Recipe.model_json_schema(),
        "title": "dpo-pack recipe",
    }


def recipe_defaults() -> str:
    """Returns a valid recipe with each key's meaning and default; required keys have an example value."""
    heading = "# A dpo-pack recipe. output_dir, model.path and data.train are required."
    return re.sub(r"\n{3,}", "\n\n", "\n".join([heading, "", *_commented(Recipe), ""]))


def _commented(section: type[BaseModel], indent: str = "") -> list[str]:
    """Returns the lines of a section. A comment above each key gives the key's meaning."""
    lines = []
    for name, field in section.model_fields.items():
        if _is_section(field):
            ((nested, _),) = nested_sections(field.annotation)
            lines += ["", f"# {nested.__doc__}", f"{name}:", *_commented(nested, indent + "  "), ""]
            continue
        comment = f"{indent}# {field.description} [{allowed_values(field.annotation, field.metadata)}]"
        lines += textwrap.wrap(comment, width=100, subsequent_indent=f"{indent}# ")
        if name == "train":
            lines += [f"{indent}train:", f"{indent}  -", *_commented(SourceRecipe, indent + "    ")]
        else:
            lines.append(f"{indent}{name}: {default_in_yaml(field)}")
    return lines


def default_in_yaml(field: FieldInfo) -> str:
    """Returns a key's default as one line of YAML; if the key is required, an example value."""
    if field.is_required():
        return str((field.examples or [""])[0])
    default = field.get_default(call_default_factory=True, validated_data={})
    return to_yaml(default.model_dump() if isinstance(default, BaseModel) else default, one_line=True)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
