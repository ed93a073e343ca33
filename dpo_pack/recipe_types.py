"""What recipe keys are made of: sections, paths, ranges, and how each is said in words."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict, ValidationInfo


class Section(BaseModel):
    """A mapping in a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Says in words what a key may hold, where its annotation would not read well."""

    text: str


def allowed_values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a key may hold, in words: "a number > 0", "auto or a whole number >= 1"."""
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed_values(arguments[0], arguments[1:])
    if origin is Literal:
        return str(arguments[0]) if len(arguments) == 1 else "one of " + ", ".join(arguments)
    if origin in (Union, UnionType):
        return " or ".join(allowed_values(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with keys among {', '.join(annotation.model_fields)}"
    return _SCALARS_IN_WORDS[annotation] + _range_in_words(metadata)


_SCALARS_IN_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
}


def _range_in_words(metadata: Sequence[Any]) -> str:
    bounds = []
    for item in metadata:
        match item:
            case Gt():
                bounds.append(f"> {item.gt}")
            case Ge():
                bounds.append(f">= {item.ge}")
            case Lt():
                bounds.append(f"< {item.lt}")
            case Le():
                bounds.append(f"<= {item.le}")
    return " " + " and ".join(bounds) if bounds else ""


def expand_path(value: object, info: ValidationInfo) -> object:
    """Replaces `${recipe_dir}` and a leading `~`; any other `${...}` is refused, not taken literally."""
    if not isinstance(value, str):
        return value
    if not value:
        raise ValueError("must not be empty")
    if "${" in value.replace("${recipe_dir}", ""):
        raise ValueError(f"only ${{recipe_dir}} is expanded in paths, so {value!r} cannot be used")
    context: dict[str, str] = info.context or {}
    return os.path.expanduser(value.replace("${recipe_dir}", context.get("recipe_dir", ".")))


# YAML has neither tuples nor paths, so these (`Strict(False)`) are converted; everything else must match.
PathText = Annotated[str, BeforeValidator(expand_path), Allowed("a path or a hub id")]
LocalPath = Annotated[Path, Strict(False), BeforeValidator(expand_path), Allowed("a path")]
OptionalLocalPath = Annotated[
    Path | None, Strict(False), BeforeValidator(expand_path), Allowed("a path or null")
]
Name = Annotated[str, MinLen(1)]
Count = Annotated[int, Ge(1)]
MAX_ROW_TOKENS = 2**31 - 1  # cu_seqlens are int32
TokenCount = Annotated[int, Ge(1), Le(MAX_ROW_TOKENS)]
PositiveNumber = Annotated[float, Gt(0)]
NonNegativeNumber = Annotated[float, Ge(0)]
Fraction = Annotated[float, Gt(0), Lt(1)]
PartBelowOne = Annotated[float, Ge(0), Lt(1)]
