"""One dataset row -> one Pair: the formats a source can be in.

A format is a function from a row (a mapping from column name to value, `data.*.columns` already
applied) to a Pair; it raises BadRow for a row that cannot become one. A new format is a function, a line in
FORMATS, a case of `detect_format`, its name in the `format` of recipe_schema.py, its fields in
FIELDS_OF_FORMAT of recipe_checks.py, and for a new column ROW_COLUMNS and recipe_schema.py's RowField.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Message = dict[str, Any]
Row = Mapping[str, Any]

# Every column some format reads. Readers of columnar files fetch no other.
ROW_COLUMNS = (
    "prompt",
    "chosen",
    "rejected",
    "prompt_ids",
    "chosen_ids",
    "rejected_ids",
    "weight",
    "tools",
    "chat_template_kwargs",
)

_ASSISTANT_TURN = "\n\nAssistant:"
_MAX_FLOAT32 = 3.4028234e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt with a preferred and a dispreferred completion, as text, as messages or as token ids."""

    prompt: str | list[Message] | list[int]
    chosen: str | list[Message] | list[int]  # the same kind as prompt
    rejected: str | list[Message] | list[int]
    weight: float = 1.0  # of the pair's loss
    template_options: Mapping[str, Any] = field(default_factory=dict)  # tools and chat_template_kwargs


class BadRow(Exception):
    """A row that cannot become a pair; `data.on_bad_row` decides what happens.

    `reason` is a snake_case word that reports count by, `detail` the clause an error message quotes.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def preference(row: Row) -> Pair:
    """`prompt`, `chosen` and `rejected` as text; without `prompt` it is what the other two begin with."""
    chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
    if "prompt" in row:
        prompt = _text(row, "prompt")
    else:
        length = _implicit_prompt_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
        if not prompt:
            raise BadRow("no_common_prompt", "no prompt column, and chosen and rejected begin differently")
    return _text_pair(row, prompt, chosen, rejected)


def transcript(row: Row) -> Pair:
    """Whole dialogues "\\n\\nHuman: ...\\n\\nAssistant: ..." (HH-RLHF); the last assistant turn is scored."""
    prompts, completions = [], []
    for column in ("chosen", "rejected"):
        dialogue = _text(row, column)
        start = dialogue.rfind(_ASSISTANT_TURN)
        if start < 0:
            raise BadRow("no_assistant_turn", f"{column} has no {_ASSISTANT_TURN!r}")
        prompts.append(dialogue[: start + len(_ASSISTANT_TURN)])
        completions.append(dialogue[start + len(_ASSISTANT_TURN) :])
    if prompts[0] != prompts[1]:
        raise BadRow("no_common_prompt", f"chosen and rejected differ before their last {_ASSISTANT_TURN!r}")
    return _text_pair(row, prompts[0], completions[0], completions[1])


def conversational(row: Row) -> Pair:
    """Lists of `{role, content}` messages, with or without a prompt of their own.

    Some sets repeat the prompt: as text beside whole conversations (UltraFeedback binarized), or as a
    list that both conversations begin with. Both are read as whole conversations.
    """
    chosen, rejected = _messages(row, "chosen"), _messages(row, "rejected")
    common = _implicit_prompt_length(chosen, rejected)
    if "prompt" not in row:
        prompt_length = common
    elif isinstance(row["prompt"], str):
        _check_prompt_is_repeated(row["prompt"], chosen[:common])
        prompt_length = common
    else:
        prompt = _messages(row, "prompt")
        prompt_length = len(prompt)
        if chosen[:prompt_length] != prompt or rejected[:prompt_length] != prompt:
            return _conversational_pair(row, prompt, chosen, rejected)
    if prompt_length == 0:
        raise BadRow("no_common_prompt", "no prompt column, and chosen and rejected begin differently")
    return _conversational_pair(row, chosen[:prompt_length], chosen[prompt_length:], rejected[prompt_length:])


def tokenized(row: Row) -> Pair:
    """`prompt_ids`, `chosen_ids` and `rejected_ids`: your own tokenisation, EOS included if wanted."""
    return Pair(
        prompt=_token_ids(row, "prompt_ids"),
        chosen=_token_ids(row, "chosen_ids"),
        rejected=_token_ids(row, "rejected_ids"),
        weight=_weight(row),
    )


def detect_format(row: Row) -> str:
    """The format that reads `row`, for `format: auto`. Raises BadRow when none does."""
    if "prompt_ids" in row:
        return "tokenized"
    chosen = _value(row, "chosen")
    if isinstance(chosen, list):
        return "conversational"
    dialogues = _text(row, "chosen"), _text(row, "rejected")
    if "prompt" not in row and all("\n\nHuman:" in d and _ASSISTANT_TURN in d for d in dialogues):
        return "transcript"
    return "preference"


def prompt_of(row: Row, format: str) -> tuple[str | list[Message] | list[int], dict[str, Any]]:
    """The prompt of a row whose completions, if it has any, are not asked for, and its template options."""
    if format == "tokenized":
        return _token_ids(row, "prompt_ids"), {}
    if format == "conversational":
        has_own_prompt = isinstance(row.get("prompt"), list)
        prompt = _messages(row, "prompt") if has_own_prompt else conversational(row).prompt
        return prompt, _template_options(row)
    if format == "preference" and "prompt" in row:
        return _text(row, "prompt"), {}
    return FORMATS[format](row).prompt, {}


def detect_prompt_format(row: Row) -> str:
    """The format `prompt_of` reads `row` in, for `format: auto`. Raises BadRow when none does."""
    if "prompt_ids" in row:
        return "tokenized"
    if "prompt" not in row:
        return detect_format(row)
    is_conversation = isinstance(row["prompt"], list) or isinstance(row.get("chosen"), list)
    return "conversational" if is_conversation else "preference"


def with_system_prompt(pair: Pair, system_prompt: str) -> Pair:
    """A conversational pair whose prompt begins with a system message: its own, or `system_prompt`."""
    assert isinstance(pair.prompt, list)
    return replace(pair, prompt=with_system_message(pair.prompt, system_prompt))


def with_system_message(prompt: list[Any], content: str) -> list[Any]:
    """Messages that begin with a system message: their own, or one of this content."""
    if prompt[0]["role"] in ("system", "developer"):
        return prompt
    return [{"role": "system", "content": content}, *prompt]


def _text_pair(row: Row, prompt: str, chosen: str, rejected: str) -> Pair:
    for column, completion in (("chosen", chosen), ("rejected", rejected)):
        if not completion.strip():
            raise BadRow("empty_completion", f"the {column} completion is empty")
    return Pair(prompt=prompt, chosen=chosen, rejected=rejected, weight=_weight(row))


def _conversational_pair(
    row: Row, prompt: list[Message], chosen: list[Message], rejected: list[Message]
) -> Pair:
    for column, completion in (("chosen", chosen), ("rejected", rejected)):
        if all(_is_blank(message) for message in completion):
            raise BadRow("empty_completion", f"the {column} completion is empty")
    return Pair(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        weight=_weight(row),
        template_options=_template_options(row),
    )


def _implicit_prompt_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Characters or messages of the prompt that both begin with, as TRL's `extract_prompt` has it.

    A space that ends the common beginning belongs to the completions. Where one of the two continues
    the other, the shorter one's last element is its completion.
    """
    shorter = min(len(chosen), len(rejected))
    for length in range(shorter):
        if chosen[length] != rejected[length]:
            ends_in_space = length > 0 and chosen[length - 1] == " "
            return length - 1 if ends_in_space else length
    return max(shorter - 1, 0)


def _check_prompt_is_repeated(prompt: str, common: list[Message]) -> None:
    """A text prompt beside conversations may be left out only when they contain it."""
    if all(message.get("content") != prompt for message in common if message["role"] == "user"):
        raise BadRow(
            "prompt_mismatch",
            "the text prompt is no user message that chosen and rejected both begin with",
        )


def _is_blank(message: Message) -> bool:
    """Whether a message says nothing: no content, and nothing else (a tool call, reasoning) either."""
    said = [value for name, value in message.items() if name not in ("role", "name")]
    return not any(value.strip() if isinstance(value, str) else value for value in said)


def _value(row: Row, column: str) -> Any:
    if column not in row:
        present = ", ".join(str(name) for name in row) or "none"
        raise BadRow("missing_column", f"no column {column!r} (there are: {present})")
    return row[column]


def _text(row: Row, column: str) -> str:
    value = _value(row, column)
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{column} is {_kind(value)}, not text")
    return value


def _messages(row: Row, column: str) -> list[Message]:
    """The column's messages. All have `content`: templates ask whether it is null, as a tool call's is."""
    value = _value(row, column)
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{column} is {_kind(value)}, not a list of messages")
    if not value:
        kind = "empty_prompt" if column == "prompt" else "empty_completion"
        raise BadRow(kind, f"{column} has no messages")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow("wrong_type", f"message {number} of {column} is no {{role, content}} object")
        content = message.get("content")
        if not (content is None or isinstance(content, str | list)):
            raise BadRow("wrong_type", f"the content of message {number} of {column} is {_kind(content)}")
    messages: list[Message] = _without_nulls(value, column)
    for message in messages:
        message.setdefault("content", None)
    return messages


def _without_nulls(value: Any, column: str) -> Any:
    """The value without the keys that hold null, at any depth. Raises BadRow for one that has no end.

    In Parquet, Arrow and `datasets` all rows have the keys of all rows, null where a row lacks one. Nothing
    tells such a null from one that was written, so no kind of file has any.
    """
    try:
        return _drop_nulls(value)
    except RecursionError:
        raise BadRow("wrong_type", f"{column} is nested too deeply") from None


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def _token_ids(row: Row, column: str) -> list[int]:
    value = _value(row, column)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise BadRow("wrong_type", f"{column} is no list of integers")
    return value


def _weight(row: Row) -> float:
    value = row.get("weight")
    if value is None:
        return 1.0
    try:
        weight = float(value)  # text too: a CSV file has nothing else
    except (TypeError, ValueError, OverflowError):
        weight = float("nan")
    if isinstance(value, bool) or not 0 <= weight <= _MAX_FLOAT32:
        raise BadRow("invalid_weight", f"weight is {str(value)[:40]!r}, not a finite number of at least 0")
    return weight


def _template_options(row: Row) -> dict[str, Any]:
    tools = _object_or_json(row, "tools", list)
    options = _object_or_json(row, "chat_template_kwargs", dict) or {}
    # An empty list is left out, because some templates (Llama's) announce tools even for one.
    return {"tools": tools, **options} if tools else dict(options)


def _object_or_json(row: Row, column: str, kind: type) -> Any:
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)  # whose nulls somebody wrote
        except (ValueError, RecursionError):
            raise BadRow("wrong_type", f"{column} is text but not JSON") from None
    else:
        value = _without_nulls(value, column)
    if value is not None and not isinstance(value, kind):
        raise BadRow("wrong_type", f"{column} is {_kind(value)}, not {_KINDS[kind]}")
    return value


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}

FORMATS: dict[str, Callable[[Row], Pair]] = {
    "preference": preference,
    "conversational": conversational,
    "transcript": transcript,
    "tokenized": tokenized,
}
