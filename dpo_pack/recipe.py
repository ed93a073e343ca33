"""Recipes: load from YAML, override, check, dump. Imports no torch, so that commands start at once.

A recipe goes from text to a tree of plain values, overrides are put into the tree, the schema checks each
key, then come rules that join keys and what this version can do. A problem is a dotted key and what is wrong
with it; however many there are, they become one `RecipeError` of one line.
"""

import difflib
import importlib.util
import os
import re
import reprlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dpo_pack.errors import RecipeError
from dpo_pack.recipe_schema import (
    CheckpointRecipe,
    DataRecipe,
    DistributedRecipe,
    EvalFraction,
    LoggingRecipe,
    LoraRecipe,
    LossRecipe,
    LossTerm,
    LossType,
    ModelRecipe,
    OptimRecipe,
    PackingRecipe,
    Recipe,
    ReferenceRecipe,
    RowField,
    SourceRecipe,
    TokenizerRecipe,
    Tracker,
    TrainRecipe,
    allowed_values,
    as_eval,
    as_sources,
)

__all__ = [
    "NEUTRAL_KEYS", "ROW_LAYOUT_KEYS", "CheckpointRecipe", "DataRecipe", "DistributedRecipe",
    "EvalFraction", "LoggingRecipe", "LoraRecipe", "LossRecipe", "LossTerm", "LossType", "ModelRecipe",
    "OptimRecipe", "PackingRecipe", "Recipe", "ReferenceRecipe", "SourceRecipe", "TokenizerRecipe",
    "TrainRecipe", "changed_keys", "check_environment", "check_paths", "check_trackers",
    "default_in_yaml", "describe_key", "dump_recipe", "load_recipe", "parse_recipe", "recipe_defaults",
    "recipe_schema", "source_names",
]  # fmt: skip

Tree = dict[str, Any]
Problem = tuple[str, str]  # dotted key, what is wrong with it


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and applies `key=value` overrides, the last one winning.

    Raises RecipeError for anything that can be found wrong without looking at the machine or loading a model;
    `check_environment` looks at the machine.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        _fail(f"{path}: no such recipe; 'dpopack recipe --defaults' prints one to begin with")
    except UnicodeDecodeError as error:
        _fail(f"{path}: not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); save it as UTF-8")
    except OSError as error:
        _fail(f"{path}: cannot read the recipe: {error.strerror}")
    tree = _read_yaml(text, where=str(path))
    if tree is None:
        _fail(f"{path}: the recipe is empty; 'dpopack recipe --defaults' prints one to begin with")
    if not isinstance(tree, dict):
        _fail(f"{path}: a recipe is a mapping of 'key: value' lines, not {_show(tree)}")
    return parse_recipe(tree, overrides, recipe_dir=path.parent)


def parse_recipe(
    tree: Mapping[str, Any], overrides: Sequence[str] = (), *, recipe_dir: Path = Path()
) -> Recipe:
    """A recipe from a mapping as YAML gives it; `${recipe_dir}` in its paths becomes `recipe_dir`.

    Raises RecipeError.
    """
    tree = _without_shorthands(tree)
    for override in overrides:
        tree = _without_shorthands(_apply_override(tree, override))
    try:
        recipe = Recipe.model_validate(tree, context={"recipe_dir": os.path.abspath(recipe_dir)})
    except ValidationError as invalid:
        _fail_if_any(_schema_problems(invalid.errors(include_url=False), tree))
        raise
    _fail_if_any([*_unavailable(recipe), *_broken_rules(recipe)])
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; loading it gives an equal recipe."""
    return _to_yaml(recipe.model_dump(mode="json"))


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Recipe.model_json_schema(),
        "title": "dpo-pack recipe",
    }


def recipe_defaults() -> str:
    """A valid recipe with every key at its default, each with its meaning; required keys hold an instance."""
    heading = "# A dpo-pack recipe. output_dir, model.path and data.train are required."
    return re.sub(r"\n{3,}", "\n\n", "\n".join([heading, "", *_commented(Recipe), ""]))


# ---------------------------------------------------------------------------------------------- problems


def _fail(message: str) -> NoReturn:
    printable = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in message)
    raise RecipeError("".join(printable)) from None


def _fail_if_any(problems: Iterable[Problem]) -> None:
    """Raises the first problem of the first key, and names the other keys."""
    by_key: dict[str, str] = {}
    for key, message in problems:
        by_key.setdefault(key, message)
    if not by_key:
        return
    (key, message), *others = by_key.items()
    more = f" (and {len(others)} more: {', '.join(other for other, _ in others)})" if others else ""
    _fail(f"{key}: {message}{more}")


def _show(value: object) -> str:
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


def _nested_sections(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The models a key's value can be made of: (SourceRecipe, EvalFraction) for `data.eval`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    arguments = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return tuple(section for argument in arguments for section in _nested_sections(argument))


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for nested in _nested_sections(field.annotation):
            position = "0." if nested in (SourceRecipe, LossTerm) else ""
            yield from _all_keys(nested, f"{prefix}{name}.{position}")


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
        inside = _nested_sections(field.annotation) if field else ()
    return _Place(parts=tuple(parts), field=field, siblings=siblings, inside=inside)


_UNION_TAGS = frozenset({"(sources)", "(fraction)", "(name)", "(terms)"})


def _schema_problems(errors: Sequence[ErrorDetails], tree: Tree) -> list[Problem]:
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
    value = _value_at(tree, place.parts)
    quote = error["type"] == "string_type" and isinstance(value, (bool, int, float))
    return key, f"must be {allowed}, not {_show(value)}{'; put it in quotes' if quote else ''}"


def _column_problem(key: str, error: ErrorDetails) -> Problem:
    """A wrong field (pydantic's location ends in "[key]") or a wrong column name in data.*.columns."""
    if error["loc"][-1] == "[key]":
        name = str(error["loc"][-2])
        return f"{key}.{name}", f"no field of a pair; {_nearest(name, get_args(RowField))}"
    return f"{key}.{error['loc'][-1]}", f"must be the name of a column, not {_show(error['input'])}"


def _value_at(tree: Any, parts: Iterable[str]) -> Any:
    for part in parts:
        tree = tree[int(part)] if isinstance(tree, (list, tuple)) else tree[part]
    return tree


def _nearest_key(place: _Place) -> str:
    *section, name = place.parts
    known = list(_all_keys(Recipe))
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


# -------------------------------------------------------------------------------------------------- YAML


def _read_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML text; RecipeError with line and column where it is invalid."""
    try:
        node = yaml.compose(text, Loader=_RecipeLoader)
        return None if node is None else _value_of(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        _fail(f"{where}{place}: invalid YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        _fail(f"{where}, line {line}: invalid YAML: a character that is not allowed")
    except RecursionError:
        _fail(f"{where}: invalid YAML: nested too deeply")


def _value_of(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_value_of(item) for item in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _mapping_of(node)
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
        _fail_at(node, f"tag {node.tag} is not supported")
    try:
        return _SCALARS[node.tag].read(node.value)
    except (KeyError, ValueError):
        _fail_at(node, f"cannot be read as {node.tag.rsplit(':', 1)[-1]}")


def _mapping_of(node: yaml.MappingNode) -> Tree:
    mapping: Tree = {}
    first_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = _value_of(key_node)
        if not isinstance(key, str):
            _fail_at(key_node, "a key must be text")
        if key in mapping:
            _fail_at(key_node, f"key '{key}' is given twice, first on line {first_lines[key]}")
        mapping[key] = _value_of(value_node)
        first_lines[key] = key_node.start_mark.line + 1
    return mapping


def _fail_at(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scalar:
    pattern: str  # of plain text that has this type
    first: Sequence[str]  # characters such text can begin with
    read: Callable[[str], Any]


# YAML 1.2's: 1.1, which PyYAML follows, reads 5e-7 as text, 010 as 8, 1:30 as 90 and no as false.
_SCALARS = {
    "tag:yaml.org,2002:null": _Scalar(
        pattern="~|null|Null|NULL|", first=["~", "n", "N", ""], read=lambda text: None
    ),
    "tag:yaml.org,2002:bool": _Scalar(
        pattern="true|True|TRUE|false|False|FALSE",
        first="tTfF",
        read=lambda text: {"true": True, "false": False}[text.lower()],
    ),
    "tag:yaml.org,2002:int": _Scalar(pattern="[-+]?[0-9]+", first="-+0123456789", read=int),
    "tag:yaml.org,2002:float": _Scalar(
        pattern=r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        first="-+.0123456789",
        read=lambda text: float(re.sub(r"\.(?=[a-zA-Z])", "", text)),
    ),
    "tag:yaml.org,2002:str": _Scalar(pattern="(?!)", first="", read=str),
}


class _RecipeLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}


class _RecipeDumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else."""


for _tag, _scalar in _SCALARS.items():
    for _reader_or_writer in (_RecipeLoader, _RecipeDumper):
        _reader_or_writer.add_implicit_resolver(
            _tag, re.compile(rf"(?:{_scalar.pattern})\Z"), list(_scalar.first)
        )


def _to_yaml(value: object, *, one_line: bool = False) -> str:
    text = yaml.dump(
        value,
        Dumper=_RecipeDumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
        default_flow_style=one_line,
    )
    return text.removesuffix("...\n").strip() if one_line else text


def _commented(section: type[BaseModel], prefix: str = "", indent: str = "") -> list[str]:
    """The lines of a section with each key's meaning above it."""
    lines = []
    for name, field in section.model_fields.items():
        if _is_section(field):
            nested = _nested_sections(field.annotation)[0]
            lines += [
                "",
                f"# {nested.__doc__}",
                f"{name}:",
                *_commented(nested, f"{name}.", indent + "  "),
                "",
            ]
            continue
        comment = f"{describe_key(prefix + name, field)} [{allowed_values(field.annotation, field.metadata)}]"
        lines += textwrap.wrap(
            comment, width=100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        if name == "train":
            lines += [
                f"{indent}{name}:",
                f"{indent}  -",
                *_commented(SourceRecipe, "data.train.", indent + "    "),
            ]
        else:
            lines.append(f"{indent}{name}: {default_in_yaml(field)}")
    return lines


def describe_key(key: str, field: FieldInfo) -> str:
    """A key's meaning, and what of it is available in this version."""
    match AVAILABLE_SO_FAR.get(key):
        case None:
            return str(field.description)
        case (None | False | 0.0,):
            return f"{field.description} Not available yet."
        case available:
            return f"{field.description} Available so far: {_listed(available)}."


def default_in_yaml(field: FieldInfo) -> str:
    """A key's default as one line of YAML; an instance of a required key."""
    if field.is_required():
        return str((field.examples or [""])[0])
    return _to_yaml(field.get_default(call_default_factory=True), one_line=True)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


# --------------------------------------------------------------------------------------------- overrides


def _without_shorthands(tree: Mapping[str, Any]) -> Tree:
    """Empty sections and lone sources written out; what is of a wrong type is left for the schema."""
    sections = {name for name, field in Recipe.model_fields.items() if _is_section(field)}
    full = {name: {} if value is None and name in sections else value for name, value in tree.items()}
    full = {**{name: {} for name in sections - full.keys()}, **full}
    if isinstance(full["data"], dict):
        data = full["data"] = dict(full["data"])
        if "train" in data:
            data["train"] = as_sources(data["train"])
        if "eval" in data:
            data["eval"] = [] if data["eval"] is None else as_eval(data["eval"])
    return full


def _apply_override(tree: Tree, override: str) -> Tree:
    """The tree with one `dotted.key=YAML value` put in; the given tree stays as it is."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        _fail(f"override '{override}': write it as key=value, for instance optim.lr=1e-6")
    value = _read_yaml(text, where=f"override '{override}'")
    changed: Tree = dict(tree)
    container: Any = changed
    for depth, part in enumerate(parts[:-1], start=1):
        position = _position(container, part, parts[: depth - 1])
        child = container[position] if isinstance(container, list) else container.get(position)
        if not isinstance(child, (dict, list)) and child is not None:
            _fail(f"{key.strip()}: {'.'.join(parts[:depth])} is {_show(child)} and has no keys of its own")
        # A copy, since a YAML alias may have put the same mapping in several places.
        container[position] = list(child) if isinstance(child, list) else dict(child or {})
        container = container[position]
    container[_position(container, parts[-1], parts[:-1])] = value
    return changed


def _position(container: Tree | list[Any], part: str, parents: Sequence[str]) -> Any:
    """`part` as an index of a list, or as itself for a mapping."""
    if isinstance(container, dict):
        return part
    if not part.isdecimal() or int(part) >= len(container):
        where = ".".join(parents)
        _fail(f"{where}.{part}: {where} is a list of {len(container)}; its items are {where}.0 and so on")
    return int(part)


# ------------------------------------------------------------------------------------------------- rules


def source_names(sources: Sequence[SourceRecipe]) -> tuple[str, ...]:
    """What reports and metrics call each source: its `name`, else one from its path; all different."""
    names: list[str] = []
    for source in sources:
        short = source.path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gz")
        for suffix in DATA_FILE_SUFFIXES:
            short = short.removesuffix(suffix)
        derived = short if source.split == "train" else f"{short}-{source.split}"
        taken = {*names, *(other.name for other in sources if other.name)}
        choices = (
            derived,
            source.path,
            *(f"{source.path}-{number}" for number in range(2, len(sources) + 2)),
        )
        names.append(source.name or next(choice for choice in choices if choice not in taken))
    return tuple(names)


def _broken_rules(recipe: Recipe) -> Iterator[Problem]:
    """Problems that only several keys together show."""
    yield from _broken_data_rules(recipe.data)
    yield from _broken_packing_rules(recipe.packing)
    yield from _broken_loss_rules(recipe.loss)
    yield from _broken_optim_rules(recipe.optim)
    types = {name for name, _ in recipe.loss.terms}
    if recipe.reference.path and types <= REFERENCE_FREE_LOSSES:
        yield "reference.path", f"no reference is used by loss.type {', '.join(sorted(types))}; leave it out"
    if recipe.train.eval_every_steps and not recipe.data.eval:
        yield "train.eval_every_steps", "there is nothing to evaluate: data.eval is empty"
    for tracker in recipe.logging.trackers:
        if recipe.logging.trackers.count(tracker) > 1:
            yield "logging.trackers", f"'{tracker}' is given twice"


def _broken_data_rules(data: DataRecipe) -> Iterator[Problem]:
    if data.max_prompt_length and data.max_prompt_length >= data.max_length:
        limit = f"data.max_length ({data.max_length}), to leave room for a completion"
        yield "data.max_prompt_length", f"must be below {limit}, not {data.max_prompt_length}"
    if data.system_prompt is not None and all(
        source.format not in ("auto", "conversational") for source in data.train
    ):
        yield (
            "data.system_prompt",
            "only conversations have one, and no source of data.train is conversational",
        )
    eval_sources = () if isinstance(data.eval, EvalFraction) else data.eval
    yield from _broken_source_rules("data.train", data.train)
    yield from _broken_source_rules("data.eval", eval_sources)
    for index, source in enumerate(eval_sources):
        if source.weight != 1.0:
            yield f"data.eval.{index}.weight", "only training sources are mixed by weight; leave it out"


def _broken_source_rules(part: str, sources: Sequence[SourceRecipe]) -> Iterator[Problem]:
    names = [source.name for source in sources]
    for index, source in enumerate(sources):
        if source.name and source.name in names[:index]:
            yield (
                f"{part}.{index}.name",
                f"'{source.name}' is already the name of {part}.{names.index(source.name)}",
            )
        columns = list(source.columns.values())
        for field, column in source.columns.items():
            if columns.count(column) > 1:
                yield f"{part}.{index}.columns", f"column '{column}' is given for several fields"
            if source.format != "auto" and field not in FIELDS_OF_FORMAT[source.format]:
                fields = ", ".join(FIELDS_OF_FORMAT[source.format])
                yield (
                    f"{part}.{index}.columns.{field}",
                    f"rows of format {source.format} have no such field; theirs are {fields}",
                )


def _broken_packing_rules(packing: PackingRecipe) -> Iterator[Problem]:
    defaults = PackingRecipe()
    if packing.scope == "step":
        if packing.rows_per_step is not None:
            yield (
                "packing.rows_per_step",
                "needs packing.scope: epoch; in scope step, pairs_per_step is the step",
            )
        if packing.window_pairs != defaults.window_pairs:
            yield "packing.window_pairs", "needs packing.scope: epoch"
        return
    if packing.rows_per_step is None:
        yield "packing.rows_per_step", "packing.scope epoch needs it: the number of rows in a step"
    if packing.pairs_per_step != defaults.pairs_per_step:
        yield "packing.pairs_per_step", "needs packing.scope: step; in scope epoch, rows_per_step is the step"
    if packing.mode == "padded":
        yield "packing.scope", "epoch needs packing.mode: packed"


def _broken_loss_rules(loss: LossRecipe) -> Iterator[Problem]:
    types = [name for name, _ in loss.terms]
    repeated = sorted({name for name in types if types.count(name) > 1})
    if repeated:
        yield "loss.type", f"'{repeated[0]}' is given twice; add up their weights"
    values = loss.model_dump()
    for option, users in USERS_OF_LOSS_OPTION.items():
        if values[option] != LossRecipe.model_fields[option].default and users.isdisjoint(types):
            yield (
                f"loss.{option}",
                f"not used by loss.type {', '.join(types)}, only by {', '.join(sorted(users))}",
            )
    if "exo_pair" in types and loss.label_smoothing == 0:
        yield "loss.label_smoothing", "must be > 0 for loss.type exo_pair, which takes its logarithm"
    if loss.f_alpha != LossRecipe.model_fields["f_alpha"].default and loss.f_divergence != "alpha_divergence":
        yield "loss.f_alpha", "only used by loss.f_divergence: alpha_divergence"
    without_divergence = sorted(set(types) - F_DIVERGENCE_LOSSES)
    if loss.f_divergence != "reverse_kl" and without_divergence:
        yield "loss.f_divergence", f"loss.type {', '.join(without_divergence)} is defined for reverse_kl only"
    sorting = sorted({"aot", "aot_unpaired"} & set(types))
    if loss.weighting and sorting:
        yield "loss.weighting", f"loss.type {', '.join(sorting)} sorts over pairs, so pairs have no weights"


def _broken_optim_rules(optim: OptimRecipe) -> Iterator[Problem]:
    if optim.schedule == "constant":
        for key, value in (("warmup_ratio", optim.warmup_ratio), ("warmup_steps", optim.warmup_steps)):
            if value:
                yield (
                    f"optim.{key}",
                    "schedule constant has no warm-up; use constant_with_warmup, or set it to 0",
                )
    if optim.min_lr_ratio and optim.schedule not in ("linear", "cosine"):
        yield (
            "optim.min_lr_ratio",
            f"schedule {optim.schedule} has no lowest rate, only linear and cosine have",
        )
    if optim.schedule == "polynomial" and optim.lr <= POLYNOMIAL_LR_END:
        yield "optim.lr", f"must be > {POLYNOMIAL_LR_END}, where schedule polynomial ends, not {optim.lr}"


# -------------------------------------------------------------------------------------------- this machine


def check_environment(recipe: Recipe) -> None:
    """Raises RecipeError when paths or packages the recipe names are not on this machine."""
    _fail_if_any([*_path_problems(recipe), *_tracker_problems(recipe)])


def check_paths(recipe: Recipe) -> None:
    """Raises RecipeError when local files or directories are missing or cannot be written."""
    _fail_if_any(_path_problems(recipe))


def check_trackers(recipe: Recipe) -> None:
    """Raises RecipeError when the package of a tracker is not installed."""
    _fail_if_any(_tracker_problems(recipe))


def _path_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from _model_problems("model.path", recipe.model.path, MODEL_FILES)
    if recipe.model.revision and os.path.isdir(recipe.model.path):
        yield "model.revision", "a local directory has no revisions; leave it out"
    if recipe.tokenizer.path:
        yield from _model_problems("tokenizer.path", recipe.tokenizer.path, TOKENIZER_FILES)
    if recipe.tokenizer.chat_template and not os.path.isfile(recipe.tokenizer.chat_template):
        yield "tokenizer.chat_template", f"no such file: {_show(str(recipe.tokenizer.chat_template))}"
    if recipe.reference.path:
        yield from _model_problems("reference.path", recipe.reference.path, MODEL_FILES)
    for part, sources in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        for index, source in enumerate(() if isinstance(sources, EvalFraction) else sources):
            yield from _data_path_problems(f"data.{part}.{index}.path", source.path)
    yield from _directory_problems("output_dir", recipe.output_dir)
    if recipe.reference.cache_dir:
        yield from _directory_problems("reference.cache_dir", recipe.reference.cache_dir)
    resume = recipe.checkpoint.resume
    if resume not in ("auto", "never") and not os.path.isdir(resume):
        yield (
            "checkpoint.resume",
            f"must be auto, never or the directory of a checkpoint, not {_show(resume)}",
        )


def _model_problems(key: str, path: str, needed: Sequence[str]) -> Iterator[Problem]:
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in needed):
            yield key, f"directory {_show(path)} has no {' or '.join(needed)}"
    elif os.path.exists(path):
        yield key, f"must be a directory or a hub id, and {_show(path)} is a file"
    elif not HUB_ID.fullmatch(path):
        yield key, f"no such directory, and not a hub id: {_show(path)}"


def _data_path_problems(key: str, path: str) -> Iterator[Problem]:
    is_data_file = path.removesuffix(".gz").endswith(DATA_FILE_SUFFIXES)
    if os.path.isdir(path):
        return
    if os.path.exists(path):
        if not is_data_file:
            yield key, f"a data file ends in {', '.join(DATA_FILE_SUFFIXES)} (and .gz), not as {_show(path)}"
        return
    has_suffix = "/" not in path and os.path.splitext(path)[1] != ""
    if is_data_file or has_suffix or path.startswith((".", "/", "~")):
        yield key, f"no such file or directory: {_show(path)} (relative paths start at {os.getcwd()})"
    elif not HUB_ID.fullmatch(path):
        yield key, f"no such file or directory, and not a hub id: {_show(path)}"


def _directory_problems(key: str, directory: Path) -> Iterator[Problem]:
    """Problems of a directory that will be written to and need not exist yet."""
    nearest = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not os.path.isdir(nearest):
        yield key, f"{_show(str(nearest))} is in the way: it is not a directory"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield key, f"no permission to write in {_show(str(nearest))}"


def _tracker_problems(recipe: Recipe) -> Iterator[Problem]:
    for tracker in recipe.logging.trackers:
        modules = TRACKER_MODULES[tracker]
        if not any(importlib.util.find_spec(module) for module in modules):
            yield (
                "logging.trackers",
                f"'{tracker}' is not installed; pip install {modules[0].replace('_', '-')}",
            )


# ----------------------------------------------------------------------------------------- running again


def changed_keys(old: Recipe, new: Recipe) -> list[str]:
    """Dotted keys that differ and change training.

    A key changes training when exact arithmetic would take other steps. What moves only the last bits of a
    result (attention backend, which pairs share a row, number of processes) does not.
    """
    neutral = NEUTRAL_KEYS
    if old.packing.scope == new.packing.scope == "step":
        neutral += ROW_LAYOUT_KEYS
    changed = _differences(_what_trains(old), _what_trains(new))
    return [key for key in changed if not f"{key}.".startswith(tuple(f"{name}." for name in neutral))]


def _what_trains(recipe: Recipe) -> Tree:
    tree = recipe.model_dump(mode="json")
    tree["loss"]["type"] = [{"type": name, "weight": weight} for name, weight in recipe.loss.terms]
    for source in tree["data"]["train"]:
        del source["name"]
    if not isinstance(recipe.data.eval, EvalFraction):
        tree["data"]["eval"] = None  # sources of their own take no pair from training
    return tree


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif _are_mappings(old) and _are_mappings(new) and len(old) == len(new):
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=True)):
            yield from _differences(old_item, new_item, f"{key}.{index}")
    elif old != new:
        yield key


def _are_mappings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


# ------------------------------------------------------------------------------------------------ tables

NEUTRAL_KEYS: tuple[str, ...] = (
    "output_dir",
    "model.attention",
    "model.gradient_checkpointing",
    "model.compile",
    "reference.cache_dir",
    "reference.token_budget",
    "data.on_bad_row",  # a run that has begun under `error` has no bad rows to skip
    "data.num_workers",
    "train.eval_every_steps",
    "train.stop_on_nonfinite",
    "checkpoint",
    "logging",
    "distributed",
)
# In scope step these only say which pairs of a step share a row; in scope epoch they make the steps.
ROW_LAYOUT_KEYS: tuple[str, ...] = (
    "packing.mode",
    "packing.token_budget",
    "packing.window_pairs",
    "packing.algorithm",
    "packing.share_prompt",
)

USERS_OF_LOSS_OPTION: dict[str, frozenset[str]] = {
    "label_smoothing": frozenset({"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"}),
    "discopop_tau": frozenset({"discopop"}),
    "simpo_gamma": frozenset({"simpo"}),
}
REFERENCE_FREE_LOSSES = frozenset({"simpo", "orpo", "cpo", "sft"})
# In the others beta x log Z(prompt), which an f-divergence leaves in each reward, would not cancel.
F_DIVERGENCE_LOSSES = frozenset(
    {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
)
POLYNOMIAL_LR_END = 1e-7  # transformers' default lr_end

FIELDS_OF_FORMAT: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected", "weight"),
    "conversational": ("prompt", "chosen", "rejected", "weight", "tools", "chat_template_kwargs"),
    "transcript": ("chosen", "rejected", "weight"),
    "tokenized": ("prompt_ids", "chosen_ids", "rejected_ids", "weight"),
}
DATA_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".csv")
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
MODEL_FILES = ("config.json",)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

# Modules that serve a tracker, the one to install first.
TRACKER_MODULES: dict[Tracker, tuple[str, ...]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "comet_ml": ("comet_ml",),
    "aim": ("aim",),
    "mlflow": ("mlflow",),
    "clearml": ("clearml",),
    "dvclive": ("dvclive",),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
}


def _unavailable(recipe: Recipe) -> Iterator[Problem]:
    """Values the schema knows and this version cannot do yet."""
    tree = recipe.model_dump()
    tree["loss"]["type"] = [name for name, _ in recipe.loss.terms]
    for key, available in AVAILABLE_SO_FAR.items():
        values = _value_at(tree, key.split("."))
        for value in values if key == "loss.type" else [values]:
            if value not in available:
                yield key, f"{_show(value)} is not available yet; available so far: {_listed(available)}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(_to_yaml(value, one_line=True) for value in values)


# Keys of which only some values are built; a key that is done is a line less.
AVAILABLE_SO_FAR: dict[str, tuple[object, ...]] = {
    "model.compile": (False,),
    "model.lora": (None,),
    "packing.scope": ("step",),
    "loss.type": ("sigmoid", "ipo", "hinge", "sigmoid_norm"),
    "loss.f_divergence": ("reverse_kl",),
    "loss.ld_alpha": (None,),
    "loss.weighting": (None,),
    "loss.router_aux_coef": (0.0,),
    "distributed.num_processes": ("auto", 1),
    "distributed.strategy": ("auto",),
    "online": (None,),
}
