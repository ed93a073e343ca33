"""Checks of a recipe whose keys are each valid: what is not built yet, rules that join keys, this machine."""

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dpo_pack.recipe_checkpoint_checks import broken_checkpoint_rules
from dpo_pack.recipe_errors import Problem, fail_if_any, show, value_at
from dpo_pack.recipe_online_checks import broken_online_rules
from dpo_pack.recipe_schema import (
    DataRecipe,
    EvalFraction,
    LossRecipe,
    OptimRecipe,
    PackingRecipe,
    Recipe,
    SourceRecipe,
    Tracker,
)
from dpo_pack.recipe_yaml import to_yaml

# --------------------------------------------------------------------------------------------- available


def unavailable(recipe: Recipe) -> Iterator[Problem]:
    """Values the schema knows and this version cannot do yet."""
    tree = recipe.model_dump()
    for key, available in AVAILABLE_SO_FAR.items():
        value = value_at(tree, key.split("."))
        if value not in available:
            reason = f": {UNAVAILABLE_BECAUSE[key]}" if key in UNAVAILABLE_BECAUSE else ""
            yield key, f"{show(value)} is not available yet{reason}; available so far: {listed(available)}"


def listed(values: Iterable[object]) -> str:
    """Values as a recipe would hold them, with commas between."""
    return ", ".join(to_yaml(value, one_line=True) for value in values)


# ------------------------------------------------------------------------------------------------- rules


def broken_rules(recipe: Recipe) -> Iterator[Problem]:
    """Problems that only several keys together show."""
    yield from _broken_data_rules(recipe.data)
    yield from _broken_packing_rules(recipe.packing)
    yield from _broken_loss_rules(recipe.loss)
    yield from _broken_optim_rules(recipe.optim)
    yield from _broken_dropout_rules(recipe)
    yield from broken_online_rules(recipe)
    yield from broken_checkpoint_rules(recipe)
    yield from _broken_distributed_rules(recipe)
    types = {name for name, _ in recipe.loss.terms}
    if recipe.reference.path and types <= REFERENCE_FREE_LOSSES:
        yield "reference.path", f"no reference is used by loss.type {', '.join(sorted(types))}; leave it out"
    if recipe.reference.sync and types <= REFERENCE_FREE_LOSSES:
        yield "reference.sync", f"no reference is used by loss.type {', '.join(sorted(types))}; leave it out"
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
    if packing.merge_prompts:
        if packing.mode == "padded":
            yield "packing.merge_prompts", "needs packing.mode: packed"
        if not packing.share_prompt:
            yield "packing.merge_prompts", "needs packing.share_prompt: true"
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
    known = {name for name in types if ":" not in name}  # one's own loss may use any option
    for option, users in USERS_OF_LOSS_OPTION.items():
        is_set = values[option] != LossRecipe.model_fields[option].default
        if is_set and users.isdisjoint(types) and known == set(types):
            yield (
                f"loss.{option}",
                f"not used by loss.type {', '.join(types)}, only by {', '.join(sorted(users))}",
            )
    if "exo_pair" in types and loss.label_smoothing == 0:
        yield "loss.label_smoothing", "must be > 0 for loss.type exo_pair, which takes its logarithm"
    if loss.f_alpha != LossRecipe.model_fields["f_alpha"].default and loss.f_divergence != "alpha_divergence":
        yield "loss.f_alpha", "only used by loss.f_divergence: alpha_divergence"
    without_divergence = sorted(known - F_DIVERGENCE_LOSSES)
    if loss.f_divergence != "reverse_kl" and without_divergence:
        yield "loss.f_divergence", f"loss.type {', '.join(without_divergence)} is defined for reverse_kl only"
    elif loss.f_divergence != "reverse_kl" and REFERENCE_FREE_LOSSES.issuperset(types):
        yield "loss.f_divergence", f"loss.type {', '.join(types)} compares with no reference"
    sorting = sorted({"aot", "aot_unpaired"} & known)
    if loss.weighting and sorting:
        yield "loss.weighting", f"loss.type {', '.join(sorting)} sorts over pairs, so pairs have no weights"
    with_likelihood = sorted({"sft", "orpo", "cpo"} & known)
    if loss.weighting and with_likelihood:
        what = f"loss.type {', '.join(with_likelihood)}, which is a likelihood as well"
        yield "loss.weighting", f"wpo weights preferences; it is not defined for {what}"
    if loss.ld_alpha is not None and (without_reference := sorted(known & REFERENCE_FREE_LOSSES)):
        what = f"loss.type {', '.join(without_reference)} takes whole completions"
        yield "loss.ld_alpha", f"changes log-ratios to the reference; {what}"


def _broken_dropout_rules(recipe: Recipe) -> Iterator[Problem]:
    if recipe.model.lora is None or recipe.model.lora.dropout == 0.0:
        return
    coupling = sorted({"aot", "aot_unpaired"} & {name for name, _ in recipe.loss.terms})
    if coupling:
        what = f"loss.type {', '.join(coupling)} computes each row twice, which dropout would change"
        yield "model.lora.dropout", f"must be 0: {what}"
    if recipe.packing.merge_prompts:
        yield "model.lora.dropout", "must be 0 for packing.merge_prompts, which computes a prompt once"


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
    for key in ("betas", "eps"):
        is_set = optim.model_dump()[key] != OptimRecipe.model_fields[key].default
        if is_set and optim.name == "adafactor":
            yield f"optim.{key}", "not used by optim.name adafactor"
    if optim.schedule == "polynomial" and optim.lr <= POLYNOMIAL_LR_END:
        yield "optim.lr", f"must be > {POLYNOMIAL_LR_END}, where schedule polynomial ends, not {optim.lr}"


def _broken_distributed_rules(recipe: Recipe) -> Iterator[Problem]:
    distributed = recipe.distributed
    for key in ("hybrid", "cpu_offload", "gather_dtype", "accumulate_unsharded"):
        if distributed.strategy != "fsdp2" and distributed.model_dump()[key]:
            yield f"distributed.{key}", "needs distributed.strategy: fsdp2"
    if distributed.gather_dtype and recipe.model.autocast not in ("auto", "none"):
        yield "distributed.gather_dtype", "takes the place of model.autocast; leave one of the two out"


# -------------------------------------------------------------------------------------------- this machine


def check_environment(recipe: Recipe) -> None:
    """Raises RecipeError when paths or packages the recipe names are not on this machine."""
    fail_if_any(
        [
            *_path_problems(recipe),
            *_optimizer_problems(recipe),
            *_moving_reference_problems(recipe),
            *_package_problems(recipe),
            *_tracker_problems(recipe),
        ]
    )


def check_paths(recipe: Recipe) -> None:
    """Raises RecipeError when local files or directories are missing or cannot be written."""
    fail_if_any(_path_problems(recipe))


def check_trackers(recipe: Recipe) -> None:
    """Raises RecipeError when the package of a tracker is not installed."""
    fail_if_any(_tracker_problems(recipe))


def _path_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from _model_problems("model.path", recipe.model.path, MODEL_FILES)
    if recipe.model.lora is not None and _is_adapter(recipe.model.path):
        yield (
            "model.lora",
            "model.path is an adapter, which is trained further as it is; leave model.lora out, or merge the "
            "adapter first with 'dpopack merge'",
        )
    if recipe.model.revision and os.path.isdir(recipe.model.path):
        yield "model.revision", "a local directory has no revisions; leave it out"
    if recipe.tokenizer.path:
        yield from _model_problems("tokenizer.path", recipe.tokenizer.path, TOKENIZER_FILES)
    if recipe.tokenizer.chat_template and not os.path.isfile(recipe.tokenizer.chat_template):
        yield "tokenizer.chat_template", f"no such file: {show(str(recipe.tokenizer.chat_template))}"
    if recipe.reference.path:
        yield from _model_problems("reference.path", recipe.reference.path, MODEL_FILES)
    for part, sources in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        for index, source in enumerate(() if isinstance(sources, EvalFraction) else sources):
            yield from _data_path_problems(f"data.{part}.{index}.path", source.path)
    for number, judge in enumerate(recipe.online.judges if recipe.online else ()):
        if judge.path is not None:
            yield from _model_problems(f"online.judges.{number}.path", judge.path, MODEL_FILES)
    yield from _directory_problems("output_dir", recipe.output_dir)
    if recipe.reference.cache_dir:
        # One that has everything may be read-only; what cannot be written is noticed before it is computed.
        yield from _directory_problems("reference.cache_dir", recipe.reference.cache_dir, is_written=False)
    resume = recipe.checkpoint.resume
    if resume not in ("auto", "never") and not os.path.isdir(resume):
        yield (
            "checkpoint.resume",
            f"must be auto, never or the directory of a checkpoint, not {show(resume)}",
        )


def _model_problems(key: str, path: str, needed: Sequence[str]) -> Iterator[Problem]:
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in needed):
            remedy = "give one that save_pretrained wrote, or a hub id"
            yield key, f"directory {show(path)} has no {' or '.join(needed)}; {remedy}"
    elif os.path.exists(path):
        yield key, f"must be a directory or a hub id, and {show(path)} is a file"
    elif not HUB_ID.fullmatch(path):
        yield key, f"no such directory, and not a hub id: {show(path)}"


def _is_adapter(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def _trains_adapter(recipe: Recipe) -> bool:
    return recipe.model.lora is not None or _is_adapter(recipe.model.path)


def _optimizer_problems(recipe: Recipe) -> Iterator[Problem]:
    # An adapter is in fp32 whatever its base is in.
    if recipe.model.dtype == "bfloat16" and recipe.optim.name != "adamw" and not _trains_adapter(recipe):
        yield "optim.name", f"{recipe.optim.name} {NO_MASTER_WEIGHTS}"


def _moving_reference_problems(recipe: Recipe) -> Iterator[Problem]:
    """A mixture, or base and adapter, rounded to bfloat16 may stay where it was; a copy is exact."""
    sync = recipe.reference.sync
    if sync is None or recipe.model.dtype != "bfloat16":
        return
    if sync.mixup < 1.0 or _trains_adapter(recipe):
        yield (
            "reference.sync",
            "model.dtype bfloat16 rounds most of an update away; set model.dtype: float32, or mixup: 1 "
            "without an adapter",
        )


def _package_problems(recipe: Recipe) -> Iterator[Problem]:
    """Extras that the recipe needs, found before anything is loaded."""
    needed = {  # key: (module, extra that has it, whether)
        "model.lora": ("peft", "peft", recipe.model.lora is not None),
        "model.path": ("peft", "peft", _is_adapter(recipe.model.path)),
        "reference.path": ("peft", "peft", _is_adapter(recipe.reference.path or "")),
        "model.kernels": ("liger_kernel", "liger", recipe.model.kernels == "liger"),
        "optim.name": ("bitsandbytes", "bitsandbytes", recipe.optim.name == "adamw_8bit"),
        "online.generator.type": (
            "vllm",
            "vllm",
            recipe.online is not None and recipe.online.generator.type == "vllm",
        ),
    }
    for key, (module, extra, is_needed) in needed.items():
        if is_needed and importlib.util.find_spec(module) is None:
            package = module.replace("_", "-")
            yield (
                key,
                f"needs the package {package}, which is not installed; pip install 'dpo-pack[{extra}]'",
            )


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
    """Problems of a directory that need not exist yet."""
    nearest = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not os.path.isdir(nearest):
        yield key, f"{show(str(nearest))} is in the way: it is not a directory"
    elif (is_written or nearest != directory) and not os.access(nearest, os.W_OK | os.X_OK):
        yield key, f"no permission to write in {show(str(nearest))}"


def _tracker_problems(recipe: Recipe) -> Iterator[Problem]:
    for tracker in recipe.logging.trackers:
        modules = TRACKER_MODULES[tracker]
        if not any(importlib.util.find_spec(module) for module in modules):
            yield (
                "logging.trackers",
                f"'{tracker}' is not installed; pip install {modules[0].replace('_', '-')}",
            )


# ------------------------------------------------------------------------------------------------ tables

USERS_OF_LOSS_OPTION: dict[str, frozenset[str]] = {
    "label_smoothing": frozenset({"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "cpo"}),
    "discopop_tau": frozenset({"discopop"}),
    "simpo_gamma": frozenset({"simpo"}),
    "cpo_alpha": frozenset({"cpo"}),
}
REFERENCE_FREE_LOSSES = frozenset({"simpo", "orpo", "cpo", "sft"})
# In the others beta x log Z(prompt), which an f-divergence leaves in each reward, would not cancel.
F_DIVERGENCE_LOSSES = frozenset(
    {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
)
POLYNOMIAL_LR_END = 1e-7  # transformers' default lr_end
NO_MASTER_WEIGHTS = (
    "keeps no fp32 master weights, and parameters in bfloat16 would round its updates away; set optim.name: "
    "adamw or model.dtype: float32"
)

FIELDS_OF_FORMAT: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected", "weight"),
    "conversational": ("prompt", "chosen", "rejected", "weight", "tools", "chat_template_kwargs"),
    "transcript": ("chosen", "rejected", "weight"),
    "tokenized": ("prompt_ids", "chosen_ids", "rejected_ids", "weight"),
}
# Those of data/readers.py.
DATA_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow", ".csv", ".csv.gz")
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
MODEL_FILES = ("config.json", "adapter_config.json")
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

# Keys of which only some values are built; a key that is done is a line less.
AVAILABLE_SO_FAR: dict[str, tuple[object, ...]] = {
    "model.dtype": ("auto", "float32", "bfloat16"),
    "model.autocast": ("auto", "bfloat16", "none"),
    "loss.router_aux_coef": (0.0,),
}
_NO_LOSS_SCALING = "its smallest gradients would be rounded to zero, as losses are not scaled"
UNAVAILABLE_BECAUSE: dict[str, str] = {"model.dtype": _NO_LOSS_SCALING, "model.autocast": _NO_LOSS_SCALING}
