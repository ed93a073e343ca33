"""The base class of recipe sections, the types of keys (paths, ranges), and words for allowed values."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import pydantic
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict, WrapSerializer, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from dpo_pack.system.hub import name_for_others

Problem = tuple[str, str]  # (dotted key, what is wrong with it and how to mend it)


class Section(BaseModel):
    """A mapping in a recipe. The string below a key becomes its description in help and docs."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True,
        defer_build=True,  # so that the import of this package is quick
    )  # fmt: skip

    def is_changed(self, key: str) -> bool:
        """Returns True if the recipe has another value than the default for this key."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def broken_rules(self) -> Iterator[Problem]:
        """Yields problems between keys, each of which is valid alone. Yielded keys have no section name."""
        return iter(())

    @model_validator(mode="after")
    def _keep_the_rules(self) -> Self:
        errors: list[InitErrorDetails] = []
        for key, problem in self.broken_rules():
            kind = PydanticCustomError("value_error", "{problem}", {"problem": problem})
            errors.append({"type": kind, "loc": tuple(key.split(".")), "input": None})
        if errors:
            raise pydantic.ValidationError.from_exception_data(type(self).__name__, errors)
        return self


def allowed_values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Returns the allowed values of a key in words: "a number > 0", "auto or a whole number >= 1". A text in
    its metadata says it where words made from its type would be unclear."""
    for item in metadata:
        if isinstance(item, str):
            return item
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed_values(arguments[0], arguments[1:])
    if origin is Literal:
        return str(arguments[0]) if len(arguments) == 1 else "one of " + ", ".join(arguments)
    if origin in (Union, UnionType):
        return " or ".join(allowed_values(argument) for argument in arguments)
    if isinstance(annotation, type(BaseModel)):
        return f"a mapping with keys among {', '.join(annotation.model_fields)}"
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in metadata
        for kind, sign, name in ((Gt, ">", "gt"), (Ge, ">=", "ge"), (Lt, "<", "lt"), (Le, "<=", "le"))
        if isinstance(item, kind)
    ]
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
    return f"{words[annotation]} {' and '.join(bounds)}".rstrip()


def nested_sections(annotation: Any, *, is_item: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yields the sections that a key can hold, and whether in a list: data.eval (SourceRecipe, True), ..."""
    if isinstance(annotation, type(BaseModel)):
        yield annotation, is_item
    for argument in get_args(annotation):
        yield from nested_sections(argument, is_item=is_item or get_origin(annotation) is tuple)


def expand_path(value: object, info: pydantic.ValidationInfo) -> object:
    """Replaces `${recipe_dir}` and a leading `~`. Raises ValueError for any other `${...}`."""
    if not isinstance(value, str):
        return value
    if not value:
        raise ValueError("must not be empty")
    if "${" in value.replace("${recipe_dir}", ""):
        raise ValueError(f"only ${{recipe_dir}} is expanded in paths, so {value!r} cannot be used")
    context: dict[str, str] = info.context or {}
    return os.path.expanduser(value.replace("${recipe_dir}", context.get("recipe_dir", ".")))


def _dump_path(
    value: object, handler: pydantic.SerializerFunctionWrapHandler, info: pydantic.SerializationInfo
) -> Any:
    """Dumps a path as it is; with `context={"for_others": True}`, as `name_for_others(path)`."""
    is_for_others = value is not None and (info.context or {}).get("for_others")
    return name_for_others(str(value)) if is_for_others else handler(value)


NamesOnly = WrapSerializer(_dump_path)
IsPath = (BeforeValidator(expand_path), NamesOnly)
# YAML has no tuples and no paths: `Strict(False)` lets pydantic convert the values of these keys only.
PathText = Annotated[str, *IsPath, "a path or a hub id"]
LocalPath = Annotated[Path, Strict(False), *IsPath, "a path"]
Name = Annotated[str, MinLen(1)]
MODULE_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # a function that the user wrote
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
MAX_ROW_TOKENS = 2**31 - 1  # cu_seqlens are int32
TokenCount = Annotated[int, Ge(1), Le(MAX_ROW_TOKENS)]
PositiveNumber = Annotated[float, Gt(0)]
NonNegativeNumber = Annotated[float, Ge(0)]
Fraction = Annotated[float, Gt(0), Lt(1)]
PartBelowOne = Annotated[float, Ge(0), Lt(1)]
