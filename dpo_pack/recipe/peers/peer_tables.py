"""What TRL, axolotl and LLaMA-Factory (the peers) call the keys and values of a recipe.

The tables are YAML files; transformers.yaml explains them. A table names READERS: a reader gets the value of
its key and all settings, and returns the value of its row's first recipe key, or an Outcome.
"""

import difflib
import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dpo_pack.recipe.data import DATA_FILE_SUFFIXES
from dpo_pack.recipe.text import read_yaml
from dpo_pack.system.errors import RecipeError

PEERS = ("trl", "axolotl", "llamafactory")
Settings = Mapping[str, Any]
FOLDER = "#folder"  # the setting that is the directory of the peer's file


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKey:
    """What becomes of a key of a peer."""

    name: str  # for readers: TRL's name of the key, if TRL has a key of the same meaning
    kind: str  # the part of the table
    ours: tuple[str, ...]  # recipe keys that replace it
    reader: str = ""  # its name; part: the reader of another key; "": none
    values: Mapping[str, Any] = field(default_factory=dict)  # their value, as `as_word` writes it -> ours
    remark: str = ""


@functools.cache
def read_table(peer: str) -> Mapping[str, Any]:
    """Returns the table of a peer, or of "transformers", as it stands in its file."""
    path = Path(__file__).with_name(f"{peer}.yaml")
    tree: Mapping[str, Any] = read_yaml(path.read_text(encoding="utf-8"), where=str(path))
    return tree


@functools.cache
def rows_of(peer: str) -> Mapping[str, PeerKey]:
    """Returns a peer's keys, those that all have among them; * in a key is any text."""
    rows, table = {} if peer == "transformers" else dict(rows_of("transformers")), read_table(peer)
    for name, ours in table["renamed"].items():
        rows[name] = PeerKey(name=name, kind="renamed", ours=(ours,))
    for kind in ("keys", "keys if on"):
        for names, row in table[kind].items():
            ours, how, *remark = row
            shared: dict[str, Any] = {"kind": kind, "ours": tuple(ours.split()), "remark": "".join(remark)}
            shared["reader" if isinstance(how, str) else "values"] = how
            rows |= {name: PeerKey(name=name, **shared) for name in names.split()}
    for kind in ("not needed", "no counterpart"):
        for why, names in table[kind].items():
            rows |= {name: PeerKey(name=name, kind=kind, ours=(), remark=why) for name in names.split()}
    others = rows if peer in ("transformers", "trl") else rows_of("trl")
    return rows | {name: others[same] for name, same in table["same"].items()}


def find_row(peer: str, name: str) -> PeerKey:
    """Returns the row of a key, else of the first pattern that fits it, else one that says it is unknown."""
    fitting = (row for key, row in rows_of(peer).items() if "*" in key and fnmatchcase(name, key))
    if found := rows_of(peer).get(name) or next(fitting, None):
        return found
    close = difflib.get_close_matches(name, rows_of(peer), n=1, cutoff=0.8)
    remark = "dpo-pack does not know this key" + "".join(f"; did you mean {other}?" for other in close)
    return PeerKey(name=name, kind="no counterpart", ours=(), remark=remark)


def as_word(value: object) -> str:
    """Returns a value as tables have it: null, true (also for 1), false, text in small letters."""
    return json.dumps(bool(value)) if value in (0, 1) else "null" if value is None else str(value).lower()


@functools.cache
def our_words() -> dict[str, str]:
    """Returns for each key of a peer a text for an error message: what replaces it."""
    texts: dict[str, str] = {}
    for peer in PEERS:
        for name, row in rows_of(peer).items():
            here = f"is {' and '.join(row.ours or [row.kind])} here".replace("is no c", "has no c")
            remark = f": {row.remark}" if row.remark else ""
            texts.setdefault(name, f"{read_table(peer)['name']}'s {name} {here}{remark}")
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What becomes of a peer's key; if all is empty, it is only named beside its recipe key."""

    values: dict[str, Any] = field(default_factory=dict)  # by recipe key; "": the row's first recipe key
    remark: str = ""  # in place of the row's
    unneeded: str = ""  # why dpo-pack does not need it
    absent: str = ""  # what differs in dpo-pack, or what to do instead


def _listed(value: Any) -> list[Any]:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)


def batch(value: Any, settings: Settings) -> Outcome:
    factors = [settings[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    devices = settings.get("num_processes", 1)
    assumed = "" if "num_processes" in settings else ", an assumption: multiply by the number of your devices"
    remark = f"{factors[0]} x {factors[1]} x {devices} device{'s'[: devices > 1]}{assumed}"
    return Outcome(values={"packing.pairs_per_step": math.prod([*factors, devices])}, remark=remark)


def schedule(value: Any, settings: Settings) -> Outcome:
    options, name = settings.get("lr_scheduler_kwargs", {}), settings["lr_scheduler_type"]
    values, others = {"optim.schedule": name}, ", ".join(sorted(set(options) - {"min_lr", "min_lr_rate"}))
    if name == "cosine_with_min_lr":
        rate = options.get("min_lr_rate", options.get("min_lr", 0.0) / settings["learning_rate"])
        values = {"optim.schedule": "cosine", "optim.min_lr_ratio": rate or 0.0}
    return Outcome(values=values, absent=f"{others}: schedules have no such option" if others else "")


def interval(strategy: str, steps: str, usual: str, value: Any, settings: Settings) -> Any:
    """Reads how often a run evaluates or saves, from a strategy (steps, epoch, no) and a number of steps."""
    how, every = settings.get(strategy, usual), settings.get(steps) or settings["logging_steps"]
    if how in ("no", False):
        return Outcome(unneeded=f"{strategy} is no")
    if how not in ("steps", True) or not isinstance(every, int):
        return Outcome(absent="set it to a number of steps; dpopack inspect-packing prints those of an epoch")
    return every


def lora(value: Any, settings: Settings) -> Any:
    """Reads TRL's use_peft, axolotl's adapter and LLaMA-Factory's finetuning_type, and options of LoRA."""
    if value == "full":
        return Outcome(unneeded="all parameters are trained by default")
    if value not in (True, "lora", "qlora"):
        raise RecipeError("dpo-pack trains all parameters or LoRA adapters")
    rank, targets = settings["lora_r"], settings["lora_target_modules"]
    is_linear = settings.get("lora_target_linear") or targets in ("all", "all-linear", ["all-linear"])
    targets = "all-linear" if is_linear else _listed(targets)
    alpha = settings.get("lora_alpha", 2 * rank) * (math.sqrt(rank) if settings.get("use_rslora") else 1.0)
    return {"r": rank, "alpha": alpha, "dropout": settings["lora_dropout"], "target_modules": targets}


def dtype(value: Any, settings: Settings) -> str:
    name = str(value).removeprefix("torch.")
    optimizer = rows_of("trl")["optim"].values.get(settings["optim"])
    has_masters = settings.get("use_peft") or optimizer == "adamw"
    return "auto" if name == "float16" or (name == "bfloat16" and not has_masters) else name


def trl_loss(value: Any, settings: Settings) -> Any:
    names, known = _listed(value), read_table("transformers")["losses"]
    if gone := [name for name in names if known.get(name, name) is None]:
        return Outcome(
            absent=f"{' and '.join(gone)} is not here; set loss.type, which is sigmoid as it stands"
        )
    weights = settings.get("loss_weights") or [1.0] * len(names)
    weighted = [*zip(names, weights, strict=False), ("sft", settings.get("rpo_alpha"))]
    terms = [{"type": known.get(name, name), "weight": float(part)} for name, part in weighted if part]
    return terms[0]["type"] if len(terms) == 1 and terms[0]["weight"] == 1.0 else terms


def smoothing(value: Any, settings: Settings) -> Any:
    """Reads TRL's label_smoothing, which sigmoid ignores there and not here."""
    names = _listed(settings["loss_type"])
    if value and not {"robust", "exo_pair", "aot", "aot_pair", "aot_unpaired"}.intersection(names):
        return Outcome(absent=f"TRL's {' and '.join(names)} ignores it; for cDPO set loss.label_smoothing")
    remark = "TRL's sigmoid ignores it; here it has it, too" if value and "sigmoid" in names else ""
    return Outcome(values={"": value}, remark=remark)


def axolotl_loss(value: Any, settings: Settings) -> Any:
    if value == "dpo":
        weights = {**settings, "loss_weights": settings.get("dpo_loss_weights")}
        return trl_loss(settings.get("dpo_loss_type", "sigmoid"), weights)
    if value == "orpo" and "orpo_alpha" in settings:
        return Outcome(values={"": "orpo", "loss.beta": settings["orpo_alpha"]})
    factor = settings.get("cpo_alpha", 1.0) if value == "simpo" else 0
    return [{"type": value, "weight": 1.0}, {"type": "sft", "weight": factor}] if factor else value


def llamafactory_loss(value: Any, settings: Settings) -> Any:
    if value not in ("sigmoid", "hinge", "ipo", "orpo", "simpo"):
        raise RecipeError("dpo-pack has no such loss; it reads sigmoid, hinge, ipo, orpo and simpo")
    bco, ftx = settings.get("pref_bco_weight", 0.0), settings.get("pref_ftx", 0.0)
    weights = {value: 1.0 / (1.0 + bco), "bco_pair": bco / (1.0 + bco), "sft": ftx}
    terms = [{"type": name, "weight": weight} for name, weight in weights.items() if weight]
    return value if len(terms) == 1 else terms


def _is_file(path: Any) -> bool:
    return str(path).endswith(DATA_FILE_SUFFIXES)


def _sources(described: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the sources of data sets that are described as for `load_dataset`: one for each data file."""
    sources = []
    for one in described:
        names, files = [one.get("path", one.get("id"))], one.get("data_files")
        same = ("split", "data_dir", "revision", "format", "columns", "max_pairs", "image_folder")
        ours: dict[str, Any] = {key: one.get(key) for key in same}
        ours["config"] = one.get("name", one.get("config"))
        ours |= {"weight": one.get("weight"), "share": one.get("fraction")}
        if isinstance(ours["columns"], list):  # those that are read: without a prompt, it is in both answers
            ours["columns"] = {} if "prompt" in ours["columns"] else {"prompt": None}
        if cut := re.fullmatch(r"(\w+)\[:(\d+)\]", str(ours["split"])):
            ours |= {"split": cut[1], "max_pairs": int(cut[2])}
        if files and names[0] in ("json", "csv", "parquet", "arrow", None):
            split = (ours["split"] or "train").partition("[")[0]
            files = files[split] if isinstance(files, dict) else files
            names = _listed(files)
        if _is_file(names[0]):
            if "[" in str(ours["split"]):
                raise RecipeError(f"a file has no {ours['split']}: write a split's name, and set max_pairs")
            ours |= {"split": None, "config": None}
        if len(names) > 1 and (ours["share"] or ours["max_pairs"]):
            raise RecipeError("a part of several files together: put them in a folder, and name it as path")
        unset = {"split": "train", "config": "default", "weight": 1.0}
        ours = {key: value for key, value in ours.items() if value not in (None, {}, "", unset.get(key))}
        sources += [{"path": name, **ours} for name in names]
    return sources


_READ_KEYS = {"path", "id", "name", "config", "split", "data_dir", "data_files", "revision", "columns"}
_READ_KEYS |= {"fraction", "weight", "type", "ds_type"}


def _unread(described: list[dict[str, Any]]) -> list[str]:
    """Says which keys of data sets no source gets. Roles and texts are found under their usual names."""
    keys = {key for one in described for key, value in one.items() if value and not key.startswith("field_")}
    return [f"not read: {', '.join(sorted(keys - _READ_KEYS))}"] if keys - _READ_KEYS else []


def trl_sources(value: Any, settings: Settings) -> Outcome:
    if settings.get("datasets"):
        return Outcome(unneeded="datasets decides")
    files, test = settings.get("data_files"), settings["dataset_test_split"]
    train = {"path": value, "data_files": files, "split": settings["dataset_train_split"]}
    train |= {"config": settings.get("dataset_config"), "data_dir": settings.get("data_dir")}
    ours = {"data.train": _sources([train])}
    if settings.get("eval_strategy", "no") in ("no", False):
        return Outcome(values=ours)
    held_out = {"path": settings.get("eval_dataset_name", value), "split": test}
    if (
        test not in files
        if isinstance(files, dict)
        else files or held_out["path"] == value and _is_file(value)
    ):
        return Outcome(values=ours, absent=f"a file has no split {test}; name held-out pairs in data.eval")
    return Outcome(values=ours | {"data.eval": _sources([train | held_out])})


def mixture(value: Any, settings: Settings) -> Outcome:
    """Reads `datasets` of TRL's DatasetMixtureConfig, or the alignment handbook's `dataset_mixture`."""
    mixed = value if isinstance(value, dict) else {"datasets": value}
    ours: dict[str, Any] = {"data.train": _sources(mixed["datasets"])}
    size, absent = mixed.get("test_split_size", settings.get("test_split_size")), _unread(mixed["datasets"])
    if size and settings.get("eval_strategy", "no") not in ("no", False):
        ours["data.eval"] = {"fraction": size if size < 1 else 0.02}
        absent += [f"TRL holds out {size} pairs; set data.eval to a fraction"] if size >= 1 else []
    return Outcome(values=ours, absent="; ".join(absent))


def mixer(value: Any, settings: Settings) -> Outcome:
    """Reads the alignment handbook's `dataset_mixer`, {hub id: fraction}, and its `dataset_splits`."""
    splits = settings.get("dataset_splits", ["train"])
    train = next((name for name in splits if "train" in name), splits[0])
    test = [name for name in splits if name != train and "test" in name][:1]
    sources = _sources([{"path": path, "split": train, "weight": part} for path, part in value.items()])
    held_out = _sources([{"path": path, "split": name} for name in test for path in value])
    return Outcome(values={"data.train": sources} | ({"data.eval": held_out} if test else {}))


# For a prompt strategy of axolotl: our field of a pair -> the column of the data that holds it.
_COLUMNS = {
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    "icr": {"prompt": "input"}, "intel": {"prompt": "question"},
}  # fmt: skip


def axolotl_sources(value: Any, settings: Settings) -> Outcome:
    described, formats, absent = [], [], _unread(value)
    for one in value:
        own = one["type"] if isinstance(one.get("type"), dict) else {}  # a type that the user defines
        columns, fields = dict(_COLUMNS.get(str(one.get("type")).rsplit(".", 1)[-1], {})), {**one, **own}
        for ours in ("prompt", "chosen", "rejected", *(() if own else ("system",))):
            theirs = fields.get(f"field_{ours}") or (ours == "prompt" and fields.get("field_messages"))
            columns |= {ours: theirs} if theirs else {}
        described.append({**one, "columns": {k: theirs for k, theirs in columns.items() if k != theirs}})
        formats += [f"{name}: {text!r}" for name, text in own.items() if name.endswith("_format") and text]
    if formats:
        what = "columns are taken as they are; text that these formats add is NOT added"
        absent += [f"{what}: {', '.join(formats)}"]
    return Outcome(values={"": _sources(described)}, absent="; ".join(absent))


# A key of "columns" in dataset_info.json -> our field of a pair.
_FIELDS = {name: name for name in ("chosen", "rejected", "system", "tools", "history", "images")}
_FIELDS |= {"messages": "conversations", "prompt": "instruction", "query": "input"}


def llamafactory_sources(value: Any, settings: Settings) -> Any:
    """Reads names of data sets, which dataset_info.json describes."""
    given = Path(str(settings.get("dataset_dir", "data")))
    places = [place / "dataset_info.json" for place in (given, settings[FOLDER] / given, settings[FOLDER])]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return Outcome(absent="no dataset_info.json describes it here; name the pairs yourself")
    entries, described, has_images = json.loads(file.read_text(encoding="utf-8")), [], False
    for name in _listed(value):
        info = entries.get(name, {})
        formatting, columns = info.get("formatting") or "alpaca", info.get("columns") or {}
        if not info.get("ranking") or formatting not in ("alpaca", "sharegpt"):
            needed = f"no {name} with ranking: true, and formatting alpaca or sharegpt"
            raise RecipeError(f"{file} has {needed}; it has {', '.join(entries)}")
        described.append({
            "path": info.get("hf_hub_url") or os.path.join(file.parent, info.get("file_name") or ""),
            "config": info.get("subset"), "data_dir": info.get("folder"), "split": info.get("split"),
            "max_pairs": settings.get("max_samples") or info.get("num_samples"), "format": formatting,
            "columns": {_FIELDS[key]: at for key, at in columns.items() if at and at != _FIELDS.get(key, at)},
            "image_folder": settings.get("media_dir") if columns.get("images") else None,
        })  # fmt: skip
        has_images = has_images or bool(columns.get("images"))
    pictures = {"model.images": True, "data.max_pixels": settings["image_max_pixels"]} if has_images else {}
    return Outcome(values={"": _sources(described), **pictures})


_TRACKERS = {
    "use_wandb": "wandb", "wandb_project": "wandb", "use_mlflow": "mlflow", "use_comet": "comet_ml",
    "use_tensorboard": "tensorboard", "use_trackio": "trackio", "use_swanlab": "swanlab",
}  # fmt: skip
_NAMED = (batch, schedule, lora, dtype, smoothing, trl_loss, axolotl_loss, llamafactory_loss)
READERS: dict[str, Callable[[Any, Settings], Any]] = {
    "part": lambda value, s: Outcome(),
    **{reader.__name__: reader for reader in (*_NAMED, trl_sources, mixture, mixer, axolotl_sources)},
    "llamafactory_sources": llamafactory_sources,
    "evaluations": functools.partial(interval, "eval_strategy", "eval_steps", "no"),
    "checkpoints": functools.partial(interval, "save_strategy", "save_steps", "steps"),
    "epochs": lambda value, s: 1000 if s.get("max_steps", 0) > 0 else math.ceil(value),
    "warmup_steps": lambda value, s: (
        Outcome(unneeded="warmup_ratio decides") if not value and s.get("warmup_ratio")
        else Outcome(values={"optim.warmup_ratio": value} if 0 < value < 1 else {"": int(value)})
    ),
    "betas": lambda value, s: [s.get("adam_beta1", 0.9), s.get("adam_beta2", 0.999)],
    "autocast": lambda value, s: (
        value if value == "auto" else "bfloat16" if value or s.get("fp16") else "none"
    ),
    "precision": lambda value, s: Outcome(values={
        "model.dtype" if value and s.get("adapter") and not s.get("fp16") else "model.autocast":
            "bfloat16" if value or s.get("fp16") else "none"
    }),
    "logging_steps": lambda value, s: int(value) or Outcome(absent="a part of all steps"),
    "trackers": lambda value, s: [name for name in _listed(value) if name != "none"],
    "axolotl_trackers": lambda value, s: list({name: 1 for key, name in _TRACKERS.items() if s.get(key)}),
    "load_best": lambda value, s: Outcome(values={"checkpoint.load_best": True, "checkpoint.keep_best": 1}),
    "metric": lambda value, s: value.removeprefix("eval_"),
    "patience": lambda value, s: {"patience": value},
    "hub": lambda value, s: (
        {"repo": s["hub_model_id"], "private": s.get("hub_private_repo", False)}
        if "/" in str(s.get("hub_model_id")) else Outcome(absent="set export.push_to_hub: {repo: owner/name}")
    ),
    "fraction": lambda value, s: {"fraction": value} if value < 1 else Outcome(absent="it is no part of 1"),
    "last_word": lambda value, s: str(value).rsplit(".", 1)[-1].lower(),
    "dpo_only": lambda value, s: value if s["rl"] == "dpo" else Outcome(unneeded="only dpo reads it"),
    "sync": lambda value, s: {"every_steps": s["ref_model_sync_steps"], "mixup": s["ref_model_mixup_alpha"]},
    "cutoff": lambda value, s: Outcome(values={"": value, "data.truncation": "completion_right"}),
}  # fmt: skip
