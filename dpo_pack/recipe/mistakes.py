"""Says what is wrong in a recipe: the key, the mistake, and how to mend it."""

import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dpo_pack.recipe.data import RowField
from dpo_pack.recipe.peers.peer_tables import our_values, our_words
from dpo_pack.recipe.schema import Recipe
from dpo_pack.recipe.text import Tree, show
from dpo_pack.recipe.types import BROKEN_RULE, Problem, allowed_values


def nested_sections(annotation: Any, *, is_item: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yields the sections that a key can hold, and whether in a list: data.eval (SourceRecipe, True), ..."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_item
    for argument in get_args(annotation):
        yield from nested_sections(argument, is_item=is_item or get_origin(annotation) is tuple)


@functools.cache
def recipe_fields(section: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, FieldInfo]:
    """Returns the dotted keys of a recipe in the schema's order; items of lists have number 0."""
    fields: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        fields[prefix + name] = field
        for nested, is_item in nested_sections(field.annotation):
            inner = f"{prefix}{name}{'.0' if is_item else ''}"
            fields |= {inner: field} | recipe_fields(nested, f"{inner}.")
    return fields


def recipe_problems(errors: Sequence[ErrorDetails], tree: Tree) -> list[Problem]:
    """Turns pydantic's errors into problems: unknown keys first, because a misspelt key is also missing."""
    in_order = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    problems = [_problem(error, tree) for error in in_order]
    # If an item of a list is wrong, pydantic also reports that the list is too short.
    inner = [key for key, _ in problems]
    return [(key, message) for key, message in problems if not any(k.startswith(f"{key}.") for k in inner)]


def _problem(error: ErrorDetails, tree: Tree) -> Problem:
    tags = ("(sources)", "(fraction)", "(name)", "(terms)")  # pydantic's names of the members of unions
    parts = [str(part) for part in error["loc"][:-1] if part not in tags] + [str(error["loc"][-1])]
    if error["type"] == BROKEN_RULE:
        return ".".join(parts), error["msg"]
    if error["type"] == "extra_forbidden":
        return ".".join(parts), f"unknown key; {_nearest(parts)}"
    if parts[-1] == "[key]":  # of the mapping `columns`
        return ".".join(parts[:-1]), f"unknown key; {_nearest(parts[:-1])}"
    while _numbered(parts) not in recipe_fields():  # pydantic's names for parts of a plain value
        parts.pop()
    key, field = ".".join(parts), recipe_fields()[_numbered(parts)]
    if error["type"] == "missing" and isinstance(error["loc"][-1], str):
        instance = f", as in {parts[-1]}: {field.examples[0]}" if field.examples else ""
        return key, f"required, but not given{instance}"
    if error["type"] == "value_error":
        return key, error["msg"].removeprefix("Value error, ")
    value: Any = tree
    for part in parts:
        value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
    ours = our_values().get(key, {}).get(value.lower()) if isinstance(value, str) else None
    remedy = f", which is {ours} here" if ours else ""
    if error["type"] == "string_type" and isinstance(value, (bool, int, float)):
        remedy = "; put it in quotes"
    return key, f"must be {allowed_values(field.annotation, field.metadata)}, not {show(value)}{remedy}"


def _numbered(parts: Sequence[str]) -> str:
    return ".".join("0" if part.isdecimal() else part for part in parts)


def _nearest(parts: Sequence[str]) -> str:
    *section, name = parts
    known, words, prefix = recipe_fields(), our_words(), "".join(f"{part}." for part in section)
    if "." in name and name in known:
        return f"only overrides have dots; in YAML write {name.replace('.', ': {', 1)}: ...}}"
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == _numbered(section)]
    beside = beside or list(get_args(RowField))  # in `columns`
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    if not elsewhere and name in words:
        return words[name]
    # A peer's keys are compared as keys of this section, so that all begin alike.
    texts = {prefix + key: word for key, word in words.items()}
    texts |= {key: f"did you mean {key}?" for key in (*known, *(prefix + key for key in beside))}
    close = difflib.get_close_matches(prefix + name, texts, n=1, cutoff=0.7) or elsewhere
    close = elsewhere if len(elsewhere) == 1 else close
    return texts[close[0]] if close else f"known here: {', '.join(beside)}"


def advice_on_option(name: str) -> str | None:
    """Returns what to write in place of `--name`, which is no option; None if no recipe key is meant."""
    if name == "config":
        return "give the recipe without an option, as in dpopack train recipe.yaml"
    name = name.replace("-", "_")
    if keys := [key for key in recipe_fields() if name in (key, key.rpartition(".")[2])]:
        return f"write {keys[0]}=VALUE after the recipe"
    word = our_words().get(name)
    return f"{word}; set keys after the recipe, as in optim.lr=1e-6" if word else None
