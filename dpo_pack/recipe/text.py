"""Reads and writes the YAML 1.2 of recipes, and applies the `key=value` overrides of the command line."""

import itertools
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import yaml

from dpo_pack.system.errors import RecipeError

Tree = dict[str, Any]  # a recipe or a part of a recipe, as read from YAML
MAX_VALUES = 1 << 16  # in one YAML text


def fail(message: str, problems: Sequence[str] = ()) -> NoReturn:
    """Raises RecipeError with the message on one line; escapes characters that cannot be printed."""
    error = RecipeError(_printable(message))
    error.problems = [_printable(problem) for problem in problems]
    raise error from None


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def show(value: object) -> str:
    """Returns a value for an error message: shortened, and null, true and false as in YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def read_yaml(text: str, *, where: str) -> Any:
    """Returns the value of a YAML text. Raises RecipeError that begins with `where` and its line."""
    try:
        node = yaml.compose(text, Loader=_RecipeLoader)
        return None if node is None else _value_of(node, itertools.count(1))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        fail(f"{where}{place}: invalid YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        fail(f"{where}, line {line}: invalid YAML: a character that is not allowed")
    except RecursionError:
        fail(f"{where}: invalid YAML: nested too deeply")


def _value_of(node: yaml.Node, count: Iterator[int]) -> Any:
    """Returns the value of a node. `count` counts values, also those that an alias (*name) repeats."""
    if next(count) > MAX_VALUES:
        _fail_at(node, f"more than {MAX_VALUES:,} values, with those that aliases (*name) repeat")
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return [_value_of(item, count) for item in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        mapping: Tree = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = _value_of(key_node, count)
            if not isinstance(key, str):
                _fail_at(key_node, "a key must be text")
            if key in mapping:
                _fail_at(key_node, f"key '{key}' is given twice, first on line {first_lines[key]}")
            mapping[key] = _value_of(value_node, count)
            first_lines[key] = key_node.start_mark.line + 1
        return mapping
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
        _fail_at(node, f"tag {node.tag} is not supported")
    try:
        return _SCALARS[node.tag][1](node.value)
    except (KeyError, ValueError):
        _fail_at(node, f"cannot be read as {node.tag.rsplit(':', 1)[-1]}")


def _fail_at(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_BOOLS = {"true": True, "false": False}
_TAG = "tag:yaml.org,2002:"
# The types of unquoted values in YAML 1.2: tag -> (pattern, reader). PyYAML follows YAML 1.1, which reads
# 5e-7 as text, 010 as 8, 1:30 as 90 and no as false.
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    f"{_TAG}null": ("~|null|Null|NULL|", lambda text: None),
    f"{_TAG}bool": ("true|True|TRUE|false|False|FALSE", lambda text: _BOOLS[text.lower()]),
    f"{_TAG}int": ("[-+]?[0-9]+", int),
    f"{_TAG}float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(re.sub(r"\.(?=[a-zA-Z])", "", text)),
    ),
    f"{_TAG}str": ("(?!)", str),  # all other text
}  # fmt: skip


class _RecipeLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}


class _RecipeDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or YAML 1.2 would read as another type."""


for _tag, (_pattern, _) in _SCALARS.items():
    for _reader_or_writer in (_RecipeLoader, _RecipeDumper):
        _reader_or_writer.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)


def to_yaml(value: object, *, one_line: bool = False) -> str:
    """Returns a value as YAML. YAML 1.1 and YAML 1.2 read the same value from it."""
    options: Any = {"sort_keys": False, "allow_unicode": True, "width": 10**6, "default_flow_style": one_line}
    text: str = yaml.dump(value, Dumper=_RecipeDumper, **options)
    return text.removesuffix("...\n").strip() if one_line else text


def apply_override(tree: Tree, override: str) -> Tree:
    """Returns a copy of the tree in which `dotted.key=YAML value` is set. Raises RecipeError."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        fail(f"override '{override}': write it as key=value, for instance optim.lr=1e-6")
    changed: Tree = put(tree, parts, read_yaml(text, where=f"override '{override}'"))
    return changed


def put(old: Any, parts: list[str], value: Any, where: str = "") -> Any:
    """Returns a copy of `old`, the value at key `where`, in which the key `parts` below it is `value`. A list
    of one mapping needs no number. Raises RecipeError if a value on the way has no keys."""
    if not parts:
        return value
    part, *rest = parts
    if old is None or isinstance(old, dict):
        below = put((old or {}).get(part), rest, value, f"{where}.{part}".removeprefix("."))
        return {**(old or {}), part: below}
    if not isinstance(old, list):
        fail(f"{where}.{'.'.join(parts)}: {where} is {show(old)} and has no keys of its own")
    if len(old) == 1 and isinstance(old[0], dict) and not part.isdecimal():
        part, rest = "0", parts
    if not part.isdecimal() or int(part) >= len(old):
        key = f".{part}" if old and isinstance(old[0], dict) and not part.isdecimal() else ""
        remedy = f"the first is {where}.0{key}" if old else f"set the whole list, {where}"
        fail(f"{where}.{part}: {where} is a list of {len(old)}; {remedy}")
    index = int(part)
    return [*old[:index], put(old[index], rest, value, f"{where}.{part}"), *old[index + 1 :]]
