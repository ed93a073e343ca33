"""Loads, checks and writes recipes (YAML), with overrides. Imports no torch, so commands start at once."""

import importlib.util
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dpo_pack.recipe.data import DATA_FILE_SUFFIXES, SourceRecipe, as_eval, as_sources, source_names
from dpo_pack.recipe.mistakes import nested_sections, recipe_problems
from dpo_pack.recipe.schema import Recipe
from dpo_pack.recipe.text import Tree, apply_override, fail, read_yaml, show, to_yaml
from dpo_pack.recipe.types import Problem, allowed_values
from dpo_pack.system.hub import HUB_ID, instead_of_url, is_adapter
from dpo_pack.system.machine import install_command

__all__ = ["Recipe", "source_names"]  # besides what is defined here

MAX_RECIPE_BYTES = 1 << 17  # PyYAML takes some seconds for so many bytes
RECIPE_FILE, INFO_FILE = "recipe.yaml", "run.json"  # of a run, in its output_dir
# Keys and losses of earlier releases. Of a key: the values that changed no step, which are dropped without a
# word (None: all values are), and what to do about another value.
REMOVED_KEYS: dict[str, tuple[tuple[object, ...] | None, str]] = {
    "model.kernels": (None, "compiled layers fuse the same"),
    "logging.breakdowns": (None, ""),
    "loss.ld_alpha": ((None,), "leave it out, or take sigmoid_norm, which counts log-ratios per token"),
    "packing.scope": (("step",), "leave it out; for even ranks take more packing.pairs_per_step"),
    "packing.rows_per_step": ((None,), "set packing.pairs_per_step instead"),
    "packing.window_pairs": (None, ""),
    "packing.algorithm": (None, ""),
    "packing.merge_prompts": (None, ""),
}
REMOVED_LOSSES = {
    "aot": "take sigmoid, or a loss of your own (loss.type: module:function)",
    "aot_unpaired": "take sigmoid, or a loss of your own (loss.type: module:function)",
}
# What `dpopack recipe --defaults` prints.
BEGINNING = """\
# A dpo-pack recipe: DPO of all parameters. Start it with: dpopack train RECIPE
output_dir: runs/my-run
model:
  path: Qwen/Qwen3-0.6B          # a hub id or a directory
  # lora: {r: 16, alpha: 32}     # train an adapter instead; then lr: 5.0e-6
data:
  train: pairs.jsonl             # prompt, chosen, rejected; docs/data.md has all formats
  eval: {fraction: 0.02}         # held out of training, to measure
  max_length: 2048               # tokens of prompt and one completion; longer pairs are left out
packing:
  token_budget: 8192             # tokens in one forward pass: as many as fit in memory
  pairs_per_step: 64             # the batch, of all GPUs together
loss: {type: sigmoid, beta: 0.1}
optim: {lr: 5.0e-7, schedule: linear, warmup_ratio: 0.1}
train: {epochs: 1}               # checkpoint: {every_steps: 100} lets a run that was killed go on
# All keys: dpopack recipe --defaults --all
"""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def has_tokenizer(directory: str | Path) -> bool:
    return any(os.path.isfile(os.path.join(directory, name)) for name in TOKENIZER_FILES)


def load_recipe(path: Path, overrides: Sequence[str] = (), *, lenient: bool = False) -> Recipe:
    """Reads a recipe file, or that of a run's directory, wherever it is now, and applies `key=value`
    overrides, the last one of a key. Raises RecipeError.

    lenient: values of a run that no longer exist are dropped, too, as nothing is trained; `Recipe.dropped`
    names them.
    """
    begin, run = "'dpopack recipe --defaults' prints one to begin with", path
    if path.is_dir():
        path = run / RECIPE_FILE
        if not (run / INFO_FILE).is_file():
            fail(f"{run}: no run, as it has no {INFO_FILE}; give a run's output_dir or a recipe file")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
        if len(content) > MAX_RECIPE_BYTES:
            fail(f"{path}: larger than {MAX_RECIPE_BYTES:,} bytes, so it is not a recipe; {begin}")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{path}: not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); save it as UTF-8")
    except OSError as error:
        fail(f"{path}: cannot read the recipe: {error.strerror}; {begin}")
    tree = read_yaml(text, where=str(path))
    if not isinstance(tree, dict):
        fail(f"{path}: a recipe is a mapping of 'key: value' lines, not {show(tree)}; {begin}")
    if run is not path:
        if isinstance(tree.get("checkpoint"), dict):
            tree["checkpoint"]["resume"] = "auto"  # another value was for the start that wrote this file
        if run.resolve() != Path(str(tree.get("output_dir"))).resolve():
            tree["output_dir"] = str(run)
    dropped: list[Problem] = []
    if lenient and run is not path:
        tree, dropped = _without_removed(tree)
    recipe = parse_recipe(tree, overrides, recipe_dir=path.parent)
    recipe.dropped.extend(f"{key}: {what}" for key, what in dropped)
    return recipe


def parse_recipe(
    tree: Mapping[str, Any], overrides: Sequence[str] = (), *, recipe_dir: Path = Path()
) -> Recipe:
    """Makes a recipe from a mapping; `${recipe_dir}` in paths is `recipe_dir`. Raises RecipeError."""
    tree = _without_shorthands(tree)
    for override in overrides:
        tree = _without_shorthands(apply_override(tree, override))
    tree, removed = _without_removed(tree)
    _fail_if_any(removed)
    try:
        return Recipe.model_validate(tree, context={"recipe_dir": os.path.abspath(recipe_dir)})
    except ValidationError as invalid:
        _fail_if_any(recipe_problems(invalid.errors(include_url=False), tree))
        raise


def _without_removed(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Drops what earlier releases had. Yields a problem for each value that made another training."""
    problems: list[Problem] = []
    tree = {name: dict(part) if isinstance(part, dict) else part for name, part in tree.items()}
    for key, (harmless, remedy) in REMOVED_KEYS.items():
        section, _, name = key.partition(".")
        if isinstance(tree.get(section), dict) and name in tree[section]:
            value = tree[section].pop(name)
            if harmless is not None and value not in harmless:
                problems.append((key, f"dpo-pack no longer has it, and it is {show(value)} here; {remedy}"))
    loss = tree.get("loss")
    if isinstance(loss, dict) and "type" in loss:
        terms = loss["type"] if isinstance(loss["type"], list) else [{"type": loss["type"]}]
        names = [term.get("type") if isinstance(term, dict) else None for term in terms]
        for name in (name for name in REMOVED_LOSSES if name in names):
            problems.append(("loss.type", f"dpo-pack no longer has {name}; {REMOVED_LOSSES[name]}"))
            rest = [term for term, other in zip(terms, names, strict=True) if other not in REMOVED_LOSSES]
            loss["type"] = rest or "sigmoid"
    return tree, problems


def _fail_if_any(problems: Iterable[Problem]) -> None:
    by_key: dict[str, str] = {}
    for key, message in problems:
        by_key.setdefault(key, message)
    if by_key:
        lines = [f"{key}: {message}" for key, message in by_key.items()]
        more = f" (and {len(lines) - 1} more: {'; '.join(lines[1:])})" if len(lines) > 1 else ""
        fail(lines[0] + more, lines)


def _without_shorthands(tree: Mapping[str, Any]) -> Tree:
    """Adds empty sections; makes lists of single sources. The schema refuses values of a wrong type later."""
    kinds = {name: field.annotation for name, field in Recipe.model_fields.items()}
    sections = [
        name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)
    ]
    full = {**tree, **{name: {} for name in sections if tree.get(name) is None}}
    if isinstance(full["data"], dict):
        data = full["data"] = dict(full["data"])
        if "train" in data:
            data["train"] = as_sources(data["train"])
        if "eval" in data:
            data["eval"] = [] if data["eval"] is None else as_eval(data["eval"])
    return full


def dump_recipe(recipe: Recipe, *, for_others: bool = False) -> str:
    """Returns the recipe with all keys as YAML; `for_others`, paths on this machine are their last parts."""
    return to_yaml(recipe.model_dump(mode="json", context={"for_others": for_others}))


def recipe_schema() -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of a recipe, for editors."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**dialect, **Recipe.model_json_schema(), "title": "dpo-pack recipe"}


def recipe_defaults() -> str:
    """Returns a valid recipe with each key's meaning and default; required keys have an example value."""
    heading = "# A dpo-pack recipe. output_dir, model.path and data.train are required."
    return re.sub(r"\n{3,}", "\n\n", "\n".join([heading, "", *_commented(Recipe), ""]))


def _commented(section: type[BaseModel], indent: str = "") -> list[str]:
    lines = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
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


def check_environment(recipe: Recipe, *, trains: bool = True) -> None:
    """Raises RecipeError if a path or package is not here; trackers count only where the recipe `trains`."""
    _fail_if_any([*_path_problems(recipe), *_adapter_problems(recipe), *_package_problems(recipe, trains)])


def _path_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields what is neither here nor a hub id. What else is wrong with a path, its reader says."""
    if recipe.model.revision and os.path.isdir(recipe.model.path):
        yield "model.revision", "a local directory has no revisions; leave it out"
    for key, path in recipe.inputs.items():
        if path is None or os.path.exists(path):
            continue
        is_file = key == "tokenizer.chat_template" or path.endswith(DATA_FILE_SUFFIXES)
        if is_file or not HUB_ID.fullmatch(path):
            where = instead_of_url(path) or f" (relative paths start at {os.getcwd()})"
            yield key, f"no such file or directory, and not a hub id: {show(path)}{where}"


def _adapter_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields what depends on whether model.path is an adapter."""
    model, has_adapter = recipe.model, is_adapter(recipe.model.path)
    trains_adapter = model.lora is not None or has_adapter
    if model.lora is not None and has_adapter:
        what = "model.path is an adapter, which is trained further"
        yield "model.lora", f"{what}; leave it out, or merge it first (dpopack merge)"
    if model.quantize is not None and not trains_adapter:
        yield "model.quantize", "quantised weights cannot be trained; set model.lora, or leave quantize out"
    if model.dtype != "bfloat16":
        return
    # The weights of an adapter are always fp32, whatever the type of its base model.
    if recipe.optim.name != "adamw" and not trains_adapter:
        what = f"{recipe.optim.name} keeps no fp32 master weights for bfloat16 parameters"
        yield "optim.name", f"{what}; set optim.name: adamw or model.dtype: float32"
    # In bfloat16, a mix of two models, or base plus adapter, may round to the old reference. A copy is exact.
    if recipe.reference.sync is not None and (recipe.reference.sync.mixup < 1.0 or trains_adapter):
        remedy = "set model.dtype: float32, or mixup: 1 without an adapter"
        yield "reference.sync", f"model.dtype bfloat16 rounds most of an update away; {remedy}"


def _package_problems(recipe: Recipe, trains: bool) -> Iterator[Problem]:
    """Yields packages that keys need. What only a model's files need is refused when they are read."""
    model, online = recipe.model, recipe.online
    generator, judges = ("", ()) if online is None else (online.generator.type, online.judges)
    needed = {
        "model.lora": "peft" if model.lora else "",
        "model.images": "PIL" if model.images else "",
        "model.quantize": "bitsandbytes" if model.quantize else "",
        "optim.name": "bitsandbytes" if recipe.optim.name == "adamw_8bit" else "",
        "online.generator": {"vllm": "vllm", "http": "openai"}.get(generator, ""),
        **{f"online.judges.{n}": "openai" if judge.type == "llm" else "" for n, judge in enumerate(judges)},
    }
    for key, module in needed.items():
        if module and importlib.util.find_spec(module) is None:
            install = install_command("images" if module == "PIL" else module)
            yield key, f"needs the package {module}, which is not installed; {install}"
    for tracker in recipe.logging.trackers if trains else ():
        modules = ["tensorboard", "tensorboardX"] if tracker == "tensorboard" else [tracker]
        if not any(importlib.util.find_spec(module) for module in modules):
            yield "logging.trackers", f"{tracker} is not installed; pip install {tracker.replace('_', '-')}"
