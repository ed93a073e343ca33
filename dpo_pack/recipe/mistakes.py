"""Says what is wrong in a recipe: the key, the mistake, and how to mend it."""

import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dpo_pack.recipe.data import RowField
from dpo_pack.recipe.peers.peer_tables import PEERS, our_words, read_table, rows_of
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
    unknown = {str(error["loc"][0]) for error in errors if error["type"] == "extra_forbidden"}
    peer = max(PEERS, key=lambda peer: len(rows_of(peer).keys() & unknown))
    theirs = sorted(rows_of(peer).keys() & unknown)
    if len(theirs) > 1 and not tree["model"] and not tree["data"]:
        remedy = f"'dpopack recipe --from {peer} FILE > recipe.yaml' makes a recipe of it"
        return [(", ".join(theirs[:3]), f"this is a file of {read_table(peer)['name']}; {remedy}")]
    problems = [_problem(error) for error in sorted(errors, key=lambda e: e["type"] != "extra_forbidden")]
    # If an item of a list is wrong, pydantic also reports that the list is too short.
    inner = [key for key, _ in problems]
    return [(key, message) for key, message in problems if not any(k.startswith(f"{key}.") for k in inner)]


def _problem(error: ErrorDetails) -> Problem:
    tags = ("(sources)", "(fraction)", "(name)", "(terms)")  # pydantic's names of the members of unions
    parts = [str(part) for part in error["loc"] if part not in tags]
    if error["type"] == BROKEN_RULE:
        return ".".join(parts), error["msg"]
    if error["type"] == "extra_forbidden":
        return ".".join(parts), f"unknown key; {_nearest(parts)}"
    if parts[-1] == "[key]":  # of the mapping `columns`, whose keys are fields of a pair
        return ".".join(
            parts[:-1]
        ), f"write {{FIELD: column}}; the fields are {', '.join(get_args(RowField))}"
    while _numbered(parts) not in recipe_fields():  # pydantic's names for parts of a plain value
        parts.pop()
    field = recipe_fields()[_numbered(parts)]
    if error["type"] == "missing" and isinstance(error["loc"][-1], str):
        instance = f", as in {parts[-1]}: {field.examples[0]}" if field.examples else ""
        return ".".join(parts), f"required, but not given{instance}"
    if error["type"] == "value_error":
        return ".".join(parts), error["msg"].removeprefix("Value error, ")
    allowed = allowed_values(field.annotation, field.metadata)
    return ".".join(parts), f"must be {allowed}, not {show(error['input'])}"


def _numbered(parts: Sequence[str]) -> str:
    return ".".join("0" if part.isdecimal() else part for part in parts)


def _nearest(parts: Sequence[str]) -> str:
    *section, name = parts
    known = recipe_fields()
    if "." in name and name in known:
        return f"only overrides have dots; in YAML write {name.replace('.', ': {', 1)}: ...}}"
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == _numbered(section)]
    # Names alone are compared: with the same section before them any two would be alike.
    texts = our_words() | {key.rpartition(".")[2]: f"did you mean {key}?" for key in reversed(known)}
    texts |= {key: f"did you mean {'.'.join([*section, key])}?" for key in beside}
    close = difflib.get_close_matches(name, texts, n=1, cutoff=0.8)
    return texts[close[0]] if close else f"known here: {', '.join(beside)}"


def advice_on_option(name: str) -> str | None:
    """Returns what to write in place of `--name`, which is no option; None if no recipe key is meant."""
    if name == "config":
        return "give the recipe without an option, as in dpopack train recipe.yaml"
    name = name.replace("-", "_")
    if keys := [key for key in recipe_fields() if name in (key, key.rpartition(".")[2])]:
        return f"write {keys[0]}=VALUE after the recipe"
    example = "set keys after the recipe, as in optim.lr=1e-6"
    if name in ("set", "override"):
        return example
    return f"{our_words()[name]}; {example}" if name in our_words() else None
