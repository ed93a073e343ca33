"""Checks that this machine has what a recipe needs: paths exist or can be made, packages are installed."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpo_pack.recipe.data import DATA_FILE_SUFFIXES
from dpo_pack.recipe.errors import fail_if_any, show
from dpo_pack.recipe.schema import Recipe
from dpo_pack.recipe.types import Problem
from dpo_pack.system.hub import HUB_ID
from dpo_pack.system.machine import install_command

MODEL_FILES = ("config.json", "adapter_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
NO_MASTER_WEIGHTS = (
    "keeps no fp32 master weights, and parameters in bfloat16 would round its updates away; set optim.name: "
    "adamw or model.dtype: float32"
)


def check_environment(recipe: Recipe, *, trains: bool = True) -> None:
    """Raises RecipeError if a path or a package that the recipe needs is not on this machine.

    Trackers are needed only if the recipe `trains`.
    """
    problems = [_path_problems, _bfloat16_problems, _package_problems]
    if trains:
        problems.append(_tracker_problems)
    fail_if_any(problem for problems_of in problems for problem in problems_of(recipe))


def _path_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from _model_problems("model.path", recipe.model.path)
    if recipe.model.lora is not None and _is_adapter(recipe.model.path):
        yield (
            "model.lora",
            "model.path is an adapter, which is trained further as it is; leave model.lora out, or merge the "
            "adapter first with 'dpopack merge'",
        )
    if recipe.model.quantize is not None and recipe.model.lora is None and not _is_adapter(recipe.model.path):
        yield "model.quantize", "quantised weights cannot be trained; set model.lora, or leave quantize out"
    if recipe.model.revision and os.path.isdir(recipe.model.path):
        yield "model.revision", "a local directory has no revisions; leave it out"
    if recipe.tokenizer.path:
        yield from _model_problems("tokenizer.path", recipe.tokenizer.path, TOKENIZER_FILES)
    if recipe.tokenizer.chat_template and not os.path.isfile(recipe.tokenizer.chat_template):
        yield "tokenizer.chat_template", f"no such file: {show(str(recipe.tokenizer.chat_template))}"
    if recipe.reference.path:
        yield from _model_problems("reference.path", recipe.reference.path)
    for part, sources in (("train", recipe.data.train), ("eval", recipe.data.eval_sources)):
        for index, source in enumerate(sources):
            yield from _data_path_problems(f"data.{part}.{index}.path", source.path)
    for number, judge in enumerate(recipe.online.judges if recipe.online else ()):
        if judge.path is not None:
            yield from _model_problems(f"online.judges.{number}.path", judge.path)
    yield from _directory_problems("output_dir", recipe.output_dir)
    if recipe.reference.cache_dir:
        # A read-only cache is enough if it has all values. A run that must write to it tests that first.
        yield from _directory_problems("reference.cache_dir", recipe.reference.cache_dir, is_written=False)
    resume = recipe.checkpoint.resume
    if resume not in ("auto", "never") and not os.path.isdir(resume):
        yield "checkpoint.resume", f"must be auto, never or the directory of a checkpoint, not {show(resume)}"


def _model_problems(key: str, path: str, needed: Sequence[str] = MODEL_FILES) -> Iterator[Problem]:
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in needed):
            remedy = "give one that save_pretrained wrote, or a hub id"
            yield key, f"directory {show(path)} has no {' or '.join(needed)}; {remedy}"
    elif os.path.exists(path):
        yield key, f"must be a directory or a hub id, and {show(path)} is a file"
    elif not HUB_ID.fullmatch(path):
        yield key, f"no such directory, and not a hub id: {show(path)}"


def _data_path_problems(key: str, path: str) -> Iterator[Problem]:
    is_data_file = path.endswith(DATA_FILE_SUFFIXES)
    if os.path.isdir(path):
        return
    if os.path.exists(path):
        if not is_data_file:
            yield key, f"a data file ends in {', '.join(DATA_FILE_SUFFIXES)}, not as {show(path)}"
        return
    has_suffix = path.endswith(".gz") or ("/" not in path and os.path.splitext(path)[1] != "")
    if is_data_file or has_suffix or path.startswith((".", "/", "~")):
        yield key, f"no such file or directory: {show(path)} (relative paths start at {os.getcwd()})"
    elif not HUB_ID.fullmatch(path):
        yield key, f"no such file or directory, and not a hub id: {show(path)}"


def _directory_problems(key: str, directory: Path, *, is_written: bool = True) -> Iterator[Problem]:
    """Yields the problems of a directory that the run may have to create."""
    nearest = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not os.path.isdir(nearest):
        yield key, f"{show(str(nearest))} is in the way: it is not a directory"
    elif (is_written or nearest != directory) and not os.access(nearest, os.W_OK | os.X_OK):
        yield key, f"no permission to write in {show(str(nearest))}"


def _is_adapter(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def _bfloat16_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of bfloat16 parameters: rounding undoes small updates of weights or reference."""
    if recipe.model.dtype != "bfloat16":
        return
    trains_adapter = recipe.model.lora is not None or _is_adapter(recipe.model.path)
    # The weights of an adapter are always fp32, whatever the type of its base model.
    if recipe.optim.name != "adamw" and not trains_adapter:
        yield "optim.name", f"{recipe.optim.name} {NO_MASTER_WEIGHTS}"
    # In bfloat16, a mix of two models, or base plus adapter, may round to the old reference. A copy is exact.
    if recipe.reference.sync is not None and (recipe.reference.sync.mixup < 1.0 or trains_adapter):
        yield (
            "reference.sync",
            "model.dtype bfloat16 rounds most of an update away; set model.dtype: float32, or mixup: 1 "
            "without an adapter",
        )


def _package_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields a problem for each optional package that the recipe needs and that is missing."""
    for key, module, extra, is_needed in (
        ("model.lora", "peft", "peft", recipe.model.lora is not None),
        ("model.path", "peft", "peft", _is_adapter(recipe.model.path)),
        ("reference.path", "peft", "peft", _is_adapter(recipe.reference.path or "")),
        ("model.kernels", "liger_kernel", "liger", recipe.model.kernels == "liger"),
        ("model.quantize", "bitsandbytes", "bitsandbytes", recipe.model.quantize is not None),
        ("optim.name", "bitsandbytes", "bitsandbytes", recipe.optim.name == "adamw_8bit"),
        ("online.generator.type", "vllm", "vllm", recipe.online and recipe.online.generator.type == "vllm"),
    ):
        if is_needed and importlib.util.find_spec(module) is None:
            package = module.replace("_", "-")
            yield key, f"needs the package {package}, which is not installed; {install_command(extra)}"


def _tracker_problems(recipe: Recipe) -> Iterator[Problem]:
    for tracker in recipe.logging.trackers:
        modules = ["tensorboard", "tensorboardX"] if tracker == "tensorboard" else [tracker]
        if not any(importlib.util.find_spec(module) for module in modules):
            package = modules[0].replace("_", "-")
            yield "logging.trackers", f"'{tracker}' is not installed; pip install {package}"
