"""Recipes: load from YAML, override, check, dump. Imports no torch, so that commands start at once.

A recipe goes from text to a tree of plain values and overrides are put into the tree (`recipe_yaml.py`), the
schema checks each key (`recipe_schema.py`), then come rules that join keys and what this version can do
(`recipe_checks.py`). A problem is a dotted key and what is wrong with it; however many there are, they become
one `RecipeError` of one line (`recipe_errors.py`).
"""

import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dpo_pack.recipe_checkpoint import CheckpointRecipe, EarlyStoppingRecipe
from dpo_pack.recipe_checks import (
    AVAILABLE_SO_FAR,
    DATA_FILE_SUFFIXES,
    broken_rules,
    check_environment,
    check_paths,
    check_trackers,
    listed,
    unavailable,
)
from dpo_pack.recipe_errors import Tree, fail, fail_if_any, nested_sections, schema_problems, show
from dpo_pack.recipe_schema import (
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
    SourceRecipe,
    SyncRecipe,
    TokenizerRecipe,
    TrainRecipe,
    allowed_values,
    as_eval,
    as_sources,
)
from dpo_pack.recipe_yaml import apply_override, read_yaml, to_yaml

__all__ = [
    "EARLY_STOPPING_KEYS", "NEUTRAL_KEYS", "ROW_LAYOUT_KEYS", "CheckpointRecipe", "DataRecipe",
    "DistributedRecipe", "EarlyStoppingRecipe", "EvalFraction", "LoggingRecipe", "LoraRecipe",
    "LossRecipe", "LossTerm", "LossType", "ModelRecipe", "OptimRecipe", "PackingRecipe", "Recipe",
    "ReferenceRecipe", "SourceRecipe", "SyncRecipe", "TokenizerRecipe", "TrainRecipe", "changed_keys",
    "check_environment", "check_paths", "check_trackers", "default_in_yaml", "describe_key",
    "dump_recipe", "load_recipe", "parse_recipe", "recipe_defaults", "recipe_schema", "source_names",
]  # fmt: skip


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and applies `key=value` overrides, the last one winning.

    Raises RecipeError for anything that can be found wrong without looking at the machine or loading a model;
    `check_environment` looks at the machine.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        fail(f"{path}: no such recipe; 'dpopack recipe --defaults' prints one to begin with")
    except UnicodeDecodeError as error:
        fail(f"{path}: not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); save it as UTF-8")
    except OSError as error:
        fail(f"{path}: cannot read the recipe: {error.strerror}")
    tree = read_yaml(text, where=str(path))
    if tree is None:
        fail(f"{path}: the recipe is empty; 'dpopack recipe --defaults' prints one to begin with")
    if not isinstance(tree, dict):
        fail(f"{path}: a recipe is a mapping of 'key: value' lines, not {show(tree)}")
    return parse_recipe(tree, overrides, recipe_dir=path.parent)


def parse_recipe(
    tree: Mapping[str, Any], overrides: Sequence[str] = (), *, recipe_dir: Path = Path()
) -> Recipe:
    """A recipe from a mapping as YAML gives it; `${recipe_dir}` in its paths becomes `recipe_dir`.

    Raises RecipeError.
    """
    tree = _without_shorthands(tree)
    for override in overrides:
        tree = _without_shorthands(apply_override(tree, override))
    try:
        recipe = Recipe.model_validate(tree, context={"recipe_dir": os.path.abspath(recipe_dir)})
    except ValidationError as invalid:
        fail_if_any(schema_problems(invalid.errors(include_url=False), tree))
        raise
    fail_if_any([*unavailable(recipe), *broken_rules(recipe)])
    return recipe


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


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; loading it gives an equal recipe."""
    return to_yaml(recipe.model_dump(mode="json"))


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


def _commented(section: type[BaseModel], prefix: str = "", indent: str = "") -> list[str]:
    """The lines of a section with each key's meaning above it."""
    lines = []
    for name, field in section.model_fields.items():
        if _is_section(field):
            nested = nested_sections(field.annotation)[0]
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
            return f"{field.description} Available so far: {listed(available)}."


def default_in_yaml(field: FieldInfo) -> str:
    """A key's default as one line of YAML; an instance of a required key."""
    if field.is_required():
        return str((field.examples or [""])[0])
    default = field.get_default(call_default_factory=True, validated_data={})
    return to_yaml(default.model_dump() if isinstance(default, BaseModel) else default, one_line=True)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def source_names(sources: Sequence[SourceRecipe]) -> tuple[str, ...]:
    """What reports and metrics call each source: its `name`, else one from its path; all different."""
    names: list[str] = []
    for source in sources:
        short = source.path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gz")
        for suffix in DATA_FILE_SUFFIXES:
            short = short.removesuffix(suffix)
        short = short or source.path  # "/" and ".jsonl" have nothing else
        derived = short if source.split == "train" else f"{short}-{source.split}"
        taken = {*names, *(other.name for other in sources if other.name)}
        choices = (
            derived,
            source.path,
            *(f"{source.path}-{number}" for number in range(2, len(sources) + 2)),
        )
        names.append(source.name or next(choice for choice in choices if choice not in taken))
    return tuple(names)


# ----------------------------------------------------------------------------------------- running again


def changed_keys(old: Recipe, new: Recipe) -> list[str]:
    """Dotted keys that differ and change training, see `changed_values`."""
    return list(changed_values(old, new))


def changed_values(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """What differs and changes training, by dotted key: its value in both.

    A key changes training when exact arithmetic would take other steps. What moves only the last bits of a
    result (attention backend, which pairs share a row, number of processes) does not.
    """
    neutral = NEUTRAL_KEYS
    stops_early = old.train.early_stopping is not None or new.train.early_stopping is not None
    if old.packing.scope == new.packing.scope == "step":
        neutral += ROW_LAYOUT_KEYS
    changed = _differences(
        _what_trains(old, stops_early=stops_early), _what_trains(new, stops_early=stops_early)
    )
    return {
        key: values
        for key, values in changed
        if not f"{key}.".startswith(tuple(f"{name}." for name in neutral))
        or (stops_early and key in EARLY_STOPPING_KEYS)
    }


def _what_trains(recipe: Recipe, *, stops_early: bool) -> Tree:
    tree = recipe.model_dump(mode="json")
    tree["loss"]["type"] = [{"type": name, "weight": weight} for name, weight in recipe.loss.terms]
    for source in tree["data"]["train"]:
        del source["name"]
    for judge in (tree["online"] or {"judges": ()})["judges"]:
        del judge["retries"]
        if judge["endpoint"] is not None:  # which model judges counts, not where it is asked
            judge["endpoint"] = {"model": judge["endpoint"]["model"]}
    if not isinstance(recipe.data.eval, EvalFraction) and not stops_early:
        tree["data"]["eval"] = None  # sources of their own take no pair from training
    return tree


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif _are_mappings(old) and _are_mappings(new) and len(old) == len(new):
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=True)):
            yield from _differences(old_item, new_item, f"{key}.{index}")
    elif old != new:
        yield key, (old, new)


def _are_mappings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


# ------------------------------------------------------------------------------------------------ tables

NEUTRAL_KEYS: tuple[str, ...] = (
    "output_dir",
    "model.attention",
    "model.gradient_checkpointing",
    "model.compile",
    "model.kernels",
    "reference.cache_dir",
    "reference.token_budget",
    "data.on_bad_row",  # a run that has begun under `error` has no bad rows to skip
    "data.num_workers",
    "train.eval_every_steps",
    "train.stop_on_nonfinite",
    "checkpoint",
    "logging",
    "distributed.num_processes",
    "distributed.strategy",
    "distributed.hybrid",
    "distributed.cpu_offload",
    "distributed.accumulate_unsharded",
    "online.generator.token_budget",
    "online.generator.gpu_memory_utilization",
    "online.generator.endpoint",
    "online.offload_reference",
)
# With train.early_stopping these say when, whatever else is free.
EARLY_STOPPING_KEYS: tuple[str, ...] = (
    "checkpoint.metric",
    "checkpoint.eval_set",
    "train.eval_every_steps",
)
# In scope step these only say which pairs of a step share a row; in scope epoch they make the steps.
ROW_LAYOUT_KEYS: tuple[str, ...] = (
    "packing.mode",
    "packing.token_budget",
    "packing.window_pairs",
    "packing.algorithm",
    "packing.share_prompt",
    "packing.merge_prompts",
)
