"""Translates settings of TRL, axolotl or LLaMA-Factory into a recipe with a comment on each of their keys."""

import json
import re
import shlex
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpo_pack.recipe.load import parse_recipe, recipe_fields
from dpo_pack.recipe.online import field_with_secret
from dpo_pack.recipe.peers import peer_tables as tables
from dpo_pack.recipe.peers.peer_tables import Outcome
from dpo_pack.recipe.schema import UNSHARED
from dpo_pack.recipe.text import Tree, put, read_yaml, to_yaml
from dpo_pack.recipe.types import allowed_values
from dpo_pack.system.errors import RecipeError

_PLACEHOLDERS = {"model.path": "FILL-IN/model", "data.train": "FILL-IN.jsonl"}
_HEADING = """\
# A recipe for the same training as with {name}. Its defaults are those of {release}.
# Before you train: `dpopack recipe --check` it, and look at pairs with `dpopack show`. If dpo-pack does not
# find the columns, name them in data.train.N.columns. docs/from-peers.md says what differs in every recipe.
"""
_WIDTH = 110
NO_COUNTERPART = "# No counterpart here:"  # above the settings that the recipe does not have


def recipe_from(peer: str, mapping: Mapping[str, Any]) -> str:
    """Returns a recipe (YAML) for settings of trl, axolotl or llamafactory, such as `DPOConfig.to_dict()`,
    with comments on each key. Raises RecipeError for training that dpo-pack does not have."""
    plain = json.loads(json.dumps(dict(mapping), default=str))  # enums, paths and torch's types as text
    return _Draft(peer).translate(plain, Path())


def translate(peer: str, path: Path) -> str:
    """Returns a recipe for a peer's file: YAML, JSON, or a command line of TRL. See `recipe_from`."""
    draft = _Draft(peer)
    try:
        if path.suffix in (".py", ".ipynb"):
            call = f"dpo_pack.recipe_from('{draft.peer}', config.to_dict())"
            raise RecipeError(f"scripts are not read; in the script, {call} returns the recipe")
        is_mapping = draft.peer != "trl" or path.suffix in (".yaml", ".yml", ".json")
        settings = _read_mapping(path) if is_mapping else _read_command_line(path)
        return draft.translate(settings, path.parent)
    except OSError as error:
        raise RecipeError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    except RecipeError as error:
        named = str(error).startswith((f"{path}: ", f"{path}, line "))
        raise RecipeError(str(error) if named else f"{path}: {error}") from None


def _read_mapping(path: Path) -> dict[str, Any]:
    tree = read_yaml(path.read_text(encoding="utf-8-sig"), where=str(path))
    if not isinstance(tree, dict):
        raise RecipeError("no mapping of 'key: value' lines")
    return tree


def _read_command_line(path: Path) -> dict[str, Any]:
    """Reads the first command of a text file: `trl dpo --key value ...`, or a launcher with a dpo.py."""
    lines = path.read_text(encoding="utf-8-sig").replace("\\\n", " ").splitlines()
    commands = [line for line in lines if re.search(r"\bdpo", line.split(" #")[0]) and "--" in line]
    if not commands:
        raise RecipeError("no command line of `trl dpo` or of a dpo.py; the name of a config ends in .yaml")
    options: dict[str, list[str]] = {}
    words = shlex.split(commands[0], comments=True)
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        is_program = word.endswith(".py") or "-m" in (before, word)
        if is_program or ("trl", "dpo") in ((before, word), (word, after)):
            continue  # it may follow an option of its launcher
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            options[name] = [value] if equals else []
        elif options:
            options[name].append(word)
    settings: dict[str, Any] = {"commands after the first": len(commands) - 1} if len(commands) > 1 else {}
    for config in options.pop("config", ()):
        settings |= _read_mapping(path.parent / config if (path.parent / config).is_file() else Path(config))
    for name, words in options.items():
        values = [read_yaml(word, where=f"--{name}") for word in words]
        if values:
            settings[name] = values[0] if len(values) == 1 else values
        else:
            settings[name.removeprefix("no_")] = not name.startswith("no_")
    if visible := re.search(r"CUDA_VISIBLE_DEVICES=([\d,]+)", commands[0]):
        settings = {"num_processes": len(visible[1].split(",")), **settings}
    return settings


class _Draft:
    """A recipe's values and comments, by recipe key, and what to say of keys that set no value."""

    def __init__(self, peer: str) -> None:
        self.peer = peer.lower().replace("-", "")
        if self.peer not in tables.PEERS:
            raise RecipeError(f"--from {peer}: dpo-pack translates files of {', '.join(tables.PEERS)}")
        self.table = tables.read_table(self.peer)
        self.values: dict[str, Any] = {"data.scored_turns": "all"}
        self.comments: defaultdict[str, list[str]] = defaultdict(list)
        self.comments["data.scored_turns"] = [f"{self.table['name']} too scores every token after the prompt"]
        if self.peer == "trl":
            self.values["data.continue_final_message"] = True
            self.comments["data.continue_final_message"] = ["TRL does so if prompts end with an answer"]
        self.unneeded: defaultdict[str, list[str]] = defaultdict(list)  # by the reason
        self.absent: defaultdict[str, list[str]] = defaultdict(list)  # by what differs
        self.unread: list[str] = []  # errors of values that no reader takes

    def translate(self, given: dict[str, Any], folder: Path) -> str:
        """Returns the recipe as YAML with comments. `folder`: where relative paths in `given` start."""
        for outer, prefix in (("model_init_kwargs", ""), ("trl", "trl.")):
            if isinstance(inner := given.get(outer), dict):
                given = {name: value for name, value in given.items() if name != outer}
                given |= {f"{prefix}{name}": value for name, value in inner.items()}
        for name, values in self.table.get("trains", {}).items():
            if given.get(name) not in values:
                raise RecipeError(f"{name}: {given.get(name)}: dpo-pack reads {name}: {' or '.join(values)}")
        defaults = self.table["defaults"]
        rows = {name: tables.find_row(self.peer, name) for name in (*defaults, *given)}
        is_set = {name: value is not None or "null" in rows[name].values for name, value in given.items()}
        named = {rows[name].name: value for name, value in given.items() if is_set[name]}
        settings = {rows[name].name: value for name, value in defaults.items()} | named
        settings[tables.FOLDER] = folder
        for name, value in defaults.items():
            if rows[name].name not in named:
                self._apply(name, value, settings, f"{self.table['name']}'s default ")
        for name in filter(is_set.get, given):
            self._apply(name, given[name], settings, "")
        self.unneeded["without a value"] = [name for name in given if not is_set[name]]
        for key, placeholder in _PLACEHOLDERS.items():
            if not self.values.get(key):
                self.values[key] = placeholder
                self.comments[key].append("fill this in: the settings do not give it")
        while self._drops_a_mistake():
            pass
        if self.unread:
            raise RecipeError("; ".join(self.unread))
        if (self.values.get("model.lora") or {}).get("dropout"):
            self.comments["model.lora"].append(UNSHARED)
        return self._written()

    def _apply(self, name: str, theirs: Any, settings: tables.Settings, whose: str) -> None:
        """Sets the recipe values that a peer's key gives. `whose`: "" for a key that the settings have."""
        is_secret = isinstance(theirs, str | dict | list) and field_with_secret({name: theirs})
        shown = textwrap.shorten(f"{name}: {'...' if is_secret else to_yaml(theirs, one_line=True)}", 99)
        row, is_off = tables.find_row(self.peer, name), theirs in (False, -1, "", "no", "none", [], {})
        try:
            if row.kind in ("not needed", "no counterpart"):
                is_needed = row.kind == "no counterpart" and not is_off
                outcome = Outcome(absent=row.remark) if is_needed else Outcome(unneeded=row.remark)
            elif is_off and row.kind == "keys if on":
                outcome = Outcome(unneeded="it is off")
            else:
                ours = row.values.get(tables.as_word(theirs), theirs)
                ours = tables.READERS[row.reader](theirs, settings) if row.reader else ours
                outcome = ours if isinstance(ours, Outcome) else Outcome(values={"": ours})
        except RecipeError as error:
            raise RecipeError(f"{shown}: {error}") from None
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError):
            outcome = Outcome()
            if not whose:
                field = recipe_fields()[row.ours[0]]
                allowed = allowed_values(field.annotation, field.metadata)
                self.unread.append(f"{shown}: cannot be read; {row.ours[0]} must be {allowed}")
        remark = f" ({outcome.remark or row.remark})" if outcome.remark or row.remark else ""
        if not whose:
            self.unneeded[outcome.unneeded].append(shown)
            self.absent[outcome.absent].append(shown)
            if outcome == Outcome():
                self.comments[row.ours[0]].append(f"{shown}{remark}")
        for key, ours in outcome.values.items():
            key = key or row.ours[0]
            self.values[key] = ours
            self.comments[key].append(f"{whose}{name if ours == theirs else shown}{remark}")

    def _drops_a_mistake(self) -> bool:
        """Moves the first value that a recipe may not have to `absent`. Returns False if there is none."""
        tree: Tree = {}
        try:
            for key, value in self.values.items():
                tree = put(tree, key.split("."), value)
            parse_recipe(tree)
            return False
        except RecipeError as error:
            message = (error.problems or [str(error)])[0]
            broken = message.partition(": ")[0]
            key = next((key for key in self.values if f"{broken}.".startswith(f"{key}.")), "loss.type")
            if key in ("loss.type", *_PLACEHOLDERS):
                raise
        if re.search(r": must be (?!one of).*, not ['\"\[{]", message):  # no value of the peer's either
            raise RecipeError(f"{'; '.join(self.comments[key])}: {message}")
        value, part = self.values[key], broken.removeprefix(f"{key}.")
        self.absent[message] = self.comments[key]
        if isinstance(value, dict) and part in value:
            del value[part]
        else:
            del self.values[key], self.comments[key]
        return True

    def _written(self) -> str:
        lines, section = [""], ""
        for key in filter(self.values.__contains__, recipe_fields()):
            first, *name = key.split(".", 1)
            lines += ["", f"{first}:"] if name and first != section else []
            section, indent = first, "  " if name else ""
            entry = to_yaml({key.rpartition(".")[2]: self.values[key]})
            line, *more = textwrap.indent(entry, indent).splitlines()
            comment = "; ".join(self.comments[key])
            beside = f"{line:<42}  # {comment}"
            above = textwrap.TextWrapper(_WIDTH, f"{indent}# ", f"{indent}# ").wrap(comment)
            lines += [beside, *more] if len(beside) <= _WIDTH else [*above, line, *more]
        for key in [key for key in self.comments if key not in self.values]:
            self.unneeded[f"{key} is not set"] = self.comments[key]
        absent = _listing(NO_COUNTERPART, self.absent)
        unneeded = _listing("# Not needed here:", self.unneeded)
        return _HEADING.format_map(self.table) + "\n".join([*absent, *lines, "", *unneeded, ""])


def _listing(heading: str, found: dict[str, list[str]]) -> list[str]:
    wrap = textwrap.TextWrapper(_WIDTH, "# - ", "#   ").wrap
    texts = [f"{'; '.join(keys)} - {why}" for why, keys in found.items() if why and keys]
    return [heading, *(line for text in texts for line in wrap(text))] if texts else []
