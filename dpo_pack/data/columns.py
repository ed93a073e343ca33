"""What columns hold: values in objects or in their JSON text, and what may be a part of a pair."""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from dpo_pack.data.formats import SIDES
from dpo_pack.data.values import BadRow, Row, as_list, holds_messages, kind_of, parsed_text

Columns = dict[str, str | None]  # as a recipe's `columns`
_FEWEST_LABELS = 20  # fewer texts may be single words by chance
_MOST_TRIED = 3  # columns of prompts
_BETTER = "chosen|preferred|better|best|winner|winning|win|won|accepted|positive|pos|good"
_WORDS = {  # of each side, in names
    "rejected": f"(dis|un|non|not|less|least)_?({_BETTER})"
    "|rejected|worse|worst|loser|losing|lose|lost|negative|neg|bad",
    "chosen": _BETTER,
}
_SIDE = {side: re.compile(rf"(?<![a-z])(?:{words})(?![a-z])") for side, words in _WORDS.items()}
_ASKS = re.compile("prompt|question|instruction|query|problem|input|context|history|message|conversation")


def side_of(column: str) -> str:
    """Returns "chosen" or "rejected" if the name of a column has a word for it; else ""."""
    return next((side for side, words in _SIDE.items() if words.search(_snake(column))), "")


def value_at(row: Row, path: str) -> tuple[Any, str]:
    """Returns the value at a path of keys of objects or their JSON text, and of positions in lists; None if
    there is none, and why."""
    value: Any = row
    for number, key in enumerate(path.split(".")):
        value = _opened(value)
        if isinstance(value, list) and key.isdecimal():
            value = dict(enumerate(value)).get(int(key))
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            owner = ".".join(path.split(".")[:number])
            what = f"is {kind_of(value)}, neither an object nor JSON of one"
            has = f"has {', '.join(map(str, value))}" if isinstance(value, dict) else what
            return None, number and f"; {owner} {has}" or ""
    return value, ""


def keys_of(row: Row, paths: Sequence[str]) -> Iterator[str]:
    """Yields the paths of all keys of the objects of which `paths` name some keys."""
    for owner in dict.fromkeys(path.split(".")[0] for path in paths):
        inner = _opened(row.get(owner))
        yield from (f"{owner}.{key}" for key in (inner if isinstance(inner, dict) else ()))


def open_dialogues(row: dict[str, Any]) -> None:
    """Replaces columns that are an object `{messages, tools}`, or its JSON text, by the messages, and puts
    its tools into the row. Raises BadRow if the row has others."""
    columns = ["prompt", *SIDES, "first", "second", "messages", "conversations"]
    if "preferred_output" in row or {"prompt", "instruction"}.isdisjoint(row):
        columns.append("input")  # of OpenAI; that of alpaca is text
    dialogues = dict[str, tuple[Any, Any]]()
    for column in columns:
        dialogue = _opened(row.get(column))
        messages = isinstance(dialogue, dict) and dialogue.get("messages", dialogue.get("conversations"))
        if messages and (column == "input" or holds_messages(messages)):  # a template may know other roles
            dialogues[column] = dialogue, messages
    for group in (("prompt", *SIDES), ("first", "second")):
        texts = {name for name in group if isinstance(row.get(name), str) and not holds_messages(row[name])}
        if not texts <= dialogues.keys():  # beside plain texts, one that happens to be JSON is text, too
            dialogues = {name: found for name, found in dialogues.items() if name not in texts}
    for column, (dialogue, messages) in dialogues.items():
        if dialogue.get("system"):
            raise BadRow("wrong_type", f"{column} has messages and system; make it a message of this role")
        row[column], tools, others = messages, as_list(dialogue.get("tools")), as_list(row.get("tools"))
        if tools and others and tools != others:
            raise BadRow("contradicting_columns", f"the tools of {column} differ from others of the row")
        row.update({"tools": tools} if tools else {})


def _opened(value: Any) -> Any:
    return parsed_text(value) if isinstance(value, str) else value


def proposal(rows: Sequence[Row], reads: Callable[[Columns], bool], fields: Sequence[str]) -> Columns | None:
    """Returns the likeliest `columns` with which rows are pairs, as `reads` says; `fields`: of prompts."""
    held: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in _leaves(row):
            held.setdefault(name, []).append(value)
    held = {name: values for name, values in held.items() if 2 * len(values) > len(rows)}
    asked = [name for name, values in held.items() if not are_labels([*map(str, values)])]
    asked.sort(key=lambda name: likelihood(name, held[name]))
    for sides in _sides({name: held[name] for name in asked}):
        first, *_ = used = [f"{name}." for name in sides.values()]  # a prompt may be a key of the same object
        prompts = [name for name in asked if not any(other.startswith(f"{name}.") for other in used)]
        prompts = [n for n in prompts if not side_of(n) or first.split(".")[:-2] == n.split(".")[:-1] != []]
        tries: list[Columns] = [{field: name} for name in prompts[:_MOST_TRIED] for field in fields]
        if isinstance(held[first[:-1]][0], list):
            tries.insert(0, {"prompt": None} if "prompt" in held else {})
        if found := next(filter(reads, ({**one, **sides} for one in tries)), None):
            return found
    return None


def _sides(held: Mapping[str, list[Any]]) -> Iterator[dict[str, str]]:
    """Yields columns whose names differ in a word for chosen and rejected, or of which one has none, those
    with long texts first; then lists of answers."""
    pairs = []
    for worse in (name for name in held if side_of(name) == "rejected"):
        stem = _SIDE["rejected"].sub("", _snake(worse))
        for better in held:
            is_named, rest = side_of(better) == "chosen", _SIDE["chosen"].sub("", _snake(better))
            is_plain = not side_of(better) and rest == stem.strip("_")
            if (is_named or is_plain) and held[better] != held[worse]:
                pairs.append(((rest != stem, worse.count("."), -len(str(held[worse]))), better, worse))
    for _, better, worse in sorted(pairs):
        yield {"chosen": better, "rejected": worse}
    yield from ({"answers": name} for name, values in held.items() if isinstance(values[0], list))


def likelihood(name: str, texts: Sequence[Any]) -> tuple[Any, ...]:
    """Returns a key that is small for a column of prompts: texts of several words, which mostly differ."""
    named, different = _ASKS.search(_snake(name)), len(set(map(str, texts)))
    single = 2 * sum(len(str(text).split()) == 1 for text in texts) > len(texts)
    return name == "system", single and not named, 2 * different <= len(texts), not named, -different, name


def _leaves(row: Row, before: str = "", depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yields texts and lists by name; those in objects, or in their JSON text, by a path of keys, too."""
    for key, value in row.items():
        inner = _opened(value)
        if isinstance(inner, dict) and depth and not holds_messages(inner):
            yield from _leaves(inner, f"{before}{key}.", depth - 1)
        is_text = isinstance(value, str) and value.strip() and not _is_number(value)
        if is_text or isinstance(inner, list) or holds_messages(value):
            yield f"{before}{key}", inner if isinstance(inner, list) else value


def _is_number(text: str) -> bool:
    try:
        return bool(float(text)) or True
    except ValueError:
        return False


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def texts_of_columns(rows: Sequence[Row], *, beside: Container[str | None]) -> dict[str, list[str]]:
    """Returns the texts of each column that has some, except of `beside`; no numbers and no blanks."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        for column, value in row.items():
            if column not in beside and (found := list(_texts(value))):
                texts.setdefault(column, []).extend(found)
    return texts


def are_labels(texts: Sequence[str]) -> bool:
    """Returns True if the texts are ids or categories; docs/data.md has the rule and its reasons."""
    if len(texts) < _FEWEST_LABELS or not all(text.isascii() and len(text.split()) == 1 for text in texts):
        return False
    return 2 * len(set(texts)) <= len(texts) or not any(map(str.isalpha, texts))


def _texts(value: Any) -> Iterator[str]:
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            if value.strip() and not _is_number(value):
                yield value
        elif isinstance(value, list | dict):
            values.extend(value.values() if isinstance(value, dict) else value)
