"""Reads and writes the YAML of recipes, and applies the `key=value` overrides of the command line.

Values without quotes have the types of YAML 1.2. A key must be text, and a mapping may have each key once.
Errors in YAML name the line, and the column if it is known.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import yaml

from dpo_pack.recipe.errors import Tree, fail, show

MAX_VALUES = 1 << 16  # in one YAML text


def read_yaml(text: str, *, where: str) -> Any:
    """Returns the value of a YAML text.

    Raises RecipeError if the text is invalid; the message begins with `where` and the position in the text.
    """
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
        return _mapping_of(node, count)
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
        _fail_at(node, f"tag {node.tag} is not supported")
    try:
        _, read = _SCALARS[node.tag]
        return read(node.value)
    except (KeyError, ValueError):
        _fail_at(node, f"cannot be read as {node.tag.rsplit(':', 1)[-1]}")


def _mapping_of(node: yaml.MappingNode, count: Iterator[int]) -> Tree:
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


def _fail_at(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_TRUTH_VALUES = {"true": True, "false": False}
_TAG = "tag:yaml.org,2002:"
# The types of unquoted values in YAML 1.2: tag -> (pattern, reader). PyYAML follows YAML 1.1, which reads
# 5e-7 as text, 010 as 8, 1:30 as 90 and no as false.
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    f"{_TAG}null": ("~|null|Null|NULL|", lambda text: None),
    f"{_TAG}bool": ("true|True|TRUE|false|False|FALSE", lambda text: _TRUTH_VALUES[text.lower()]),
    f"{_TAG}int": ("[-+]?[0-9]+", int),
    f"{_TAG}float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(re.sub(r"\.(?=[a-zA-Z])", "", text)),
    ),
    f"{_TAG}str": ("(?!)", str),  # all other text
}


class _RecipeLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}


class _RecipeDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or YAML 1.2 would read as another type."""


class _OneLineDumper(_RecipeDumper):
    """Writes the line breaks of text as \\n."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if "\n" in text else None)


_OneLineDumper.add_representer(str, _represent_text)

for _tag, (_pattern, _) in _SCALARS.items():
    for _reader_or_writer in (_RecipeLoader, _RecipeDumper):
        _reader_or_writer.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)


def to_yaml(value: object, *, one_line: bool = False) -> str:
    """Returns a value as YAML. YAML 1.1 and YAML 1.2 read the same value from it."""
    text = yaml.dump(
        value,
        Dumper=_OneLineDumper if one_line else _RecipeDumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
        default_flow_style=one_line,
    )
    return text.removesuffix("...\n").strip() if one_line else text


def apply_override(tree: Tree, override: str) -> Tree:
    """Returns a copy of the tree in which `dotted.key=YAML value` is set. Raises RecipeError."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        fail(f"override '{override}': write it as key=value, for instance optim.lr=1e-6")
    value = read_yaml(text, where=f"override '{override}'")
    changed: Tree = dict(tree)
    container: Any = changed
    for depth, part in enumerate(parts[:-1], start=1):
        container = _only_item(container, part)
        position = _position(container, part, parts[: depth - 1])
        child = container[position] if isinstance(container, list) else container.get(position)
        if not isinstance(child, (dict, list)) and child is not None:
            fail(f"{key.strip()}: {'.'.join(parts[:depth])} is {show(child)} and has no keys of its own")
        # Copied, because the given tree must not change, and a mapping may be the value of several keys.
        container[position] = list(child) if isinstance(child, list) else dict(child or {})
        container = container[position]
    container = _only_item(container, parts[-1])
    container[_position(container, parts[-1], parts[:-1])] = value
    return changed


def _only_item(container: Tree | list[Any], part: str) -> Tree | list[Any]:
    """Returns the item that has key `part` if the container is a list of one mapping: data.train.path is
    data.train.0.path, because a file may give one source without a list. Else returns the container."""
    match container:
        case [dict() as item] if not part.isdecimal():
            copied = container[0] = dict(item)
            return copied
    return container


def _position(container: Tree | list[Any], part: str, parents: Sequence[str]) -> Any:
    """Returns a part of a dotted key: as an index if the container is a list, else unchanged."""
    if isinstance(container, dict):
        return part
    if not part.isdecimal() or int(part) >= len(container):
        where = ".".join(parents)
        key = f".{part}" if container and isinstance(container[0], dict) and not part.isdecimal() else ""
        remedy = f"the first is {where}.0{key}" if container else f"set the whole list, {where}"
        fail(f"{where}.{part}: {where} is a list of {len(container)}; {remedy}")
    return int(part)
