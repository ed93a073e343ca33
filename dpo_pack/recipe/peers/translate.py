"""Writes a recipe from a file of TRL, axolotl or LLaMA-Factory, with a comment on each of the file's keys."""

import re
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dpo_pack.recipe.errors import all_keys, show
from dpo_pack.recipe.load import default_in_yaml, parse_recipe
from dpo_pack.recipe.peers import NAMES, RELEASES, TABLES, find_rule
from dpo_pack.recipe.peers.files import PeerFile, read_peer_file
from dpo_pack.recipe.peers.rules import Absent, Known, Rule, Table, Unneeded
from dpo_pack.recipe.schema import Recipe
from dpo_pack.recipe.text import to_yaml
from dpo_pack.system.errors import RecipeError

_TRAINER: dict[str, Any] = {  # transformers' TrainingArguments
    "output_dir": "trainer_output", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_train_epochs": 3, "lr_scheduler_type": "linear", "warmup_steps": 0, "seed": 42, "save_steps": 500,
    "logging_steps": 500, "optim": "adamw_torch_fused", "weight_decay": 0.0, "max_grad_norm": 1.0,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "trl": _TRAINER | {
        "learning_rate": 1e-6, "bf16": True, "gradient_checkpointing": True, "logging_steps": 10,
        "max_length": 1024, "truncation_mode": "keep_start", "loss_type": "sigmoid", "beta": 0.1,
    },
    "axolotl": {
        "output_dir": "./model-out", "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1,
        "lr_scheduler": "cosine", "warmup_ratio": 0.03, "seed": 42, "optimizer": "adamw_torch_fused",
        "sequence_len": 512, "bf16": "auto", "save_total_limit": 4,
    },
    "llamafactory": _TRAINER | {
        "learning_rate": 5e-5, "bf16": False, "disable_gradient_checkpointing": False,
        "finetuning_type": "lora", "lora_rank": 8, "pref_loss": "sigmoid", "pref_beta": 0.1,
        "cutoff_len": 2048,
    },
}  # fmt: skip
_OLD_NAMES = {"evaluation_strategy": "eval_strategy", "torch_dtype": "dtype"}  # of transformers
SEED = (
    "The same seed gives other random numbers here: the order of the pairs differs, and so do the pairs that "
    "a fraction holds out. To compare step by step, keep the order of the files in both programs (here "
    "data.shuffle: false)."
)
LOGGED = (
    "A logged line has the loss and rewards of one step here, and means over logging_steps steps there. "
    "A pair whose margin is 0 counts half in the accuracy here."
)
_PLACEHOLDERS = {"model.path": "FILL-IN/model", "data.train": "FILL-IN.jsonl"}
_WIDTH, _COMMENT_COLUMN = 118, 44


def translate(peer: str, path: Path) -> str:
    """Returns a recipe, with comments, for the training in a peer's file. Raises RecipeError if it cannot.

    `peer` is trl, axolotl or llamafactory.
    """
    if peer not in TABLES:
        raise RecipeError(f"--from {peer}: must be one of {', '.join(TABLES)}")
    file, table = read_peer_file(peer, path), TABLES[peer]
    if peer == "axolotl" and not file.values.get("rl"):
        raise RecipeError(f"{path}: no key rl, so it is no training on preference pairs")
    if peer == "llamafactory" and not file.values.get("stage"):
        raise RecipeError(f"{path}: no key stage: dpo, so it is no training on preference pairs")
    written = _Written(peer, file)
    try:
        written.read(table)
        written.make_valid()
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    return written.text(path)


class _Written:
    """Collects the recipe's values and comments by recipe key, and lists of keys that set no value."""

    def __init__(self, peer: str, file: PeerFile) -> None:
        self.peer, self.file = peer, file
        self.values: dict[str, Any] = {}
        self.comments: defaultdict[str, list[str]] = defaultdict(list)
        self.unneeded: list[str] = []
        self.empty: list[str] = []
        self.absent: list[str] = [f"{what} - {remedy}" for what, remedy in file.unread.items()]

    def read(self, table: Table) -> None:
        """Applies the rule of each key: first to defaults that the file omits, then to the file's keys."""
        for old, new in _OLD_NAMES.items():
            if old in self.file.values and new not in self.file.values:
                self.file.add(new, self.file.values.pop(old), self.file.labels.get(old, old))
        given = {
            name: value
            for name, value in self.file.values.items()
            if value is not None or ((rule := find_rule(table, name)) is not None and rule.takes_null)
        }
        defaults = {**DEFAULTS[self.peer], **self.file.defaults}
        if given.get("fp16"):
            defaults.pop("bf16", None)
        settings = {**defaults, **given}
        left_out = [name for name in defaults if name not in given and not name.startswith("#")]
        for name in (*left_out, *self.file.values):
            label = self.file.labels.get(name, name)
            if name not in settings:
                self.empty.append(label)
                continue
            self._apply(find_rule(table, name), name, label, settings, is_given=name in given)

    def _apply(
        self, rule: Rule | None, name: str, label: str, settings: dict[str, Any], *, is_given: bool
    ) -> None:
        shown = f"{label}: {_short(settings[name])}"
        if rule is None:
            self.absent.append(f"{shown} - not a key of {NAMES[self.peer]} that dpo-pack knows")
            return
        try:
            outcome = rule.convert(settings[name], settings)
        except (TypeError, ValueError, AttributeError, KeyError):
            outcome = Absent("a value of another kind than expected; set it by hand")
        match outcome:
            case Known() if outcome.values or is_given:
                self._set(outcome, rule, label, settings[name], is_given=is_given)
            case Unneeded(why=why) if is_given:
                self.unneeded.append(f"{shown} - {why}")
            case Absent(what=what) if is_given or name in self.file.defaults:
                self.absent.append(f"{shown if is_given else f'{label}, not given'} - {what}")

    def _set(self, outcome: Known, rule: Rule, label: str, theirs: Any, *, is_given: bool) -> None:
        """Stores the recipe values that a peer's key gives, and a comment that names this key."""
        values = outcome.values
        self.values |= values
        self.absent += outcome.absent
        for key in values or rule.keys[:1]:
            is_first = key in (*list(values)[:1], *rule.keys[:1])
            is_same = bool(values) and (values[key] == theirs or key != next(iter(values)))
            comment = label if is_same else f"{label}: {_short(theirs)}"
            comment = comment if is_given else f"{NAMES[self.peer]}'s default {comment}"
            remark = f" ({outcome.remark})" if outcome.remark and is_first else ""
            self.comments[key].append(f"{comment}{remark}")

    def make_valid(self) -> None:
        """Fills in missing values; removes each invalid value and adds it with the error to `self.absent`."""
        self.values["data.scored_turns"] = "all"
        why = f"{NAMES[self.peer]} too scores every token after the prompt"
        self.comments["data.scored_turns"].append(why)
        for key, value in _PLACEHOLDERS.items():
            if not self.values.get(key):
                self.values[key] = value
                self.comments[key].append("fill this in: the file does not give it")
        for _ in range(2 * len(self.values)):
            try:
                parse_recipe(_tree(self.values))
                return
            except RecipeError as error:
                self._take_out(error)

    def _take_out(self, error: RecipeError) -> None:
        """Removes the key or part of a value that `error` names. Raises `error` if a run needs the key."""
        message = re.sub(r" \(and \d+ more: .*\)$", "", str(error))
        broken = message.partition(": ")[0]
        found = [name for name in self.values if f"{broken}.".startswith(f"{name}.")]
        if not found or found[0] in ("loss.type", *_PLACEHOLDERS):
            raise error
        theirs = "; ".join(self.comments[found[0]])
        self.absent.append(f"{theirs} - {message}")
        value, part = self.values[found[0]], broken.removeprefix(f"{found[0]}.")
        if isinstance(value, dict) and part in value:
            del value[part]
        else:
            del self.values[found[0]]

    def text(self, path: Path) -> str:
        """Returns the recipe as YAML text with comments."""
        name = NAMES[self.peer]
        lines = [
            f"# A recipe that trains what {path.name} trains with {name}, made by",
            f"#     dpopack recipe --from {self.peer} {path.name}",
            f"# The defaults named below are those of {RELEASES[self.peer]}.",
            f"# AdamW has {name}'s betas, eps, weight decay and clipping where they are not named.",
            "# Before you train: `dpopack recipe --check` it, and look at pairs with `dpopack show`.",
        ]
        sources = enumerate(self.values["data.train"] if isinstance(self.values["data.train"], list) else ())
        if unnamed := [f"data.train.{n}.columns" for n, source in sources if not source.get("columns")]:
            lines.append(
                f"# Columns that dpo-pack does not find by itself: name them in {', '.join(unnamed)}."
            )
        if placeholders := [key for key in _PLACEHOLDERS if self.values[key] == _PLACEHOLDERS[key]]:
            lines += [f"# Fill in: {', '.join(placeholders)}."]
        if self.values.get("checkpoint.every_steps") and "checkpoint.keep" not in self.values:
            self.absent.append(
                f"{name} keeps every checkpoint, dpo-pack the newest two; checkpoint.keep is their number."
            )
        lines += [
            "#",
            "# Keys that have no counterpart here, and other differences:",
            *_items([*self.absent, *([SEED] if self.values.get("data.shuffle", True) else []), LOGGED]),
            "",
        ]
        order = list(all_keys(Recipe))
        for section in Recipe.model_fields:
            keys = [key for key in self.values if key == section or key.startswith(f"{section}.")]
            keys = [key for key in keys if self._is_written(key)]
            if keys == [section]:
                lines += self._entry(section, "")
            elif keys:
                lines += ["", f"{section}:"]
                for key in sorted(keys, key=order.index):
                    lines += self._entry(key, "  ")
        for key in (key for key in self.comments if key not in self.values):
            self.unneeded += [f"{comment} - {key} is not set" for comment in self.comments[key]]
        if self.empty:
            self.unneeded.append(f"without a value in the file: {', '.join(self.empty)}")
        if self.unneeded:
            lines += ["", "# Not needed here:", *_items(self.unneeded)]
        return "\n".join([*lines, ""])

    def _is_written(self, key: str) -> bool:
        """Returns False for a default of both the peer and dpo-pack, which the recipe omits."""
        both = all(comment.startswith(f"{NAMES[self.peer]}'s default") for comment in self.comments[key])
        section, _, name = key.partition(".")
        field = Recipe.model_fields[section]
        if name and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            field = field.annotation.model_fields[name]
        if not both or field.is_required():
            return True
        return default_in_yaml(field) != to_yaml(self.values[key], one_line=True)

    def _entry(self, key: str, indent: str) -> list[str]:
        """Returns the lines of a key. Its comment is on the key's line or, if too long, above it."""
        value, comment = self.values[key], "; ".join(self.comments[key])
        head = f"{indent}{key.rpartition('.')[2]}:"
        if isinstance(value, list) and value and isinstance(value[0], dict) or isinstance(value, dict):
            nested = textwrap.indent(to_yaml(value).rstrip(), f"{indent}  ").splitlines()
        else:
            head, nested = f"{head} {to_yaml(value, one_line=True)}", []
        beside = f"{head.ljust(_COMMENT_COLUMN)}  # {comment}"
        if len(beside) <= _WIDTH:
            return [beside, *nested]
        above = textwrap.wrap(comment, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        return [*above, head, *nested]


def _items(texts: list[str]) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, _WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False
        )
    ]


def _short(value: Any) -> str:
    """Returns a value of the peer's file as one line."""
    return (
        show(value)
        if isinstance(value, (dict, list)) and len(str(value)) > 80
        else to_yaml(value, one_line=True)
    )


def _tree(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return tree
