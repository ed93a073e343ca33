"""Loads, checks, compares and writes recipes. Imports no torch, so commands start at once."""

import difflib
import functools
import importlib.util
import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dpo_pack.recipe.data import DATA_FILE_SUFFIXES, RowField, SourceRecipe, as_eval, as_sources
from dpo_pack.recipe.peers.peer_tables import PEERS, our_words, read_table, rows_of
from dpo_pack.recipe.schema import EvalFraction, Recipe
from dpo_pack.recipe.text import Tree, apply_override, fail, read_yaml, show, to_yaml, without_servers
from dpo_pack.recipe.types import Problem, allowed_values, nested_sections
from dpo_pack.system.hub import HUB_ID
from dpo_pack.system.machine import install_command
from dpo_pack.system.process import lone_half

__all__ = ["Recipe"]  # besides what is defined here

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
REMOVED_LOSSES = ("aot", "aot_unpaired")
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
  token_budget: auto             # tokens in one forward pass: on a GPU as many as fit in memory
  pairs_per_step: 64             # the batch, of all GPUs together
loss: {type: sigmoid, beta: 0.1}
optim: {lr: 5.0e-7, schedule: linear, warmup_ratio: 0.1}
train: {epochs: 1}               # checkpoint: {every_steps: 100} lets a run that was killed go on
# All keys: dpopack recipe --defaults --all
"""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
SECTIONS = [
    key for key, field in Recipe.model_fields.items() if isinstance(field.annotation, type(BaseModel))
]


def has_tokenizer(directory: str | Path) -> bool:
    return any(os.path.isfile(os.path.join(directory, name)) for name in TOKENIZER_FILES)


def is_adapter(path: str | Path) -> bool:
    """Returns whether a local directory holds a peft adapter."""
    return (Path(path) / "adapter_config.json").is_file()


def load_recipe(path: Path, overrides: Sequence[str] = (), *, lenient: bool = False) -> Recipe:
    """Reads a recipe file, or that of a run's directory, and applies `key=value` overrides, the last one of a
    key. Raises RecipeError.

    lenient: nothing is trained, so values of a run (or of its recipe.yaml) that no longer exist are dropped
    (`Recipe.dropped`).
    """
    begin, run, is_run = "'dpopack recipe --defaults' prints one to begin with", path, path.is_dir()
    if is_run:
        path = run / RECIPE_FILE
        if not (run / INFO_FILE).is_file():
            fail(f"{run}: no run, as it has no {INFO_FILE}; give a run's output_dir or a recipe file")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
        if len(content) > MAX_RECIPE_BYTES:
            fail(f"{path}: larger than {MAX_RECIPE_BYTES:,} bytes, so it is not a recipe; {begin}")
        tree = read_yaml(content.decode("utf-8-sig"), where=str(path))
    except UnicodeDecodeError as error:
        fail(f"{path}: not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); save it as UTF-8")
    except OSError as error:
        fail(f"{path}: cannot read the recipe: {error.strerror}; {begin}")
    if not isinstance(tree, dict):
        fail(f"{path}: a recipe is a mapping of 'key: value' lines, not {show(tree)}; {begin}")
    if is_run and isinstance(tree.get("checkpoint"), dict):
        tree["checkpoint"]["resume"] = "auto"  # another value was for the start that wrote this file
    if is_run and run.resolve() != Path(str(tree.get("output_dir"))).resolve():
        tree["output_dir"] = str(run)
    is_of_run = is_run or (path.name == RECIPE_FILE and (path.parent / INFO_FILE).is_file())
    recipe = parse_recipe(tree, overrides, recipe_dir=path.parent, lenient=is_of_run)
    if recipe.dropped and not lenient:
        remedy = f"copy its {RECIPE_FILE}, change this and output_dir in the copy, and give the copy"
        fail(f"{path.parent}: this run has {'; '.join(recipe.dropped)}, so it does not go on; {remedy}")
    return recipe


def parse_recipe(
    tree: Tree, overrides: Sequence[str] = (), *, recipe_dir: Path = Path(), lenient: bool = False
) -> Recipe:
    """Makes a recipe from a mapping; `${recipe_dir}` in paths is `recipe_dir`. Raises RecipeError."""
    tree, context = _without_shorthands(tree), {"recipe_dir": os.path.abspath(recipe_dir)}
    for override in overrides:
        tree = _without_shorthands(apply_override(tree, override))
    text = json.dumps(tree, ensure_ascii=False, default=str, skipkeys=True)
    if lone := lone_half(text.replace("${recipe_dir}", context["recipe_dir"])):
        fail(f"a recipe takes Unicode only, no half of a surrogate pair or name in another encoding: {lone}")
    try:
        return Recipe.model_validate(tree, context=context)
    except ValidationError:
        removed = _drop_removed(tree)  # the schema refuses all that it finds
    problems = [] if lenient else [(key, what) for key, (_, what) in removed.items()]
    try:
        recipe = Recipe.model_validate(tree, context=context)
    except ValidationError as invalid:
        problems += _problems(invalid.errors(include_url=False), tree)
    if problems:
        _refuse(problems)
    for key, (value, _) in removed.items():
        recipe.dropped.append(f"{key} {value}, which dpo-pack no longer has")
    return recipe


def _without_shorthands(tree: Tree) -> Tree:
    """Adds empty sections; makes lists of single sources. The schema refuses values of a wrong type later."""
    full = {**tree, **{name: {} for name in SECTIONS if tree.get(name) is None}}
    full = {name: dict(part) if isinstance(part, dict) else part for name, part in full.items()}
    if isinstance(data := full["data"], dict):
        for part in data.keys() & {"train", "eval"}:
            value = [] if part == "eval" and data[part] is None else data[part]
            data[part] = as_eval(value) if part == "eval" else as_sources(value)
    return full


def _drop_removed(tree: Tree) -> dict[str, tuple[str, str]]:
    """Drops what earlier releases had. Returns by key each value that made another training, and an error."""
    removed: dict[str, tuple[str, str]] = {}
    for key, (harmless, remedy) in REMOVED_KEYS.items():
        section, _, name = key.partition(".")
        if isinstance(tree[section], dict) and name in tree[section]:
            value = tree[section].pop(name)
            if harmless is not None and value not in harmless:
                what = f"dpo-pack no longer has it, and it is {show(value)} here; {remedy}"
                removed[key] = (show(value), what)
    loss = tree["loss"]
    if isinstance(loss, dict) and "type" in loss:
        terms = loss["type"] if isinstance(loss["type"], list) else [{"type": loss["type"]}]
        types = [term.get("type") if isinstance(term, dict) else None for term in terms]
        if gone := [name for name in types if name in REMOVED_LOSSES]:
            names = " and ".join(gone)
            what = f"dpo-pack no longer has {names}; take another, or one of your own"
            removed["loss.type"] = (names, what)
            # sigmoid takes what these losses take: a reference, label_smoothing.
            kept = [term for term, name in zip(terms, types, strict=True) if name not in gone]
            loss["type"] = kept + [{"type": "sigmoid"}] * ("sigmoid" not in types)
    return removed


def _refuse(problems: Sequence[Problem]) -> NoReturn:
    by_key: dict[str, str] = {}
    for key, message in problems:
        by_key.setdefault(key, message)
    lines = [f"{key}: {message}" for key, message in by_key.items()]
    more = f" (and {len(lines) - 1} more: {'; '.join(lines[1:])})" if len(lines) > 1 else ""
    fail(lines[0] + more, lines)


def dump_recipe(recipe: Recipe, *, for_others: bool = False) -> str:
    """Returns the recipe with all keys as YAML; `for_others`, paths on this machine are their last parts, and
    of a server only its model is named."""
    tree = recipe.model_dump(mode="json", context={"for_others": for_others})
    return to_yaml(without_servers(tree) if for_others else tree)


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
        if isinstance(field.annotation, type(BaseModel)):
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


# ------------------------------------------------------------------------------- what this machine must have


def check_environment(recipe: Recipe, *, trains: bool = True, only: str = "") -> None:
    """Raises RecipeError if a path or package is not here, of keys that begin with `only`. Trackers and the
    verdict count only where the recipe `trains`."""
    problems: list[Problem] = []
    model, online = recipe.model, recipe.online
    verdict = recipe.verdict if trains else None
    for key, path in (recipe.inputs | (verdict.inputs if verdict else {})).items():
        if path is None or os.path.isfile(path) or os.path.isdir(path):
            continue
        is_file = key.endswith(("chat_template", "lm_eval")) or path.endswith((*DATA_FILE_SUFFIXES, ".yaml"))
        if is_file or os.path.exists(path) or not HUB_ID.fullmatch(path):
            hint = f"relative paths start at {os.getcwd()}; URLs and patterns are not read, and no pipes"
            problems.append((key, f"no such file or directory, and not a hub id: {show(path)} ({hint})"))
    needed = {
        "model.lora": "peft" if model.lora else "",
        "model.images": "PIL" if model.images else "",
        "model.quantize": "bitsandbytes" if model.quantize else "",
        "optim.name": "bitsandbytes" if recipe.optim.name == "adamw_8bit" else "",
        "online.generator": {"vllm": "vllm", "http": "openai"}.get(online.generator.type, "")
        if online
        else "",
        "verdict.tasks": "lm_eval" if verdict and verdict.tasks and verdict.lm_eval is None else "",
    }
    for name, judges in {"online": online, "verdict": verdict}.items():
        for number, judge in enumerate(judges.judges if judges else ()):
            needed[f"{name}.judges.{number}"] = "openai" if judge.type == "llm" else ""
    for key, module in needed.items():
        if module and importlib.util.find_spec(module) is None:
            install = install_command({"PIL": "images", "lm_eval": "verdict"}.get(module, module))
            problems.append((key, f"needs the package {module}, which is not installed; {install}"))
    for tracker in recipe.logging.trackers if trains else ():
        modules = ["tensorboard", "tensorboardX"] if tracker == "tensorboard" else [tracker]
        if not any(importlib.util.find_spec(module) for module in modules):
            remedy = f"pip install {tracker.replace('_', '-')}"
            problems.append(("logging.trackers", f"{tracker} is not installed; {remedy}"))
    problems += _model_problems(recipe)
    if problems := [problem for problem in problems if problem[0].startswith(only)]:
        _refuse(problems)


def _model_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields what depends on whether model.path is a directory, or an adapter."""
    model, has_adapter = recipe.model, is_adapter(recipe.model.path)
    trains_adapter = model.lora is not None or has_adapter
    if model.revision and os.path.isdir(model.path):
        yield "model.revision", "a local directory has no revisions; leave it out"
    if model.lora is not None and has_adapter:
        yield "model.lora", "model.path is an adapter; leave lora out, or merge that first (dpopack merge)"
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


# ------------------------------------------------------------------------------ what is wrong, and a remedy


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


def _problems(errors: Sequence[ErrorDetails], tree: Tree) -> list[Problem]:
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
    key = ".".join(parts)
    if error["type"] == "value_error":
        return key, error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return key, f"unknown key; {_nearest(parts)}"
    if parts[-1] == "[key]":  # of the mapping `columns`, whose keys are fields of a pair
        known = ", ".join(get_args(RowField))
        return key.removesuffix(".[key]"), f"write {{FIELD: column}}; the fields are {known}"
    while _numbered(parts) not in recipe_fields():  # pydantic's names for parts of a plain value
        parts.pop()
    key, field = ".".join(parts), recipe_fields()[_numbered(parts)]
    if error["type"] == "missing" and isinstance(error["loc"][-1], str):
        instance = f", as in {parts[-1]}: {field.examples[0]}" if field.examples else ""
        return key, f"required, but not given{instance}"
    # A wrong value in place of a server, or around one, may hold a key.
    may_hold = parts[0] in ("online", "verdict") and isinstance(error["input"], dict | list)
    is_private = "endpoint" in parts or may_hold
    given = "" if is_private else f", not {show(error['input'])}"
    return key, f"must be {allowed_values(field.annotation, field.metadata)}{given}"


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
    """Returns what to write in place of the option `name`; None if no recipe key is meant."""
    if name == "config":
        return "give the recipe without an option, as in dpopack train recipe.yaml"
    if keys := [key for key in recipe_fields() if name in (key, key.rpartition(".")[2])]:
        return f"write {keys[0]}=VALUE after the recipe"
    example = "set keys after the recipe, as in optim.lr=1e-6"
    if name in ("set", "override"):
        return example
    return f"{our_words()[name]}; {example}" if name in our_words() else None


# ------------------------------------------------------------------------ what differs between two recipes

# A run may be resumed with other values of these keys, because they do not change training. (If a run could
# start with data.on_bad_row: error, there are no bad rows. What shares a row changes rounding only.)
NEUTRAL_KEYS: tuple[str, ...] = (
    "output_dir", "model.attention", "model.gradient_checkpointing", "model.compile",
    "model.activation_offload", "model.mlp_tile_tokens", "model.unused_tensors",
    "packing.mode", "packing.token_budget", "packing.share_prompt",
    "reference.cache_dir", "reference.token_budget", "data.on_bad_row",
    "data.num_workers", "train.eval_every_steps", "train.eval_precision", "train.stop_on_nonfinite",
    "checkpoint", "logging", "export",
    "distributed.num_processes", "distributed.strategy", "distributed.hybrid", "distributed.cpu_offload",
    "distributed.accumulate_unsharded", "online.generator.token_budget",
    "online.generator.gpu_memory_utilization", "online.generator.endpoint", "online.offload_reference",
    "verdict",
)  # fmt: skip
# With train.early_stopping these keys decide when the run ends, so they change training.
EARLY_STOPPING_KEYS = ("checkpoint.metric", "checkpoint.eval_set", "train.eval_every_steps")
# With train.early_stopping or checkpoint.load_best all evaluations must be comparable.
COMPARING_KEYS = ("train.eval_precision",)


def changed_values(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys that differ and change the steps of a run (more than their rounding), with the
    values of both recipes."""
    stops_early = old.train.early_stopping is not None or new.train.early_stopping is not None
    compares = stops_early or old.checkpoint.load_best or new.checkpoint.load_best
    neutral = tuple(f"{key}." for key in NEUTRAL_KEYS)
    counting = EARLY_STOPPING_KEYS * stops_early + COMPARING_KEYS * compares
    before, after = (_what_trains(recipe, stops_early=stops_early) for recipe in (old, new))
    return {
        key: values
        for key, values in _differences(before, after)
        if key in counting or not f"{key}.".startswith(neutral)
    }


def only_goes_on(changed: Mapping[str, tuple[Any, Any]], new: Recipe) -> bool:
    """Whether `new` only trains for more steps, and no earlier step depends on their number."""
    optim = new.optim
    if not changed or not changed.keys() <= {"train.epochs", "train.max_steps"}:
        return False
    has_warmup = optim.warmup_steps is None and optim.warmup_ratio > 0
    compares = new.train.early_stopping is not None or new.checkpoint.load_best
    are_more = all(most is None or (least is not None and most > least) for least, most in changed.values())
    return are_more and optim.schedule.startswith("constant") and not has_warmup and not compares


def _what_trains(recipe: Recipe, *, stops_early: bool) -> Tree:
    tree = recipe.model_dump(mode="json")
    tree["loss"]["type"] = [{"type": name, "weight": weight} for name, weight in recipe.loss.terms]
    for source in tree["data"]["train"]:
        del source["name"]
    for judge in (tree["online"] or {"judges": ()})["judges"]:
        del judge["retries"], judge["max_new_tokens"]
        if judge["endpoint"] is not None:  # training depends on the model, not on its server
            judge["endpoint"] = {"model": judge["endpoint"]["model"]}
    if not isinstance(recipe.data.eval, EvalFraction) and not stops_early:
        tree["data"]["eval"] = None  # eval changes training only if it holds out training pairs
    return tree


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    are_lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if are_lists and all(isinstance(item, dict) for item in (*old, *new)):
        old, new = ({str(number): item for number, item in enumerate(items)} for items in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, (old, new)
