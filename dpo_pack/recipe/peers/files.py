"""Reads settings files of TRL, axolotl and LLaMA-Factory: YAML, JSON, command lines, scripts (never run)."""

import ast
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpo_pack.recipe.text import read_yaml
from dpo_pack.system.errors import RecipeError


@dataclass(slots=True)
class PeerFile:
    """The settings that a file of TRL, axolotl or LLaMA-Factory gives."""

    values: dict[str, Any] = field(default_factory=dict)  # value by the peer's name of the key
    labels: dict[str, str] = field(default_factory=dict)  # key -> its spelling in the file, where they differ
    unread: dict[str, str] = field(default_factory=dict)  # what cannot be read -> what the user does
    defaults: dict[str, Any] = field(default_factory=dict)  # values of keys that the file omits

    def add(self, name: str, value: Any, label: str = "") -> None:
        """Adds a key and its value."""
        self.values[name] = value
        if label:
            self.labels[name] = label


def read_peer_file(peer: str, path: Path) -> PeerFile:
    """Returns the settings in a file of `peer`. Raises RecipeError if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    if path.suffix in (".py", ".ipynb"):
        if peer != "trl":
            raise RecipeError(f"{path}: {peer} has no Python scripts to translate; give its YAML file")
        return _read_script(_code_of_notebook(text, path) if path.suffix == ".ipynb" else text, path)
    if path.suffix in (".yaml", ".yml", ".json"):
        file = PeerFile(values=_flat(_mapping(text, path)))
    elif peer == "trl":
        file = _read_command_line(text, path)
    else:
        raise RecipeError(f"{path}: a file of {peer} ends in .yaml or .yml")
    if peer == "trl":
        file.defaults = {"dataset_train_split": "train", "dataset_test_split": "test"}
    if peer == "llamafactory":
        _add_dataset_info(file, path)
    return file


def _mapping(text: str, path: Path) -> dict[str, Any]:
    tree = read_yaml(text, where=str(path))
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: no mapping of 'key: value' lines")
    return tree


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Moves the keys inside `model_init_kwargs` and `trl` to the top level, where rules look for them."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if name == "model_init_kwargs" and isinstance(value, dict):
            flat |= {"model_revision" if key == "revision" else key: each for key, each in value.items()}
        elif name == "trl" and isinstance(value, dict):  # axolotl
            flat |= {f"trl.{key}" if key == "beta" else key: each for key, each in value.items()}
        else:
            flat[name] = value
    return flat


def _add_dataset_info(file: PeerFile, path: Path) -> None:
    """Adds the content and the directory of dataset_info.json to file.defaults as `#info` and `#info_dir`."""
    given = Path(str(file.values.get("dataset_dir") or "data"))
    places = [given, path.parent / given, path.parent]
    found = next((place for place in places if (place / "dataset_info.json").is_file()), None)
    if found is None:
        raise RecipeError(
            f"{path}: dataset_info.json is not in {', '.join(map(str, places))}; "
            "it describes the data sets, so copy it there"
        )
    try:
        info = json.loads((found / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{found / 'dataset_info.json'}: cannot be read: {error}") from None
    file.defaults |= {"#info": info, "#info_dir": str(found)}


# ---------------------------------------------------------------------------------------------- command lines

_LAUNCHER_WORDS = {"nproc_per_node": "num_processes", "nproc-per-node": "num_processes"}


def _read_command_line(text: str, path: Path) -> PeerFile:
    """Reads the first command of a text file: `trl dpo --key value ...`, or a launcher with a dpo.py."""
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if re.search(r"\bdpo", line.split(" #")[0]) and "--" in line]
    if not commands:
        raise RecipeError(
            f"{path}: no command line of `trl dpo` or of a dpo.py; a script ends in .py, a config in .yaml"
        )
    try:
        words = shlex.split(commands[0], comments=True)
    except ValueError as error:
        raise RecipeError(f"{path}: cannot be read as a command line: {error}") from None
    file, config = PeerFile(), {}
    for name, given in _options(words):
        value = _value_of(given, path)
        if name == "config":
            beside = [place for place in (Path(value), path.parent / value) if place.is_file()]
            if not beside:
                raise RecipeError(f"{path}: --config {value}: no such file")
            config = _flat(_mapping(beside[0].read_text(encoding="utf-8-sig"), beside[0]))
        elif name.startswith("no_") and value is True:
            file.add(name.removeprefix("no_"), False, f"--{name}")
        else:
            file.add(_LAUNCHER_WORDS.get(name, name), value)
    visible = re.search(r"CUDA_VISIBLE_DEVICES=([\d,]+)", commands[0])
    if visible and "num_processes" not in file.values:
        file.add("num_processes", len(visible[1].split(",")), "CUDA_VISIBLE_DEVICES")
    file.values = {**config, **file.values}
    if len(commands) > 1:
        file.unread["other commands"] = "only the first command of the file is translated"
    return file


def _options(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns each option of a command line with the words between it and the next option."""
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            options.append((name, [value] if equals else []))
        elif options and not word.endswith(".py"):
            options[-1][1].append(word)
    return options


def _value_of(words: list[str], path: Path) -> Any:
    values = [read_yaml(word, where=str(path)) for word in words]
    return True if not values else values[0] if len(values) == 1 else values


# ---------------------------------------------------------------------------------------------------- scripts

# Defaults of peft's LoraConfig that differ from those of TRL's ModelConfig.
_LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
_BY_HAND = "only running the script gives the value; set it by hand"
_CHANGED = (
    "the script changes the rows: write the changed rows to a .jsonl file and name it in data.train, or stay "
    "in Python: dpo_pack.train('recipe.yaml', **{'data.train': dataset}) takes a datasets.Dataset"
)


class _Unreadable(Exception):
    """Raised for a value that is unknown until the script runs."""


def _code_of_notebook(text: str, path: Path) -> str:
    """Returns the code of all cells, without lines that only a notebook understands (%magic, !command)."""
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    except (ValueError, KeyError, TypeError):
        raise RecipeError(f"{path}: cannot be read as a notebook; save its cells as a .py file") from None
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def _read_script(text: str, path: Path) -> PeerFile:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise RecipeError(f"{path}, line {error.lineno}: not valid Python: {error.msg}") from None
    script = _Script(tree)
    if not script.calls("DPOTrainer"):
        raise RecipeError(f"{path}: no call of DPOTrainer")
    if script.calls("TrlParser", "HfArgumentParser"):
        raise RecipeError(
            f"{path}: the script takes its settings from a command line or YAML; give a file of these"
        )
    return script.read()


class _Script:
    """Reads settings from the calls and assignments in a script's syntax tree."""

    def __init__(self, tree: ast.Module) -> None:
        self.file = PeerFile()
        self._nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
        self._assigned: dict[str, list[tuple[int, ast.expr]]] = {}
        for node in sorted(self._nodes, key=lambda node: node.lineno):
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                self._assigned.setdefault(node.targets[0].id, []).append((node.lineno, node.value))

    def calls(self, *names: str) -> list[ast.Call]:
        return [node for node in self._nodes if isinstance(node, ast.Call) and _name(node.func) in names]

    def read(self) -> PeerFile:
        for call in self.calls("DPOConfig", "TrainingArguments"):
            self._read_keywords(call, {"model_init_kwargs": self._read_model_options})
        special: dict[str, Callable[[ast.expr], None]] = {
            "model": lambda node: self._read_model(node, "model_name_or_path"),
            "ref_model": lambda node: self._read_model(node, "ref_model"),
            "train_dataset": lambda node: self._read_data(node, is_train=True),
            "eval_dataset": lambda node: self._read_data(node, is_train=False),
            "peft_config": self._read_lora,
            **dict.fromkeys(("args", "processing_class", "tokenizer"), lambda node: None),
        }
        (trainer, *others) = self.calls("DPOTrainer")
        if trainer.args:
            special["model"](trainer.args[0])
        self._read_keywords(trainer, special)
        if others:
            self.file.unread["other DPOTrainer calls"] = "only the first one is translated"
        return self.file

    def _read_keywords(self, call: ast.Call, special: dict[str, Callable[[ast.expr], None]]) -> None:
        for keyword in call.keywords:
            name = keyword.arg or "**"
            if name in special:
                special[name](keyword.value)
            else:
                self._add(name, keyword.value)

    def _add(self, name: str, node: ast.expr, label: str = "") -> None:
        try:
            self.file.add(name, self._value(node), label)
        except _Unreadable:
            self.file.unread[f"{label or name}: {ast.unparse(node)}"] = _BY_HAND

    def _value(self, node: ast.expr) -> Any:
        """Returns the value of an expression of constants and names. Raises _Unreadable for any other."""
        node = self._resolve(node)
        if isinstance(node, ast.Attribute):
            return node.attr  # torch.bfloat16, IntervalStrategy.STEPS
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            return dict(zip(keys, map(self._value, node.values), strict=True))
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            raise _Unreadable from None

    def _resolve(self, node: ast.expr) -> ast.expr:
        """Replaces a name by the expression that the last line before it assigned to it, if there is one."""
        found = node
        for _ in range(20):
            if not isinstance(found, ast.Name):
                break
            before = [value for line, value in self._assigned.get(found.id, ()) if line < found.lineno]
            if not before:
                return node
            found = before[-1]
        return found

    def _read_model(self, node: ast.expr, key: str) -> None:
        label = "model" if key == "model_name_or_path" else key
        node = self._resolve(node)
        if not isinstance(node, ast.Call) or _name(node.func) != "from_pretrained" or not node.args:
            self._add(key, node, label)
            return
        self._add(key, node.args[0], label)
        if key == "model_name_or_path":
            self.file.defaults["dtype"] = "auto"
            for keyword in node.keywords:
                self._read_model_option(keyword.arg or "**", keyword.value)

    def _read_model_options(self, node: ast.expr) -> None:
        options = self._resolve(node)
        if not isinstance(options, ast.Dict):
            self._add("model_init_kwargs", node)
            return
        for key, value in zip(options.keys, options.values, strict=True):
            self._read_model_option(str(key.value) if isinstance(key, ast.Constant) else "**", value)

    def _read_model_option(self, name: str, node: ast.expr) -> None:
        call = self._resolve(node)
        if name == "quantization_config" and isinstance(call, ast.Call):
            self._read_keywords(call, {})
        else:
            self._add({"revision": "model_revision", "torch_dtype": "dtype"}.get(name, name), node, name)

    def _read_lora(self, node: ast.expr) -> None:
        call = self._resolve(node)
        if not isinstance(call, ast.Call) or _name(call.func) != "LoraConfig":
            if not (isinstance(call, ast.Constant) and call.value is None):
                self.file.unread[f"peft_config: {ast.unparse(call)}"] = _BY_HAND
            return
        self.file.add("use_peft", True, "peft_config")
        self.file.defaults |= _LORA_DEFAULTS
        for keyword in call.keywords:
            name = keyword.arg or "**"
            canonical = name if name.startswith(("lora_", "use_")) else f"lora_{name}"
            self._add(canonical, keyword.value, f"LoraConfig({name})")

    def _read_data(self, node: ast.expr, *, is_train: bool) -> None:
        label = "train_dataset" if is_train else "eval_dataset"
        split, source = self._data_call(node, label)
        if source is None:
            if not (isinstance(node, ast.Constant) and node.value is None):
                self.file.unread[f"{label}: {ast.unparse(node)}"] = "name the data in data.train or data.eval"
            return
        names = {keyword.arg: keyword.value for keyword in source.keywords}
        split = split if split is not None else names.get("split")
        if not is_train:
            if split is not None:
                self._add("dataset_test_split", split, f"{label}, split")
            if source.args:
                self._add("eval_dataset_name", source.args[0], label)
            return
        for key, given in (
            ("dataset_name", source.args[0] if source.args else names.get("path")),
            ("dataset_config", source.args[1] if len(source.args) > 1 else names.get("name")),
            ("dataset_train_split", split),
            ("data_dir", names.get("data_dir")),
            ("data_files", names.get("data_files")),
        ):
            if given is not None:
                self._add(key, given, f"load_dataset, {key.removeprefix('dataset_')}")

    def _data_call(self, node: ast.expr, label: str) -> tuple[ast.expr | None, ast.Call | None]:
        """Returns the split and the `load_dataset` call that give `node`; None for what is not found."""
        split: ast.expr | None = None
        for _ in range(20):
            node = self._resolve(node)
            if isinstance(node, ast.Subscript):
                split, node = split or node.slice, node.value
            elif isinstance(node, ast.Call) and _name(node.func) == "load_dataset":
                return split, node
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                self.file.unread[f"{label}, .{node.func.attr}(...)"] = _CHANGED
                node = node.func.value
            else:
                break
        return split, None


def _name(node: ast.expr) -> str:
    """Returns a function's name without its module: f for `a.b.f`; "" if it has none."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
