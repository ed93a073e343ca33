"""Turns the mistakes in a recipe into an error of one line: the key, what is wrong, and how to mend it.

If there are several, the error has the first one in full and the keys of the others.
"""

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dpo_pack.recipe.data import RowField
from dpo_pack.recipe.schema import Recipe
from dpo_pack.recipe.types import BROKEN_RULE, Problem, allowed_values
from dpo_pack.system.errors import RecipeError

Tree = dict[str, Any]  # a recipe or a part of a recipe, as read from YAML


def fail(message: str) -> NoReturn:
    """Raises RecipeError with the message on one line; escapes characters that cannot be printed."""
    printable = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in message)
    raise RecipeError("".join(printable)) from None


def fail_if_any(problems: Iterable[Problem]) -> None:
    """Raises RecipeError if there are problems; it has the first problem and the keys of the others."""
    by_key: dict[str, str] = {}
    for key, message in problems:
        by_key.setdefault(key, message)
    if not by_key:
        return
    (key, message), *others = by_key.items()
    more = f" (and {len(others)} more: {', '.join(other for other, _ in others)})" if others else ""
    fail(f"{key}: {message}{more}")


def show(value: object) -> str:
    """Returns a value for an error message: as it is written in YAML, but shortened."""
    if isinstance(value, dict):
        return f"a mapping with keys {', '.join(map(str, list(value)[:4]))}" if value else "an empty mapping"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _VALUES.repr(value)


_VALUES = reprlib.Repr()
_VALUES.maxstring = _VALUES.maxother = 60


def nested_sections(annotation: Any, *, is_item: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yields the classes of sections that a key can hold, and whether it holds a list of such sections.

    For `data.eval`: (SourceRecipe, True) and (EvalFraction, False).
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_item
    for argument in get_args(annotation):
        yield from nested_sections(argument, is_item=is_item or get_origin(annotation) is tuple)


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of a section and its sections; list items have number 0: `data.train.0.path`."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for nested, is_item in nested_sections(field.annotation):
            yield from all_keys(nested, f"{prefix}{name}.{'0.' if is_item else ''}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where in a recipe a validation error is."""

    parts: tuple[str, ...]  # of the dotted key
    field: FieldInfo | None  # None if the key is unknown or is an item of a list
    siblings: tuple[str, ...]  # known keys of the section that the key is in
    inside: tuple[type[BaseModel], ...]  # classes of the sections that the key can have as value


def _locate(location: Sequence[str | int]) -> _Place:
    """Finds the place of pydantic's error location: its parts up to the last one that is a recipe key."""
    parts: list[str] = []
    fields: dict[str, FieldInfo] = {}
    field: FieldInfo | None = None
    inside: tuple[type[BaseModel], ...] = (Recipe,)
    for part in location:
        if not inside:  # all later parts are pydantic's names for parts of a plain value
            break
        parts.append(str(part))
        field = None
        if isinstance(part, str):
            fields = {name: known for section in inside for name, known in section.model_fields.items()}
            field = fields.get(part)
            inside = tuple(section for section, _ in nested_sections(field.annotation)) if field else ()
    return _Place(parts=tuple(parts), field=field, siblings=tuple(fields), inside=inside)


_UNION_TAGS = frozenset({"(sources)", "(fraction)", "(name)", "(terms)"})


def recipe_problems(errors: Sequence[ErrorDetails], tree: Tree) -> list[Problem]:
    """Turns pydantic's errors into problems: unknown keys first, because a misspelt key is also missing."""
    in_order = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    problems = [_problem(error, tree) for error in in_order]
    # If an item of a list is wrong, pydantic also reports that the list is too short.
    return [
        (key, message)
        for key, message in problems
        if not any(other.startswith(f"{key}.") for other, _ in problems)
    ]


def _problem(error: ErrorDetails, tree: Tree) -> Problem:
    """Turns one of pydantic's errors into a problem: the key and a message."""
    location = [part for part in error["loc"] if part not in _UNION_TAGS]
    if error["type"] == BROKEN_RULE:
        return ".".join(map(str, location)), error["ctx"]["problem"]
    place = _locate(location)
    key = ".".join(place.parts)
    if place.parts[-1] == "columns" and location[-1] != "columns":
        return _column_problem(key, error)
    if error["type"] == "extra_forbidden":
        return key, f"unknown key; {_nearest_key(place)}"
    if error["type"] == "missing" and place.field and isinstance(location[-1], str):
        instance = f", as in {place.parts[-1]}: {place.field.examples[0]}" if place.field.examples else ""
        return key, f"required, but not given{instance}"
    if error["type"] == "value_error":
        return key, str(error["ctx"]["error"])
    if place.field:
        allowed = allowed_values(place.field.annotation, place.field.metadata)
    else:
        allowed = allowed_values(place.inside[0])
    value: Any = tree
    for part in place.parts:
        value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
    if error["type"] == "string_type" and isinstance(value, (bool, int, float)):
        return key, f"must be {allowed}, not {show(value)}; put it in quotes"
    from dpo_pack.recipe.peers.rules import VALUES  # here, so that recipes without mistakes load sooner

    here = VALUES.get(key, {}).get(value) if isinstance(value, str) else None
    return key, f"must be {allowed}, not {show(value)}{f', which is {here} here' if here else ''}"


def _column_problem(key: str, error: ErrorDetails) -> Problem:
    """Describes a wrong field (pydantic's location ends in "[key]") or column name in data.*.columns."""
    if error["loc"][-1] == "[key]":
        name = str(error["loc"][-2])
        return f"{key}.{name}", f"not a field of a pair; {_nearest(name, get_args(RowField))}"
    return f"{key}.{error['loc'][-1]}", f"must be the name of a column, not {show(error['input'])}"


def _nearest_key(place: _Place) -> str:
    *section, name = place.parts
    known = list(all_keys(Recipe))
    if name in known and "." in name:
        return f"only overrides have dots; in YAML write {name.replace('.', ': {', 1)}: ...}}"
    elsewhere = [key for key in known if key.rsplit(".", 1)[-1] == name]
    beside = [".".join([*section, key]) for key in difflib.get_close_matches(name, place.siblings, n=1)]
    similar = difflib.get_close_matches(".".join(place.parts), known, n=1, cutoff=0.7)
    from dpo_pack.recipe.peers import our_word

    if not elsewhere and (word := our_word(name)):
        return word
    likely = [*elsewhere, *beside] if len(elsewhere) == 1 else [*beside, *elsewhere, *similar]
    return f"did you mean {likely[0]}?" if likely else _nearest(name, place.siblings)


def advice_on_option(name: str) -> str | None:
    """Returns what to write in place of `--name`, which is no option; None if no recipe key is meant."""
    if name == "config":
        return "give the recipe without an option, as in dpopack train recipe.yaml"
    name = name.replace("-", "_")
    keys = [key for key in all_keys(Recipe) if name in (key, key.rsplit(".", 1)[-1])]
    if keys:
        return f"write {keys[0]}=VALUE after the recipe"
    from dpo_pack.recipe.peers import our_word

    word = our_word(name)
    return f"{word}; set keys after the recipe, as in optim.lr=1e-6" if word else None


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
