"""The values of a row of a data file: texts, messages, token ids, numbers, as formats.py reads them.

A value may be JSON text, or what Python or numpy prints. Each reader raises BadRow with what it found.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from dpo_pack.recipe.data import SCORE_FIELDS

Message = dict[str, Any]
Row = Mapping[str, Any]
# Of a row: bytes in JSON lines and columnar files, characters in JSON arrays and CSV; parsed, it takes more.
MAX_ROW_SIZE = 1 << 24
_MAX_FLOAT32 = 3.4028234e38


class RowImages(list[Any]):
    """The images of a row beside those in its messages; each row has it, as `images`, if images are read."""


@dataclass(eq=False)
class BadRow(Exception):
    """A row cannot become a pair or prompt. Give all arguments by position: pickle loses others."""

    reason: str  # a snake_case word, by which reports count rows
    detail: str  # a clause, which messages quote
    content: Any = None  # the row as a reader found it, if the reader refused it


def value_of(row: Row, column: str) -> Any:
    if column not in row:
        present = ", ".join(str(name) for name in row) or "none"
        raise BadRow("missing_column", f"no column {column!r} (there are: {present})")
    if isinstance(row[column], BadRow):  # the reader put this error in place of an invalid object
        raise row[column]
    return row[column]


def text_of(row: Row, column: str) -> str:
    value = value_of(row, column)
    if not isinstance(value, str):
        _without_nulls(value, column)  # a date is no JSON at all
        raise BadRow("wrong_type", f"{column} is {kind_of(value)}, not text")
    return value


def messages_of(row: Row, column: str) -> list[Message]:
    """Returns the messages. One without `content` (a tool call) gets `content: None`, as templates expect."""
    value = as_list(value_of(row, column))
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{column} is {kind_of(value)}, not a list of messages")
    if not value:
        kind = "empty_prompt" if column == "prompt" else "empty_completion"
        raise BadRow(kind, f"{column} has no messages")
    is_plain = [type(m) is dict and type(m.get("content")) is type(m.get("role")) is str for m in value]
    if all(is_plain) and max(map(len, value)) == 2 and not any(m["role"] in _RENAMED_ROLES for m in value):
        return value
    reads_images = isinstance(row.get("images"), RowImages)
    messages: list[Message] = _without_nulls([message_of(message, column) for message in value], column)
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow("wrong_type", f"message {number} of {column} is not a {{role, content}} object")
        if isinstance(message.get("tool_calls"), str) and message["tool_calls"].strip():
            message["tool_calls"] = _without_nulls(_object_or_json(message, "tool_calls", list), column)
        content = message.setdefault("content", None)
        if not (content is None or isinstance(content, str | list)):
            raise BadRow("wrong_type", f"the content of message {number} of {column} is {kind_of(content)}")
        items = () if reads_images else chain.from_iterable(part.items() for part in _parts(message))
        if any(holds_media(*item) or (item[0] == "type" and is_media_name(str(item[1]))) for item in items):
            detail = f"message {number} of {column} has images, video or audio, and only text is read"
            raise BadRow("media", detail)
    return messages


def _parts(message: Message) -> Iterator[Message]:
    """Yields a message and the parts of its content, at any depth: a tool's result may have parts too."""
    yield message
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            yield from _parts(part)


def holds_media(name: str, value: Any) -> bool:
    """Returns True if the value of this column or key is an image, video or audio, or says where one is."""
    if is_media_name(name):
        return not isinstance(value, int | float) and value not in (None, "", [], {})
    if isinstance(value, list):
        value = value[0] if value else None
    return isinstance(value, bytes) or (isinstance(value, dict) and isinstance(value.get("bytes"), bytes))


@cache
def is_media_name(name: str) -> bool:
    """Returns True for names like `image`, `images`, `image_url`, `input_audio` and `pixel_values`."""
    return bool(_MEDIA_NAME.search(name.lower()))


_MEDIA_NAME = re.compile(
    r"(?<![a-z])(image|img|picture|photo|video|audio)s?"
    r"([^a-z]?(url|uri|path|file|name|bytes|base64|data|array)s?)?$|pixel_values$"
)


def _without_nulls(value: Any, column: str) -> Any:
    """Removes keys that hold null: Parquet, Arrow and `datasets` give each row the keys of all rows. Raises
    BadRow for a value that JSON does not have: transformers would give templates "<date>" for a date."""
    try:
        return _drop_nulls(value, column)
    except RecursionError:
        raise BadRow("wrong_type", f"{column} is nested too deeply") from None


def _drop_nulls(value: Any, column: str, name: str = "") -> Any:
    """`name`: the key of media that holds the value, whose bytes are read or refused later; "": none does."""
    kind = type(value)
    if kind in (str, int, float, bool, type(None)) or (kind is bytes and name):
        return value
    if kind is dict:
        return {
            key: _drop_nulls(inner, column, name or (key if is_media_name(str(key)) else ""))
            for key, inner in value.items()
            if inner is not None
        }
    if kind is list:
        return [_drop_nulls(inner, column, name) for inner in value]
    if isinstance(value, BadRow):  # the reader put this error in place of an invalid object
        raise value
    detail = f"{column} has a {kind.__name__} ({str(value)[:40]}), a type that JSON does not have"
    raise BadRow("no_json_type", detail)


def token_ids_of(row: Row, column: str) -> list[int]:
    value = value_of(row, column)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise BadRow("wrong_type", f"{column} is not a list of integers")
    return value


def token_weights_of(row: Row, column: str, num_tokens: int) -> list[float] | None:
    if row.get(column) is None:
        return None
    weights = value_of(row, column)
    if not isinstance(weights, list) or not all(
        type(one) in (int, float) and one in (0, 1) for one in weights
    ):
        remedy = "1 for a token that is scored and 0 for another; a pair's weight is in weight"
        raise BadRow("invalid_token_weights", f"{column} is no list of 1 and 0: {remedy}")
    if len(weights) != num_tokens:
        detail = f"{column} has {len(weights):,} numbers for a completion of {num_tokens:,} tokens"
        raise BadRow("invalid_token_weights", detail)
    if num_tokens and not any(weights):
        raise BadRow("invalid_token_weights", f"{column} are all 0: the completion adds nothing to a loss")
    return weights


def as_float(value: Any) -> float:
    """Returns the number in a value, which is a text in a CSV file; NaN if there is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def weight_of(row: Row) -> float:
    value = row.get("weight")
    if value is None:
        return 1.0
    weight = as_float(value)
    if isinstance(value, bool) or not 0 <= weight <= _MAX_FLOAT32:
        raise BadRow("invalid_weight", f"weight is {str(value)[:40]!r}, not a finite number of at least 0")
    return weight


def score_margin_of(row: Row, columns: Container[str]) -> float:
    """Returns score_margin, or chosen_score - rejected_score, as `columns` name them; NaN: they are null."""
    values = {name: value_of(row, name) for name in SCORE_FIELDS if name in columns}
    if all(value in (None, "") for value in values.values()):  # a CSV file has no null
        return math.nan
    for name, value in values.items():
        if isinstance(value, bool) or not math.isfinite(as_float(value)):
            raise BadRow("invalid_score", f"{name} is {str(value)[:40]!r}, not a finite number")
    score, *others = map(as_float, values.values())
    return score - sum(others)


def template_options_of(row: Row) -> dict[str, Any]:
    tools = _object_or_json(row, "tools", list)
    options = _object_or_json(row, "chat_template_kwargs", dict) or {}
    # An empty list is left out, because some templates (Llama's) announce tools even for an empty list.
    return {"tools": tools, **options} if tools else dict(options)


def _object_or_json(row: Row, column: str, kind: type) -> Any:
    value = row.get(column)
    if isinstance(value, str):
        value = parsed_text(value) if value.strip() else None  # its nulls stay, because a person wrote them
        if isinstance(value, str):
            raise BadRow("wrong_type", f"{column} is text but not JSON")
    else:
        value = _without_nulls(value, column)
    if value is not None and not isinstance(value, kind):
        raise BadRow("wrong_type", f"{column} is {kind_of(value)}, not {_KINDS[kind]}")
    if isinstance(value, list):  # some data sets have a JSON text for each tool
        value = [parsed_text(item) if isinstance(item, str) else item for item in value]
    return value


def kind_of(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


_KINDS: dict[type, str] = {
    type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text",
    list: "a list", dict: "an object",
}  # fmt: skip


def parsed_text(text: str) -> Any:
    """Returns the list or object that a text is in JSON or as Python prints it; the text if it is neither."""
    if text.lstrip()[:1] not in ("[", "{") or len(text) > MAX_ROW_SIZE:
        return text
    for parse in (json.loads, ast.literal_eval, _as_numpy_prints):
        with (
            warnings.catch_warnings(action="ignore"),  # of wrong escapes
            suppress(ValueError, SyntaxError, RecursionError, MemoryError),
        ):
            value = parse(text)
            return value if isinstance(value, list | dict) else text
    return text


def _as_numpy_prints(text: str) -> Any:
    return ast.literal_eval(re.sub(r"\}\s*\n\s*\{", "}, {", text))  # no commas; no text has line breaks


def as_list(value: Any) -> Any:
    """Returns the list that a text is (see `parsed_text`) or an object of lists; others unchanged."""
    parsed = parsed_text(value) if isinstance(value, str) else value
    if isinstance(parsed, dict) and not {"role", "from", *ORDERS}.isdisjoint(parsed):
        columns = {name: column for name, column in parsed.items() if column is not None}
        if all(isinstance(column, list) for column in columns.values()):
            with suppress(ValueError):  # the lists have different lengths
                return [dict(zip(columns, item, strict=True)) for item in zip(*columns.values(), strict=True)]
    return parsed if isinstance(parsed, list) else value


def holds_messages(text: Any) -> bool:
    """Returns True if a text is a message or a list of messages, in JSON or as Python prints it."""
    parsed = parsed_text(text) if isinstance(text, str) else text
    messages = as_list(parsed) if isinstance(as_list(parsed), list) else [parsed]
    return bool(messages) and all(
        isinstance(message, dict) and str(message.get("role", message.get("from"))) in _ROLES
        for message in messages
    )


def message_of(value: Any, column: str) -> Any:
    """Returns a message of ShareGPT, `{from, value}`, as `{role, content}`, and a call in JSON as one of
    `tool_calls`; other values unchanged."""
    if not isinstance(value, dict):
        return value
    is_shared = value.get("from") is not None and value.get("role") is None
    who, what = ("from", "value") if is_shared else ("role", "content")
    sender, content = str(value.get(who)), value.get(what)
    if not is_shared and sender not in _RENAMED_ROLES:
        return value
    if sender not in _SHAREGPT_ROLES:
        names = ", ".join(_SHAREGPT_ROLES)
        raise BadRow("unknown_role", f"{column} has a message from {sender[:40]!r}; known: {names}")
    known = _KEYS_OF_MESSAGES | ({"id"} if _SHAREGPT_ROLES[sender] == "tool" else set())
    others = {key: inner for key, inner in value.items() if key in known or holds_media(key, inner)}
    if sender in _CALLS:
        calls = parsed_text(content) if isinstance(content, str) else content
        calls = calls if isinstance(calls, list) else [calls]
        if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
            way = "JSON of {name, arguments} or of a list of such; or write tool_calls, as OpenAI does"
            raise BadRow("wrong_type", f"a message from {sender!r} in {column} is no call; calls are {way}")
        others["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        content = None
    return {**others, "role": _SHAREGPT_ROLES[sender], "content": content}


_CALLS = ("function_call", "tool_call")  # of LLaMA-Factory and of ms-swift
_RENAMED_ROLES = (*_CALLS, "tool_response")
_SHAREGPT_ROLES = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"system": "system", "tool": "tool", "observation": "tool", "tool_response": "tool"},
    **dict.fromkeys(_CALLS, "assistant"),
}
_KEYS_OF_MESSAGES = {"tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking"}
_ROLES = {*_SHAREGPT_ROLES, "developer", "function", "ipython"}
ORDERS = {"rank": 1, "overall_score": -1, "score": -1}  # 1: the lowest is the best
