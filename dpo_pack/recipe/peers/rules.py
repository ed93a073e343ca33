"""Rules that translate keys of TRL, axolotl and LLaMA-Factory (the peers) to keys of a recipe.

A rule says which recipe keys replace a peer's key, that the key is not needed, or that nothing replaces it.
translate.py translates files by these rules, errors.py uses them when a recipe has a peer's key, and
docs/from-peers.md lists them. Sources: TRL 1.16, transformers 5.23, axolotl at 067b021, LLaMA-Factory at
ff6d4d1.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from dpo_pack.recipe.loss import LOSS_DECLARATIONS
from dpo_pack.recipe.schema import Tracker
from dpo_pack.system.errors import RecipeError

Settings = Mapping[str, Any]  # the values of a peer's keys, defaults included


@dataclass(frozen=True, slots=True)
class Unneeded:
    """The outcome for a peer's key that dpo-pack does not need."""

    why: str


@dataclass(frozen=True, slots=True)
class Absent:
    """The outcome for a peer's key that no recipe key replaces."""

    what: str  # what differs in dpo-pack, or what to do instead


@dataclass(frozen=True, slots=True)
class Known:
    """The outcome for a peer's key that recipe keys replace: their values, and a remark.

    If `values` is empty, the peer's key is only named in the comment of the first key in `Rule.keys`.
    """

    values: dict[str, Any]
    remark: str = ""
    absent: tuple[str, ...] = ()  # parts of the peer's value that no recipe key replaces, and what differs


Outcome = Known | Unneeded | Absent
Convert = Callable[[Any, Settings], Any]  # (value, all settings) -> value for the recipe, or an Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Says how one key of a peer is translated to recipe keys."""

    keys: tuple[str, ...] = ()  # recipe keys that replace it; () if none
    remark: str = ""
    is_needed: bool = True  # read only if `keys` is (); False: dpo-pack does not need the key
    takes_null: bool = False  # False: null in the file means the peer's default
    convert: Convert


Table = dict[str, Rule]


def to(
    keys: str,
    convert: Convert | None = None,
    remark: str = "",
    *,
    comment: str = "",
    takes_null: bool = False,
) -> Rule:
    """Makes the rule that a key sets recipe keys `keys`; a value that `convert` returns goes to the first.

    remark: what docs and errors say of the rule. comment: what the translated recipe says beside the value.
    """
    names = tuple(keys.split())

    def outcome(value: Any, settings: Settings) -> Outcome:
        ours = value if convert is None else convert(value, settings)
        if isinstance(ours, (Known, Unneeded, Absent)):
            return ours
        return Known({names[0]: ours}, comment)

    return Rule(keys=names, remark=remark, takes_null=takes_null, convert=outcome)


def part_of(key: str, remark: str = "") -> Rule:
    """Makes the rule of a peer's key that sets nothing: another rule reads it to set the recipe key `key`."""
    return Rule(keys=(key,), remark=remark, convert=lambda value, settings: Known({}))


def choice(key: str, values: Mapping[Any, Any], otherwise: str) -> Rule:
    """Makes the rule of a key with few values. values: theirs -> ours. otherwise: what becomes of another."""

    def ours(value: Any, settings: Settings) -> Any:
        return values.get(value.lower() if isinstance(value, str) else value, Absent(otherwise))

    named = ", ".join(f"{theirs}: {ours}" for theirs, ours in values.items() if theirs != ours)
    return to(key, ours, remark=named.lower())  # true and false as in YAML


def if_on(ours: Any) -> Convert:
    """Makes a function that returns `ours` if an option is on, else Unneeded."""
    return lambda value, settings: ours if value else Unneeded("it is off")


def unneeded(why: str) -> Rule:
    return Rule(remark=why, is_needed=False, convert=lambda value, settings: Unneeded(why))


def absent(what: str) -> Rule:
    def outcome(value: Any, settings: Settings) -> Outcome:
        off = value in (False, 0, "", "no", "none") or value in ([], {})
        return Unneeded("it is off") if off else Absent(what)

    return Rule(remark=what, convert=outcome)


def each(names: str, rule: Rule) -> Table:
    return dict.fromkeys(names.split(), rule)


def as_unneeded(names: Mapping[str, str]) -> Table:
    """Makes rules of keys that dpo-pack does not need. names: reason -> keys, separated by spaces."""
    return {name: rule for why, all_of in names.items() for name, rule in each(all_of, unneeded(why)).items()}


def as_absent(names: Mapping[str, str]) -> Table:
    """Makes rules of keys that nothing replaces. names: what to do instead -> keys, separated by spaces."""
    return {name: rule for what, all_of in names.items() for name, rule in each(all_of, absent(what)).items()}


# ---------------------------------------------------------------------------------- words that all peers have

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    "adafactor": "adafactor",
}
SCHEDULES = {
    name: name
    for name in ("linear", "cosine", "polynomial", "inverse_sqrt", "constant", "constant_with_warmup")
} | {"cosine_with_min_lr": "cosine"}
TRUNCATIONS = {"keep_start": "completion_right", "keep_end": "prompt_left"}
# Values that users know from other projects: recipe key -> their value -> our value.
VALUES: dict[str, dict[str, str]] = {
    "loss.type": {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "kto_pair": "bco_pair", "slic": "hinge"},
    "optim.name": OPTIMIZERS,
    "optim.schedule": {"cosine_with_min_lr": "cosine, with optim.min_lr_ratio"},
    "model.attention": {
        **dict.fromkeys(("flash_attention_2", "flash_attention_3", "fa2"), "flash_attn"),
        "eager": "sdpa",
    },
    "model.dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "model.autocast": {"bf16": "bfloat16", "fp32": "none", "no": "none"},
    "data.truncation": TRUNCATIONS,
    "distributed.strategy": {"fsdp": "fsdp2", "deepspeed": "fsdp2", "zero3": "fsdp2"},
}


def whole(value: Any, settings: Settings) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _epochs(value: Any, settings: Settings) -> Any:
    if settings.get("max_steps", -1) and settings.get("max_steps", -1) > 0:
        return Unneeded("max_steps decides")
    if isinstance(value, float) and not value.is_integer():
        steps = f"{value:g} x the steps of an epoch, which dpopack inspect-packing prints"
        return Known({"train.epochs": math.ceil(value)}, f"only whole epochs: set train.max_steps to {steps}")
    return whole(value, settings)


def _max_steps(value: Any, settings: Settings) -> Any:
    if value is None or value <= 0:
        return Unneeded("no limit")
    remark = "so many epochs that max_steps alone decides when training ends"
    return Known({"train.max_steps": value, "train.epochs": 1000}, remark)


def _pairs_per_step(value: Any, settings: Settings) -> Any:
    names = ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    factors = [settings[name] for name in names if name in settings]
    devices = settings.get("num_processes")
    if not all(isinstance(factor, int) for factor in (*factors, devices or 1)):
        return Absent("set packing.pairs_per_step: pairs in a step, of all devices together")
    text = " x ".join(map(str, factors))
    assumed = "1 device, an assumption: multiply by your number of devices"
    remark = f"{text} x {assumed if devices is None else f'{devices} devices'}"
    return Known({"packing.pairs_per_step": math.prod(factors) * (devices or 1)}, remark)


def _schedule(value: Any, settings: Settings) -> Any:
    options = settings.get("lr_scheduler_kwargs") or {}
    if value not in SCHEDULES:
        known = ", ".join(sorted(set(SCHEDULES.values())))
        return Absent(f"dpo-pack has no such schedule, so linear is used; it has {known}")
    ours: dict[str, Any] = {"optim.schedule": SCHEDULES[value]}
    if value == "cosine_with_min_lr":
        rate = options.get("min_lr_rate")
        if rate is None and "min_lr" in options:
            rate = options["min_lr"] / settings["learning_rate"]
        ours["optim.min_lr_ratio"] = rate or 0.0
    return Known(ours)


def _schedule_options(value: Any, settings: Settings) -> Any:
    others = sorted(set(value or {}) - {"min_lr", "min_lr_rate"})
    return Absent(f"{', '.join(others)}: schedules have no such option") if others else Known({})


def _warmup_steps(value: Any, settings: Settings) -> Any:
    if not value and settings.get("warmup_ratio"):
        return Unneeded("warmup_ratio decides")
    if settings.get("lr_scheduler_type", settings.get("lr_scheduler")) == "constant":
        return Unneeded("schedule constant has no warm-up")
    return Known({"optim.warmup_ratio": value} if 0 < value < 1 else {"optim.warmup_steps": int(value)})


def _warmup_ratio(value: Any, settings: Settings) -> Any:
    if settings.get("warmup_steps"):
        return Unneeded("warmup_steps decides")
    if settings.get("lr_scheduler_type", settings.get("lr_scheduler")) == "constant":
        return Unneeded("schedule constant has no warm-up")
    return value


def _trackers(value: Any, settings: Settings) -> Any:
    names = [value] if isinstance(value, str) else list(value or ())
    names = [name for name in names if name != "none"]
    known = [name for name in names if name in get_args(Tracker)]
    if names and not known:
        return Absent(f"name the trackers in logging.trackers: {', '.join(get_args(Tracker))}")
    return known


def _steps_of(strategy: str, key: str) -> Convert:
    """Makes a function that translates an interval in steps; the value counts only if `strategy` is steps."""

    def convert(value: Any, settings: Settings) -> Any:
        how = settings.get(strategy, "no" if strategy == "eval_strategy" else "steps")
        if how not in ("steps", True):
            return Unneeded(f"{strategy} is {how or 'no'}")
        if not isinstance(value, int) or value < 1:
            advice = f"set {key} to a number of steps; dpopack inspect-packing prints the steps of an epoch"
            return Absent(f"a part of all steps: {advice}")
        return value

    return convert


def _strategy(key: str, steps: str) -> Rule:
    def convert(value: Any, settings: Settings) -> Any:
        if value == "steps":
            every = settings.get("logging_steps") if steps == "eval_steps" else None
            return Known({key: every} if every and not settings.get(steps) else {})
        if value in ("no", False):
            return Unneeded("never, as here without the key")
        return Absent(
            f"{value}: set {key} to a number of steps; dpopack inspect-packing prints those of an epoch"
        )

    return to(key, convert, remark=f"with {steps}")


def _autocast(value: Any, settings: Settings) -> Any:
    if value == "auto":
        return Unneeded("model.autocast auto computes in bfloat16 on CUDA")
    if not value and settings.get("fp16"):
        return Unneeded("fp16 decides")
    return "bfloat16" if value else "none"


def dtype(value: Any, settings: Settings) -> Any:
    name = str(value).removeprefix("torch.")
    if name == "bfloat16" and not settings.get("use_peft"):
        if OPTIMIZERS.get(settings.get("optim", "adamw"), "") != "adamw":
            return Absent("float32: this optimizer would round its updates of bfloat16 weights away")
        return Known(
            {"model.dtype": name}, "AdamW works on fp32 master weights here, in TRL on the bfloat16 ones"
        )
    if name in ("bfloat16", "float32"):
        return name
    if name == "auto":
        return Absent(
            "weights are float32 here, whatever the checkpoint has; model.dtype: bfloat16 takes less memory"
        )
    return Absent("weights are float32 here, because training in float16 needs loss scaling")


def _hub(value: Any, settings: Settings) -> Any:
    repo = settings.get("hub_model_id")
    if not value:
        return Unneeded("it is off")
    if not repo:
        return Absent("the model stays in output_dir/model; upload it with hf upload")
    return Known({"export.push_to_hub": {"repo": repo, "private": bool(settings.get("hub_private_repo"))}})


def held_out(value: Any, settings: Settings) -> Any:
    """Translates a part or a number of the training pairs that is held out to `data.eval`."""
    if not value:
        return Unneeded("nothing is held out")
    if value >= 1:
        return Absent("set data.eval to a fraction of the training pairs, e.g. {fraction: 0.02}")
    return {"fraction": value}


def source(path: str, **options: Any) -> dict[str, Any]:
    """Returns a source for data.train or data.eval without unset options. `train[:9]` gives max_pairs 9."""
    source = {"path": path, **{key: value for key, value in options.items() if value not in (None, {}, "")}}
    cut = re.fullmatch(r"(\w+)\[:(\d+)\]", str(source.get("split", "")))
    if cut:
        source |= {"split": cut[1], "max_pairs": int(cut[2])}
    if source.get("split") == "train":
        del source["split"]
    if source.get("config") == "default":
        del source["config"]
    return source


_DATA_FILES = ("json", "csv", "parquet", "arrow")  # names of loaders of the datasets library


def file_or_hub(path: Any, files: Any, **options: Any) -> list[dict[str, Any]]:
    """Returns a source for each data file of a `load_dataset` call or, without files, one for its path."""
    if files and path in (*_DATA_FILES, None):
        if isinstance(files, dict):  # files by split
            files = files[options.get("split") or "train"]
        names = [files] if isinstance(files, str) else files
        return [source(name, max_pairs=options.get("max_pairs")) for name in names]
    return [source(path, **options)]


def lora(value: Any, settings: Settings) -> Any:
    """Translates the LoRA options of TRL's ModelConfig or PEFT's LoraConfig to `model.lora`."""
    if not value:
        return Unneeded("it is off")
    rank, alpha = settings.get("lora_r", 16), float(settings.get("lora_alpha", 32))
    targets = settings.get("lora_target_modules")
    remark = ""
    if targets is None:
        targets = ["q_proj", "v_proj"]
        remark = "target_modules: PEFT's own choice for Llama, Qwen, Gemma, Mistral; others have another"
    if settings.get("use_rslora"):
        alpha *= math.sqrt(rank)
        remark = f"use_rslora: alpha x sqrt(r); {remark}".removesuffix("; ")
    return Known({
        "model.lora": {
            "r": rank,
            "alpha": alpha,
            "dropout": settings.get("lora_dropout", 0.05),
            "target_modules": "all-linear" if targets in ("all-linear", ["all-linear"]) else listed(targets),
        }
    }, remark)  # fmt: skip


def listed(value: Any) -> Any:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


QUANTIZE = "nf4: scales are quantised as well; int8: inputs are not rounded"


def reads(option: str) -> Convert:
    """Makes a function that returns an option's value, or Unneeded if no loss of the run reads `option`."""

    def convert(value: Any, settings: Settings) -> Any:
        types = [name for name, _ in loss_terms(settings)]
        if not any(option in LOSS_DECLARATIONS[name].options for name in types):
            return Unneeded(f"loss type {', '.join(types)} does not read it")
        return value

    return convert


# The losses of TRL's DPOTrainer, which axolotl has too. dpo-pack has all of them.
TRL_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
_OLD_NAMES = {"kto_pair": "bco_pair", "aot_pair": "aot"}  # of earlier releases of TRL


def loss_terms(settings: Settings) -> list[tuple[str, float]]:
    """Returns (type, weight) of each loss in the settings. Raises RecipeError for one that TRL lacks."""
    key = "loss_type" if "loss_type" in settings else "dpo_loss_type"
    types = settings.get(key, "sigmoid")
    types = [types] if isinstance(types, str) else list(types)
    types = [_OLD_NAMES.get(name, name) for name in types]
    weights = settings.get("loss_weights", settings.get("dpo_loss_weights")) or [1.0] * len(types)
    for name in types:
        if name not in TRL_LOSSES:
            raise RecipeError(f"{key}: {name}: TRL's DPO has no such loss; it has {', '.join(TRL_LOSSES)}")
    terms = [(name, float(weight)) for name, weight in zip(types, weights, strict=False) if weight]
    if settings.get("rpo_alpha"):
        terms.append(("sft", float(settings["rpo_alpha"])))
    return terms


def loss_type(settings: Settings) -> Any:
    """Returns the value for `loss.type`: a name if there is one loss of weight 1, else a list of losses."""
    terms = loss_terms(settings)
    if len(terms) == 1 and terms[0][1] == 1.0:
        return terms[0][0]
    return [{"type": name, "weight": weight} for name, weight in terms]


_BATCH = "packing.pairs_per_step"
TRANSFORMERS: Table = {
    "output_dir": to("output_dir"),
    "per_device_train_batch_size": to(_BATCH, _pairs_per_step, "batch size x accumulation x devices"),
    "gradient_accumulation_steps": part_of(_BATCH),
    "num_processes": part_of(_BATCH, "the number of devices, of accelerate launch or torchrun"),
    "num_train_epochs": to("train.epochs", _epochs),
    "max_steps": to("train.max_steps", _max_steps),
    "learning_rate": to("optim.lr"),
    "lr_scheduler_type": to(
        "optim.schedule", _schedule, "cosine_with_min_lr: cosine with optim.min_lr_ratio"
    ),
    "lr_scheduler_kwargs": to("optim.schedule", _schedule_options),
    "warmup_steps": to("optim.warmup_steps optim.warmup_ratio", _warmup_steps, "below 1: a ratio"),
    "warmup_ratio": to("optim.warmup_ratio", _warmup_ratio),
    "optim": choice(
        "optim.name",
        OPTIMIZERS,
        "dpo-pack has no such optimizer, so adamw is used; set an optim.lr that suits adamw",
    ),
    "weight_decay": to("optim.weight_decay"),
    "adam_beta1": to("optim.betas", lambda value, s: [value, s.get("adam_beta2", 0.999)]),
    "adam_beta2": to("optim.betas", lambda value, s: [s.get("adam_beta1", 0.9), value]),
    "adam_epsilon": to("optim.eps"),
    "max_grad_norm": to("optim.max_grad_norm", lambda value, s: value or None, "0: null"),
    "bf16": to("model.autocast", _autocast, "true: bfloat16, false: none"),
    "fp16": to(
        "model.autocast",
        if_on(Known({"model.autocast": "bfloat16"}, "bfloat16 in place of fp16, which needs loss scaling")),
        "bfloat16 in its place",
    ),
    "gradient_checkpointing": to(
        "model.gradient_checkpointing",
        lambda value, s: bool(value),
        comment="it changes memory and speed only",
    ),
    "activation_checkpointing": to("model.gradient_checkpointing", lambda value, s: bool(value)),
    "torch_compile": to("model.compile"),
    "use_liger_kernel": to("model.kernels", lambda value, s: "liger" if value else "none", "true: liger"),
    "logging_steps": to(
        "logging.every_steps",
        lambda value, s: int(value) if value >= 1 else Absent("a part of all steps: set logging.every_steps"),
    ),
    "report_to": to("logging.trackers", _trackers),
    "run_name": to("logging.run_name"),
    "eval_strategy": _strategy("train.eval_every_steps", "eval_steps"),
    "evaluation_strategy": _strategy("train.eval_every_steps", "eval_steps"),
    "eval_steps": to("train.eval_every_steps", _steps_of("eval_strategy", "train.eval_every_steps")),
    "save_strategy": _strategy("checkpoint.every_steps", "save_steps"),
    "save_steps": to("checkpoint.every_steps", _steps_of("save_strategy", "checkpoint.every_steps")),
    "save_total_limit": to("checkpoint.keep"),
    "load_best_model_at_end": to(
        "checkpoint.load_best checkpoint.keep_best",
        if_on(Known({"checkpoint.load_best": True, "checkpoint.keep_best": 1})),
    ),
    "metric_for_best_model": to(
        "checkpoint.metric", lambda value, s: str(value).removeprefix("eval_"), "without eval_"
    ),
    "early_stopping_patience": to("train.early_stopping", lambda value, s: {"patience": value}),
    "seed": to("seed"),
    "train_sampling_strategy": choice(
        "data.shuffle",
        {"random": True, "sequential": False},
        "pairs are packed by length already; their order is random",
    ),
    "push_to_hub": to("export.push_to_hub", _hub, "with hub_model_id"),
    "hub_model_id": part_of("export.push_to_hub"),
    "hub_private_repo": part_of("export.push_to_hub"),
    **as_unneeded(
        {
            "DPO has no such loss; loss.label_smoothing smooths preferences": "label_smoothing_factor",
            "the same command again resumes an unfinished run": "resume_from_checkpoint",
            "metrics.jsonl has a line every logging.every_steps steps": "logging_strategy",
            "packing.token_budget bounds memory; distributed.strategy auto shards where needed": """
            auto_find_batch_size fsdp fsdp_* deepspeed parallelism_config torch_empty_cache_steps""",
            "dpo-pack chooses these options itself": """
            gradient_checkpointing_kwargs activation_checkpointing_kwargs torch_compile_* use_cache
            liger_kernel_config""",
            "packing leaves no padding to save": "group_by_length",
            "a step is one batch, whatever the number of devices": "average_tokens_across_devices",
            "checkpoint.metric says which is better": "greater_is_better",
            "runs are deterministic; see docs/numerics.md": "full_determinism",
            "evaluations are packed like training, into rows of packing.token_budget tokens": """
            per_device_eval_batch_size eval_accumulation_steps""",
            "the first evaluation is always before step 1": "eval_on_start eval_delay",
            "evaluations compute in the precision of training": "bf16_full_eval fp16_full_eval",
            "`dpopack train` trains and evaluates": "do_train do_eval do_predict",
            "a second `dpopack train` resumes the run; --overwrite starts anew": "overwrite_output_dir",
            "dpo-pack starts its own processes; see docs/distributed.md": """
            ddp_* accelerator_config local_rank log_on_each_node save_on_each_node use_cpu num_machines
            accelerate_config config_file""",
            "pairs are tokenised once and cached": """
            dataloader_* remove_unused_columns label_names length_column_name ignore_data_skip""",
            "it makes fp32 products faster, and autocast computes them in bfloat16": "tf32",
            "it changes what is printed or written, not what is trained": """
            logging_* log_level* disable_tqdm include_* skip_memory_metrics debug prediction_loss_only
            batch_eval_metrics eval_* save_only_model save_safetensors enable_jit_checkpoint
            restore_callback_states_from_checkpoint plot_loss""",
        }
    ),
    **as_absent(
        {
            "no noise is added to embeddings": "neftune_noise_alpha",
            "dpo-pack's optimizers have the options of section optim only": "optim_args",
            "dpo-pack has no such optimizers": "optim_target_modules",
            "dpo-pack has no products in FP8": "fp8*",
            "seed decides the order of the pairs too": "data_seed",
            "the last step of an epoch has the pairs that remain; none is dropped": "dataloader_drop_last",
            "set it in the tracker's or the hub's own environment variables": "hub_* trackio_* project",
        }
    ),
}
