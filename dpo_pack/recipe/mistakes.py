"""Says what is wrong in a recipe: the key, the mistake, and how to mend it."""

import contextlib
import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dpo_pack.recipe.data import RowField
from dpo_pack.recipe.peers.peer_tables import PEERS, our_values, our_words, read_table, rows_of
from dpo_pack.recipe.schema import Recipe
from dpo_pack.recipe.text import Tree, read_yaml, show, to_yaml
from dpo_pack.recipe.types import BROKEN_RULE, Problem, Section, allowed_values
from dpo_pack.system.errors import RecipeError


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
        keys = ", ".join([*theirs[:3], *(["..."] if len(theirs) > 3 else [])])
        remedy = f"'dpopack recipe --from {peer} FILE > recipe.yaml' makes a recipe of it"
        return [(keys, f"this is a file of {read_table(peer)['name']}; {remedy}")]
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
        return ".".join(parts[:-1]), f"no field of a pair; {_nearest_field(parts[:-1], tree)}"
    while _numbered(parts) not in recipe_fields():  # pydantic's names for parts of a plain value
        parts.pop()
    field = recipe_fields()[_numbered(parts)]
    if error["type"] == "missing" and isinstance(error["loc"][-1], str):
        instance = f", as in {parts[-1]}: {field.examples[0]}" if field.examples else ""
        return ".".join(parts), f"required, but not given{instance}"
    if error["type"] == "value_error":
        return ".".join(parts), error["msg"].removeprefix("Value error, ")
    allowed = f"must be {allowed_values(field.annotation, field.metadata)}"
    whole = parts[:-1] if parts[-1].isdecimal() else parts
    if (form := _right_form(whole, field, tree, is_text=error["type"] == "string_type")) is not None:
        return ".".join(whole), f"write {form}, not {show(_at(tree, whole))}; it {allowed}"
    return ".".join(parts), f"{allowed}, not {show(_at(tree, parts))}"


def _at(tree: Tree, parts: Sequence[str]) -> Any:
    return functools.reduce(
        lambda value, part: value[int(part) if isinstance(value, (list, tuple)) else part], parts, tree
    )


def _right_form(parts: Sequence[str], field: FieldInfo, tree: Tree, *, is_text: bool) -> str | None:
    """Returns as YAML what a wrong value probably means, in a form that the key takes, if there is one:
    0.1 for '0.1', {r: 16} for 16, [{type: sft}] for [sft], our word for a peer's."""
    value, forms = _at(tree, parts), list[Any]()
    if is_text and isinstance(value, (bool, int, float)):
        forms = [to_yaml(value, one_line=True)]
    elif isinstance(value, str):
        with contextlib.suppress(RecipeError):
            forms = [read_yaml(value, where="")]
        forms += [value.lower(), our_values().get(".".join(parts), {}).get(value.lower()), [value]]
    elif isinstance(value, float) and value.is_integer():
        forms = [int(value)]
    for section, _ in nested_sections(field.annotation):
        first = next(iter(section.model_fields))
        forms.append([{first: item} for item in value] if isinstance(value, list) else {first: value})
    key: Any = Annotated[field.annotation, "", *field.metadata]  # typing wants one item or more
    one_key = create_model("OneKey", __base__=Section, key=(key, ...))
    for form in forms:
        with contextlib.suppress(ValidationError):
            if form is not None:
                one_key.model_validate({"key": form})
                return to_yaml(form, one_line=True)
    return None


def _numbered(parts: Sequence[str]) -> str:
    return ".".join("0" if part.isdecimal() else part for part in parts)


def _nearest(parts: Sequence[str]) -> str:
    *section, name = parts
    known, words, prefix = recipe_fields(), our_words(), "".join(f"{part}." for part in section)
    if "." in name and name in known:
        return f"only overrides have dots; in YAML write {name.replace('.', ': {', 1)}: ...}}"
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == _numbered(section)]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    if len(elsewhere) == 1:
        return f"did you mean {elsewhere[0]}?"
    if not elsewhere and name in words:
        return words[name]
    # Names alone are compared: with the same section before them any two would be alike.
    texts = words | {key.rpartition(".")[2]: f"did you mean {key}?" for key in reversed(known)}
    texts |= {key: f"did you mean {prefix}{key}?" for key in beside}
    close = difflib.get_close_matches(name, texts, n=1, cutoff=0.8)
    return texts[close[0]] if close else f"known here: {', '.join(beside)}"


def _nearest_field(parts: Sequence[str], tree: Tree) -> str:
    *columns, name = parts
    fields, column = get_args(RowField), _at(tree, parts)
    if column in fields:
        return f"write {{{column}: {name}}}: dpo-pack's name comes first, then your column"
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.8)
    return f"did you mean {'.'.join([*columns, *close])}?" if close else f"the fields are {', '.join(fields)}"


def advice_on_option(name: str) -> str | None:
    """Returns what to write in place of `--name`, which is no option; None if no recipe key is meant."""
    if name == "config":
        return "give the recipe without an option, as in dpopack train recipe.yaml"
    if name == "template":
        return "copy a file of configs/ instead, or begin with what 'dpopack recipe --defaults' prints"
    name = name.replace("-", "_")
    if keys := [key for key in recipe_fields() if name in (key, key.rpartition(".")[2])]:
        return f"write {keys[0]}=VALUE after the recipe"
    example = "set keys after the recipe, as in optim.lr=1e-6"
    if name in ("set", "override"):
        return example
    return f"{our_words()[name]}; {example}" if name in our_words() else None
