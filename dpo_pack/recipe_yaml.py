"""Text to tree and back: the YAML of recipes and the `key=value` overrides of the command line.

Plain scalars are YAML 1.2's, keys are text and given once, and every error names line and column.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from dpo_pack.recipe_errors import Tree, fail, show

# -------------------------------------------------------------------------------------------------- YAML


def read_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML text.

    Raises RecipeError that begins with `where`, with line and column, when it is invalid.
    """
    try:
        node = yaml.compose(text, Loader=_RecipeLoader)
        return None if node is None else _value_of(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        fail(f"{where}{place}: invalid YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        fail(f"{where}, line {line}: invalid YAML: a character that is not allowed")
    except RecursionError:
        fail(f"{where}: invalid YAML: nested too deeply")


def _value_of(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_value_of(item) for item in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _mapping_of(node)
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
        _fail_at(node, f"tag {node.tag} is not supported")
    try:
        return _SCALARS[node.tag].read(node.value)
    except (KeyError, ValueError):
        _fail_at(node, f"cannot be read as {node.tag.rsplit(':', 1)[-1]}")


def _mapping_of(node: yaml.MappingNode) -> Tree:
    mapping: Tree = {}
    first_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = _value_of(key_node)
        if not isinstance(key, str):
            _fail_at(key_node, "a key must be text")
        if key in mapping:
            _fail_at(key_node, f"key '{key}' is given twice, first on line {first_lines[key]}")
        mapping[key] = _value_of(value_node)
        first_lines[key] = key_node.start_mark.line + 1
    return mapping


def _fail_at(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scalar:
    pattern: str  # of plain text that has this type
    first: Sequence[str]  # characters such text can begin with
    read: Callable[[str], Any]


# YAML 1.2's: 1.1, which PyYAML follows, reads 5e-7 as text, 010 as 8, 1:30 as 90 and no as false.
_SCALARS = {
    "tag:yaml.org,2002:null": _Scalar(
        pattern="~|null|Null|NULL|", first=["~", "n", "N", ""], read=lambda text: None
    ),
    "tag:yaml.org,2002:bool": _Scalar(
        pattern="true|True|TRUE|false|False|FALSE",
        first="tTfF",
        read=lambda text: {"true": True, "false": False}[text.lower()],
    ),
    "tag:yaml.org,2002:int": _Scalar(pattern="[-+]?[0-9]+", first="-+0123456789", read=int),
    "tag:yaml.org,2002:float": _Scalar(
        pattern=r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        first="-+.0123456789",
        read=lambda text: float(re.sub(r"\.(?=[a-zA-Z])", "", text)),
    ),
    "tag:yaml.org,2002:str": _Scalar(pattern="(?!)", first="", read=str),
}


class _RecipeLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}


class _RecipeDumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else."""


for _tag, _scalar in _SCALARS.items():
    for _reader_or_writer in (_RecipeLoader, _RecipeDumper):
        _reader_or_writer.add_implicit_resolver(
            _tag, re.compile(rf"(?:{_scalar.pattern})\Z"), list(_scalar.first)
        )


def to_yaml(value: object, *, one_line: bool = False) -> str:
    """A value as YAML that reads as the same value in YAML 1.1 and 1.2."""
    text = yaml.dump(
        value,
        Dumper=_RecipeDumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
        default_flow_style=one_line,
    )
    return text.removesuffix("...\n").strip() if one_line else text


# --------------------------------------------------------------------------------------------- overrides


def apply_override(tree: Tree, override: str) -> Tree:
    """The tree with one `dotted.key=YAML value` put in; the given tree stays as it is. Raises RecipeError."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        fail(f"override '{override}': write it as key=value, for instance optim.lr=1e-6")
    value = read_yaml(text, where=f"override '{override}'")
    changed: Tree = dict(tree)
    container: Any = changed
    for depth, part in enumerate(parts[:-1], start=1):
        position = _position(container, part, parts[: depth - 1])
        child = container[position] if isinstance(container, list) else container.get(position)
        if not isinstance(child, (dict, list)) and child is not None:
            fail(f"{key.strip()}: {'.'.join(parts[:depth])} is {show(child)} and has no keys of its own")
        # A copy, since a YAML alias may have put the same mapping in several places.
        container[position] = list(child) if isinstance(child, list) else dict(child or {})
        container = container[position]
    container[_position(container, parts[-1], parts[:-1])] = value
    return changed


def _position(container: Tree | list[Any], part: str, parents: Sequence[str]) -> Any:
    """`part` as an index of a list, or as itself for a mapping."""
    if isinstance(container, dict):
        return part
    if not part.isdecimal() or int(part) >= len(container):
        where = ".".join(parents)
        fail(f"{where}.{part}: {where} is a list of {len(container)}; its items are {where}.0 and so on")
    return int(part)
