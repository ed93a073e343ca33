"""What is wrong with a recipe, said in its own words: one line that names the key and how to mend it.

However many problems there are, they become one `RecipeError`: the first, and the keys of the others.
"""

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dpo_pack.errors import RecipeError
from dpo_pack.recipe_online import JudgeRecipe
from dpo_pack.recipe_schema import LossTerm, Recipe, RowField, SourceRecipe, allowed_values

Tree = dict[str, Any]  # a recipe, or a part of one, as YAML has it
Problem = tuple[str, str]  # dotted key, what is wrong with it


def fail(message: str) -> NoReturn:
    """Raises RecipeError with the message on one line: what cannot be printed is escaped."""
    printable = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in message)
    raise RecipeError("".join(printable)) from None


def fail_if_any(problems: Iterable[Problem]) -> None:
    """Raises RecipeError with the first problem of the first key, and the names of the other keys."""
    by_key: dict[str, str] = {}
    for key, message in problems:
        by_key.setdefault(key, message)
    if not by_key:
        return
    (key, message), *others = by_key.items()
    more = f" (and {len(others)} more: {', '.join(other for other, _ in others)})" if others else ""
    fail(f"{key}: {message}{more}")


def show(value: object) -> str:
    """A value as its YAML would be, shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return (
                f"a mapping with keys {', '.join(map(str, list(value)[:4]))}" if value else "an empty mapping"
            )
    return _VALUES.repr(value)


_VALUES = reprlib.Repr()
_VALUES.maxstring = _VALUES.maxother = 60


def nested_sections(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The models a key's value can be made of: (SourceRecipe, EvalFraction) for `data.eval`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    arguments = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return tuple(section for argument in arguments for section in nested_sections(argument))


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a section and all within it, items of lists numbered 0: `data.train.0.path`."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for nested in nested_sections(field.annotation):
            position = "0." if nested in (SourceRecipe, LossTerm, JudgeRecipe) else ""
            yield from all_keys(nested, f"{prefix}{name}.{position}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where in the schema a validation error is."""

    parts: tuple[str, ...]  # of the dotted key
    field: FieldInfo | None  # None: an unknown key, or an item of a list
    siblings: tuple[str, ...]  # keys known beside it
    inside: tuple[type[BaseModel], ...]  # what its value is made of


def _locate(location: Sequence[str | int]) -> _Place:
    """Follows an error's location down to the last key that the recipe's writer would recognise."""
    parts: list[str] = []
    field: FieldInfo | None = None
    siblings: tuple[str, ...] = ()
    inside: tuple[type[BaseModel], ...] = (Recipe,)
    for part in location:
        if part in _UNION_TAGS:
            continue
        if not inside:  # within a plain value: pydantic's names for its parts
            break
        parts.append(str(part))
        if isinstance(part, int):
            field = None
            continue
        fields = {name: known for section in inside for name, known in section.model_fields.items()}
        siblings, field = tuple(fields), fields.get(part)
        inside = nested_sections(field.annotation) if field else ()
    return _Place(parts=tuple(parts), field=field, siblings=siblings, inside=inside)


_UNION_TAGS = frozenset({"(sources)", "(fraction)", "(name)", "(terms)"})


def schema_problems(errors: Sequence[ErrorDetails], tree: Tree) -> list[Problem]:
    """The problems behind pydantic's errors; unknown keys first, since a misspelt key is also missing."""
    in_order = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    problems = [_schema_problem(error, tree) for error in in_order]
    # A list with a wrong item is also reported as too short.
    return [
        (key, message)
        for key, message in problems
        if not any(other.startswith(f"{key}.") for other, _ in problems)
    ]


def _schema_problem(error: ErrorDetails, tree: Tree) -> Problem:
    """One of pydantic's errors in the recipe's own words."""
    place = _locate(error["loc"])
    key = ".".join(place.parts)
    if place.parts[-1] == "columns" and error["loc"][-1] != "columns":
        return _column_problem(key, error)
    if error["type"] == "extra_forbidden":
        return key, f"unknown key; {_nearest_key(place)}"
    if error["type"] == "missing" and place.field and isinstance(error["loc"][-1], str):
        instance = f", as in {place.parts[-1]}: {place.field.examples[0]}" if place.field.examples else ""
        return key, f"required, but not given{instance}"
    if error["type"] == "value_error":
        return key, str(error["ctx"]["error"])
    if place.field:
        allowed = allowed_values(place.field.annotation, place.field.metadata)
    else:
        allowed = allowed_values(place.inside[0])
    value = value_at(tree, place.parts)
    quote = error["type"] == "string_type" and isinstance(value, (bool, int, float))
    return key, f"must be {allowed}, not {show(value)}{'; put it in quotes' if quote else ''}"


def _column_problem(key: str, error: ErrorDetails) -> Problem:
    """A wrong field (pydantic's location ends in "[key]") or a wrong column name in data.*.columns."""
    if error["loc"][-1] == "[key]":
        name = str(error["loc"][-2])
        return f"{key}.{name}", f"no field of a pair; {_nearest(name, get_args(RowField))}"
    return f"{key}.{error['loc'][-1]}", f"must be the name of a column, not {show(error['input'])}"


def value_at(tree: Any, parts: Iterable[str]) -> Any:
    """What a tree holds at the parts of a dotted key, which must be there."""
    for part in parts:
        tree = tree[int(part)] if isinstance(tree, (list, tuple)) else tree[part]
    return tree


def _nearest_key(place: _Place) -> str:
    *section, name = place.parts
    known = list(all_keys(Recipe))
    if name in known and "." in name:
        return f"only overrides have dots; in YAML write {name.replace('.', ': {', 1)}: ...}}"
    elsewhere = [key for key in known if key.rsplit(".", 1)[-1] == name]
    beside = [".".join([*section, key]) for key in difflib.get_close_matches(name, place.siblings, n=1)]
    similar = difflib.get_close_matches(".".join(place.parts), known, n=1, cutoff=0.7)
    likely = [*elsewhere, *beside] if len(elsewhere) == 1 else [*beside, *elsewhere, *similar]
    return f"did you mean {likely[0]}?" if likely else _nearest(name, place.siblings)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
