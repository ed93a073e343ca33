"""Reads and writes the YAML 1.2 of recipes, and applies the `key=value` overrides of the command line."""

import json
import re
import reprlib
from collections.abc import Sequence
from typing import Any, NoReturn

import yaml

from dpo_pack.system.errors import RecipeError, without_secrets
from dpo_pack.system.process import printable

Tree = dict[str, Any]  # a recipe or a part of a recipe, as read from YAML
MAX_VALUES = 1 << 16  # in one YAML text


def fail(message: str, problems: Sequence[str] = ()) -> NoReturn:
    """Raises RecipeError with the message on one line; escapes characters that cannot be printed."""
    error = RecipeError(printable(message))
    error.problems = [printable(without_secrets(problem)) for problem in problems]
    raise error from None


def show(value: object) -> str:
    """Returns a value for an error message: shortened, and null, true and false as in YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


class _RecipeLoader(yaml.SafeLoader):
    """Reads YAML 1.2, and refuses a key that is given twice."""

    yaml_implicit_resolvers = {}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, ValueError):  # of a tag, as in !!int x
            _fail_at(node, f"cannot be read as {node.tag.rsplit(':', 1)[-1]}")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str):
                _fail_at(key_node, "a key must be text")
            if key in lines:
                _fail_at(key_node, f"key '{key}' is given twice, first on line {lines[key]}")
            lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _RecipeDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or YAML 1.2 would read as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """YAML 1.1 reads these characters as line breaks, unless they are escapes in double quotes."""
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_RecipeDumper.add_representer(str, _RecipeDumper.represent_text)

# The types of unquoted values in YAML 1.2; all others are text. PyYAML follows YAML 1.1, which reads 5e-7 as
# text, 010 as 8, 1:30 as 90 and no as false.
for _tag, _pattern in {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    for _reader_or_writer in (_RecipeLoader, _RecipeDumper):
        _reader_or_writer.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), None
        )
_RecipeLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def _fail_at(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def read_yaml(text: str, *, where: str) -> Any:
    """Returns the value of a YAML text. Raises RecipeError that names `where` and, if known, the line."""
    try:
        value = yaml.load(text, _RecipeLoader)
        values = [value]
        for each in values:  # the list grows meanwhile
            values += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
            if len(values) > MAX_VALUES:
                fail(f"{where}: more than {MAX_VALUES:,} values, with those that aliases (*name) repeat")
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        fail(f"{where}{place}: invalid YAML: {error.problem or error.context}")
    except (yaml.reader.ReaderError, ValueError) as error:  # ValueError: !!map x
        fail(f"{where}: invalid YAML: {' '.join(str(error).split())}")
    except RecursionError:
        fail(f"{where}: invalid YAML: nested too deeply")


def to_yaml(value: object, *, one_line: bool = False) -> str:
    """Returns a value as YAML. YAML 1.1 and YAML 1.2 read the same value from it."""
    options: Any = {"sort_keys": False, "width": 10**6, "default_flow_style": one_line}
    text: str = yaml.dump(value, Dumper=_RecipeDumper, allow_unicode=True, **options)
    return text.removesuffix("...\n").strip() if one_line else text


def without_servers(tree: Any) -> Any:
    """Returns a recipe's values for others: of an endpoint only its model, and no URL and no extra_body."""
    if isinstance(tree, dict):
        shown = {"model"} if tree.keys() >= {"url", "model"} else tree.keys()
        return {name: without_servers(value) for name, value in tree.items() if name in shown}
    return [without_servers(value) for value in tree] if isinstance(tree, list) else tree


def apply_override(tree: Tree, override: str) -> Tree:
    """Returns a copy of the tree in which `dotted.key=YAML value` is set. Raises RecipeError."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        fail(f"override '{override}': write it as key=value, for instance optim.lr=1e-6")
    changed: Tree = put(tree, parts, read_yaml(text, where=f"override '{override}'"))
    return changed


def put(old: Any, parts: Sequence[str], value: Any, where: str = "") -> Any:
    """Returns a copy of `old`, the value at `where`, that has `value` at the key `parts` below it. A list of
    one mapping needs no number. Raises RecipeError if a value on the way has no such key."""
    if not parts:
        return value
    if isinstance(old, list) and len(old) == 1 and isinstance(old[0], dict) and not parts[0].isdecimal():
        parts = ["0", *parts]
    part, *rest = parts
    below = f"{where}.{part}".removeprefix(".")
    if old is None or isinstance(old, dict):
        return {**(old or {}), part: put((old or {}).get(part), rest, value, below)}
    if not isinstance(old, list) or not part.isdecimal() or int(part) >= len(old):
        kind = f"a list of {len(old)}, numbered from 0" if isinstance(old, list) else "no mapping"
        fail(f"{below}: {where} is {kind}: {show(old)}")
    index = int(part)
    return [*old[:index], put(old[index], rest, value, below), *old[index + 1 :]]
