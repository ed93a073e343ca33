"""The formats of data sources: FORMATS, at the end. A format turns rows of a data file into pairs or prompts.

A row maps column names, which are already renamed as the recipe's `data.*.columns` says, to values. The
columns that a format reads are in FIELDS_OF_FORMAT of recipe/data.py.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any, Literal

from dpo_pack.recipe.data import FIELDS_OF_FORMAT

Message = dict[str, Any]
Answers = tuple[list[Message], list[Message], str]  # chosen, rejected, and `Pair.choice`
Row = Mapping[str, Any]
_HUMAN_TURN, _ASSISTANT_TURN = "\n\nHuman:", "\n\nAssistant:"  # of HH-RLHF
_MARKED_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
SIDES = ("chosen", "rejected")
_BEGINS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]\s*:""")
# Of a row: bytes in JSON lines and columnar files, characters in JSON arrays and CSV; parsed, it takes more.
MAX_ROW_SIZE = 1 << 24
_MAX_FLOAT32 = 3.4028234e38


class RowImages(list[Any]):
    """The images of a row beside those in its messages; each row has it, as `images`, if images are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt with a preferred and a dispreferred completion, as text, as messages or as token ids."""

    prompt: str | list[Message] | list[int]
    # The completions have the prompt's type; they are "" when only the prompts are read.
    chosen: str | list[Message] | list[int] = ""
    rejected: str | list[Message] | list[int] = ""
    weight: float = 1.0  # a factor of the pair's loss
    # 1 for each completion token that is scored, 0 for others; None: all are 1. Only token ids have weights.
    chosen_weights: Sequence[float] | None = None
    rejected_weights: Sequence[float] | None = None
    has_inferred_prompt: bool = False  # the prompt is the text with which both completions happen to begin
    choice: str = ""  # why chosen is chosen, if the row does not call an answer so; {better} is a column
    template_options: Mapping[str, Any] = field(default_factory=dict)  # tools and chat_template_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One form that the rows of a source can have, and the functions that read such rows."""

    content: Literal["text", "messages", "token_ids"] = "messages"  # the type of prompts and completions
    # The columns of the completions' texts, chosen first; one column if both are in it. A row without them
    # gives no pair. dpopack show names them in its remedies.
    completion_columns: tuple[str, ...] = SIDES
    prompt_column: str | None = "prompt"  # the column that the prompt is read from; None: no column is it
    infers_prompts: bool = False  # without prompt_column, the common beginning of the texts is the prompt
    pair: Callable[[Row], Pair]  # makes the pair of a row (at most one); raises BadRow
    prompt: Callable[[Row], Pair]  # makes a Pair without completions; raises BadRow


@dataclass(eq=False)
class BadRow(Exception):
    """A row cannot become a pair or prompt. Give all arguments by position: pickle loses others."""

    reason: str  # a snake_case word, by which reports count rows
    detail: str  # a clause, which messages quote
    content: Any = None  # the row as a reader found it, if the reader refused it


def preference(row: Row) -> Pair:
    """Reads texts: `chosen`, `rejected` and `prompt`, or their common beginning if `prompt` is missing."""
    chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
    for column, text in zip(SIDES, (chosen, rejected), strict=True):
        if _BEGINS_MESSAGES.match(text) and text.rstrip()[-1] == "]" and not holds_messages(text):
            detail = f"{column} is a list of messages as text, but neither JSON nor as Python prints it"
            raise BadRow("wrong_type", f"{detail}; store it as JSON")
    if "prompt" in row:
        return _pair(row, _text(row, "prompt"), chosen, rejected)
    if all(isinstance(parsed_text(text), dict) for text in (chosen, rejected)):
        raise BadRow("wrong_type", "chosen and rejected are JSON of objects, and no column is the prompt")
    length = _implicit_prompt_length(chosen, rejected)
    if length == 0:
        raise BadRow("no_common_prompt", "no prompt column, and chosen and rejected begin differently")
    pair = _pair(row, chosen[:length], chosen[length:], rejected[length:])
    return replace(pair, has_inferred_prompt=True)


def transcript(row: Row) -> Pair:
    """Reads whole dialogues "\\n\\nHuman: ...\\n\\nAssistant: ..." (HH-RLHF). The last answer is scored."""
    prompts, completions = [], []
    for column in SIDES:
        prompt, mark, completion = _text(row, column).rpartition(_ASSISTANT_TURN)
        if not mark:
            raise BadRow("no_assistant_turn", f"{column} has no {_ASSISTANT_TURN!r}")
        prompts.append(prompt + mark)
        completions.append(completion)
    if prompts[0] != prompts[1]:
        raise BadRow("no_common_prompt", f"chosen and rejected differ before their last {_ASSISTANT_TURN!r}")
    return _pair(row, prompts[0], *completions)


def transcript_turns(row: Row) -> Pair:
    """Reads the same dialogues as messages; a text before the first turn is the system's."""
    dialogues: Row = {"weight": row.get("weight")}
    for column in SIDES:
        before, *parts = (part.strip() for part in _MARKED_TURN.split(_text(row, column)))
        if parts[-2:-1] != ["Assistant"]:
            raise BadRow("no_assistant_turn", f"{column} does not end with a turn of {_ASSISTANT_TURN!r}")
        turns = _turns_of_marks(parts)
        dialogues = {**dialogues, column: with_system_message(turns, before) if before else turns}
    return conversational(dialogues)


def conversational(row: Row) -> Pair:
    """Reads lists of `{role, content}` messages. The column `prompt` may be missing, or be in chosen and
    rejected once more: a text as one of their user messages (UltraFeedback binarized), a list as their
    beginning. Unless the recipe names the column `system`, it is not read: see `with_system`."""
    chosen, rejected = _messages(row, "chosen"), _messages(row, "rejected")
    common = _implicit_prompt_length(chosen, rejected)
    prompt = chosen[:common]
    if "prompt" not in row:
        _check_last_turns(chosen, rejected)
    elif not any(m["role"] == "user" and m.get("content") == row["prompt"] for m in prompt):
        if isinstance(row["prompt"], str) and not holds_messages(row["prompt"]):
            detail = "prompt is text, but chosen and rejected do not both begin with a user message of it"
            raise BadRow("prompt_mismatch", detail)
        prompt = _messages(row, "prompt")
        repeats = [side[: len(prompt)] == prompt for side in (chosen, rejected)]
        if repeats[0] != repeats[1]:
            detail = f"only {'chosen' if repeats[0] else 'rejected'} begins with the messages of the prompt"
            raise BadRow("prompt_mismatch", detail)
        common = len(prompt) if all(repeats) else 0
    return _pair(row, prompt, chosen[common:], rejected[common:])


def openai(row: Row) -> Row:
    """Returns a row of OpenAI's fine-tuning on preferences under the columns of `conversational`."""
    chosen, rejected = _answer(row, "preferred_output"), _answer(row, "non_preferred_output")
    return {**row, "prompt": _value(row, "input"), "chosen": chosen, "rejected": rejected}


def swift(row: Row) -> Row:
    """Returns a row of ms-swift, whose `messages` end with the chosen answer, under the columns of
    `conversational`. `rejected_messages` are a whole dialogue; `rejected_response` stands for the answer."""
    messages = _messages({**row, "messages": dialogue_prompt(row, "messages")}, "messages")
    if row.get("rejected_messages") is not None:
        return {**row, "chosen": messages, "rejected": dialogue_prompt(row, "rejected_messages")}
    rejected = _answer(row, "rejected_response")
    if messages[-1]["role"] != "assistant":
        raise BadRow("no_assistant_turn", "messages do not end with the chosen answer")
    return {**row, "prompt": messages[:-1], "chosen": messages[-1:], "rejected": rejected}


def tokenized(row: Row) -> Pair:
    """Reads the user's own token ids, to which no EOS is added, and weights of the completions' tokens."""
    prompt, chosen, rejected = (_token_ids(row, f"{part}_ids") for part in ("prompt", "chosen", "rejected"))
    return Pair(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        weight=_weight(row),
        chosen_weights=_token_weights(row, "chosen_weights", len(chosen)),
        rejected_weights=_token_weights(row, "rejected_weights", len(rejected)),
    )


def compared(row: Row) -> Answers:
    """Returns the better and the worse of two answers: `first` where `better` is 0 or `preference` is below
    0; both may be words (model_a, tie). Raises BadRow for a tie."""
    columns = [column for column in ("preference", "better") if row.get(column) is not None]
    if not columns:
        detail = "neither the column preference nor the column better says which answer is better"
        raise BadRow("missing_column" if "preference" not in row else "wrong_type", detail)
    is_second_better = {_is_second_better(column, row[column]) for column in columns}
    if len(is_second_better) > 1:
        raise BadRow("contradicting_columns", "the columns preference and better name different answers")
    better, worse = ("second", "first") if is_second_better.pop() else ("first", "second")
    value = re.sub("[{}]", "", str(row[columns[-1]])).strip()
    if columns[-1] == "preference" and math.isfinite(number := _as_float(value)):
        value = "above 0" if number > 0 else "below 0"
    return _answer(row, better), _answer(row, worse), f"{{{better}}} where {{{columns[-1]}}} is {value}"


def _is_second_better(column: str, value: object) -> bool:
    number, word = _as_float(value), str(value).strip().lower()
    named = _FIRST_OR_SECOND.fullmatch(word)
    if word.startswith(_TIES) or (column == "preference" and number == 0):
        raise BadRow("tie", f"{column} is {str(value)[:40]!r}: neither answer is better")
    if named is None and not (number in (0, 1) if column == "better" else math.isfinite(number)):
        numbers = "0 or 1" if column == "better" else "a number below or above 0"
        words = "first (also a, model_a), second (also b, model_b), or tie"
        raise BadRow("wrong_type", f"{column} is {str(value)[:40]!r}; it can be {numbers}, or {words}")
    return number > 0 if named is None else named[1] in ("b", "second")


_FIRST_OR_SECOND = re.compile(  # model_a, [[B]], Response B
    r"\W*(?:(?:model|answer|response|assistant|output|completion|conversation)[\W_]+)?(a|b|first|second)\W*"
)
_TIES = ("tie", "both", "neither", "equal", "draw", "same")


def ranked(row: Row) -> Answers:
    """Returns the best and the worst answer of `answers`, a list of objects with a text, by the first of
    _ORDERS that they have. Raises BadRow if all are equal."""
    answers = as_list(_value(row, "answers"))
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise BadRow("wrong_type", "answers is not a list of {answer, rank} objects")
    if len(answers) < 2:
        raise BadRow("too_few_answers", f"answers has {len(answers)} entries, but a pair needs two")
    order = next((name for name in _ORDERS if any(name in answer for answer in answers)), "rank")
    ranks = [_as_float(_value(answer, order)) for answer in answers]
    if not all(map(math.isfinite, ranks)):
        wrong = next(answer[order] for answer in answers if not math.isfinite(_as_float(answer[order])))
        raise BadRow("wrong_type", f"{order} is {str(wrong)[:40]!r}, not a number")
    if min(ranks) == max(ranks):
        raise BadRow("tie", f"all answers have the same {order}")
    best, worst = (answers[ranks.index(rank)] for rank in (min(ranks), max(ranks))[:: _ORDERS[order]])
    column = next((name for name in ("answer", "completion", "response") if name in best), "answer")
    wins, loses = ("lowest", "highest")[:: _ORDERS[order]]
    choice = f"the answer of the {wins} {order}, rejected that of the {loses}"
    return _answer(best, column), _answer(worst, column), choice


_ORDERS = {"rank": 1, "overall_score": -1, "score": -1}  # 1: the lowest is the best


def alpaca_prompt(row: Row) -> list[Message]:
    """Returns the turns of `history`, and `instruction` and `input` with a line break between them."""
    instruction, input = _text(row, "instruction"), row.get("input")
    history = as_list(row.get("history") or [])
    if not isinstance(input, str | None):
        raise BadRow("wrong_type", f"input is {kind_of(input)}, not text")
    turns = []
    for turn in history if isinstance(history, list) else [None]:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise BadRow("wrong_type", "history is not a list of [question, answer]")
        turns += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = "\n".join(text for text in (instruction, input) if text)
    return [*turns, {"role": "user", "content": question}]


def dialogue_prompt(row: Row, column: str) -> list[Message]:
    """Returns the messages of a column, which end before the answer. Their keys may be those of ShareGPT."""
    value = _value(row, column)
    if isinstance(value, str) and column == "prompt" and not holds_messages(value):
        return _turns(value)
    value = as_list(value)
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{column} is {kind_of(value)}, not a list of messages")
    return [_message(message, column) for message in value]


def check_last_turn(pair: Pair, *, continues: bool = False, is_asked: bool = False) -> bool:
    """Returns True if the completions go on with the prompt's last turn, the assistant's. Raises BadRow if
    they would and may not (`continues`), or if somebody else must have the last turn (`is_asked`)."""
    last: Any = pair.prompt[-1] if isinstance(pair.prompt, list) and pair.prompt else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return False
    completions: Any = [part[0] for part in (pair.chosen, pair.rejected) if part]
    goes_on = not completions or any(message["role"] == "assistant" for message in completions)
    goes_on = goes_on and not last.get("tool_calls")
    if (goes_on and not continues) or (is_asked and not goes_on):
        detail = "the prompt ends with an answer, so chosen and rejected cannot answer its last message"
        raise BadRow("answered_prompt", detail)
    return goes_on


def preference_prompt(row: Row) -> Pair:
    """Reads the column `prompt`. If it is missing, the prompt is the common beginning of the completions."""
    if "prompt" in row:
        return Pair(prompt=_text(row, "prompt"))
    return Pair(prompt=preference(row).prompt, has_inferred_prompt=True)


def conversational_prompt(row: Row) -> Pair:
    """Reads the column `prompt` if it has messages. Else the prompt is the completions' common beginning."""
    value = row.get("prompt")
    has_messages = holds_messages(value) if isinstance(value, str) else isinstance(as_list(value), list)
    prompt = _messages(row, "prompt") if has_messages else conversational(row).prompt
    return Pair(prompt=prompt, template_options=_template_options(row))


def possible_formats(row: Row, columns: Mapping[str, str | None]) -> list[str]:
    """Returns the formats, in the order of FORMATS, that a row may have and that read all named `columns`."""
    lists = {column for column, value in row.items() if isinstance(as_list(value), list)}
    texts = {column for column, value in row.items() if isinstance(value, str)}
    has_both, answers = row.keys() >= {*SIDES}, as_list(row.get("answers"))
    # A text prompt or one answer that happens to be JSON stays text.
    is_conversation = not (lists - texts).isdisjoint(("prompt", "chosen")) or (
        texts.issuperset(SIDES) and all(holds_messages(row[column]) for column in SIDES)
    )
    dialogues = [str(row.get(column)) for column in SIDES]
    is_transcript = all(_HUMAN_TURN in text and _ASSISTANT_TURN in text for text in dialogues)
    is_compared = "first" in row and "second" in row and not has_both
    is_ranked = isinstance(answers, list) and bool(answers) and isinstance(answers[0], dict)
    has_images = isinstance(images := row.get("images"), RowImages) and bool(images)
    matching = {
        "tokenized": "prompt_ids" in row,
        "conversational": is_conversation and "prompt_ids" not in row,
        "openai": "preferred_output" in row and "non_preferred_output" in row,
        "swift": "messages" in lists and not {"rejected_response", "rejected_messages"}.isdisjoint(row),
        "transcript": is_transcript and "prompt" not in row,
        "messages": "messages" in lists,
        "sharegpt": "conversations" in lists,
        "alpaca": "instruction" in texts,
        "compared": is_compared,
        "ranked": is_ranked and not _ORDERS.keys().isdisjoint(answers[0]) and not has_both,
    }
    # An online run reads only the prompt; it makes messages of it, as other runs do.
    of_messages = matching["ranked"] or (is_compared and not {"preference", "better"}.isdisjoint(row))
    of_messages = of_messages or is_conversation
    matching["pictured"] = has_images and "prompt" in texts and not of_messages
    begins = "prompt" in row or {"instruction", "messages", "conversations"}.isdisjoint(row)
    is_other = of_messages or has_images or matching["tokenized"] or matching["transcript"]
    matching["preference"] = begins and not is_other
    named = {ours for ours, theirs in columns.items() if theirs is not None}
    names_prompt = "prompt" in columns  # also with null, which says that no column is the prompt
    return [
        name
        for name, format in FORMATS.items()
        if named.issubset(FIELDS_OF_FORMAT[name])
        and (not names_prompt or format.prompt_column in ("prompt", None))
        and matching[name]
    ]


def with_system_message(prompt: list[Any], content: str) -> list[Any]:
    """Returns the prompt with a system message at its beginning. A prompt that has one is unchanged."""
    if prompt[0]["role"] in ("system", "developer"):
        return prompt
    return [{"role": "system", "content": content}, *prompt]


def with_system(row: Row, pair: Pair) -> Pair:
    """Returns the pair with the text of the column `system` as system message. Raises BadRow."""
    system, prompt = row.get("system"), pair.prompt
    if not isinstance(system, str | None):
        raise BadRow("wrong_type", f"system is {kind_of(system)}, not text")
    if not (system or "").strip():
        return pair
    assert isinstance(prompt, list) and isinstance(system, str)
    with_system = with_system_message(prompt, system)
    if with_system[0]["content"] != system:
        detail = "the prompt begins with another system message than the column system"
        raise BadRow("two_system_prompts", detail)
    return replace(pair, prompt=with_system)


def _as_messages(
    prompt: Callable[[Row], list[Message] | None],
    completions: Callable[[Row], Answers] = lambda row: (_answer(row, SIDES[0]), _answer(row, SIDES[1]), ""),
) -> dict[str, Any]:
    """Makes the functions of a `Format` of messages. `prompt` returns None if completions begin with it."""

    def read_pair(row: Row) -> Pair:
        chosen, rejected, choice = completions(row)
        messages = {"chosen": chosen, "rejected": rejected}
        if (asked := prompt(row)) is not None:
            messages["prompt"] = asked
        pair = with_system(row, conversational({**row, **messages}))
        check_last_turn(pair, continues=True, is_asked=asked is not None)
        return replace(pair, choice=choice)

    def read_prompt(row: Row) -> Pair:
        if (asked := prompt(row)) is None:
            read = read_pair(row)
            return Pair(prompt=read.prompt, template_options=read.template_options)
        return with_system(row, conversational_prompt({**row, "prompt": asked}))

    return {"pair": read_pair, "prompt": read_prompt}


def _answer(row: Row, column: str) -> list[Message]:
    """Returns the messages of an answer: a text, a message or a list of messages."""
    value = _value(row, column)
    if isinstance(value, str) and not holds_messages(value):
        return [{"role": "assistant", "content": value}]
    if isinstance(as_list(value), list):
        return dialogue_prompt(row, column)
    message = _message(parsed_text(value) if isinstance(value, str) else value, column)
    if not isinstance(message, dict):
        raise BadRow("wrong_type", f"{column} is {kind_of(value)}, neither text nor a message")
    if message.get("role") != "assistant":
        raise BadRow("no_assistant_turn", f"{column} is a message of the role {message.get('role')!r}")
    return [message]


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
    if isinstance(parsed, dict) and not {"role", "from", *_ORDERS}.isdisjoint(parsed):
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


def _message(value: Any, column: str) -> Any:
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


def _turns(text: str) -> list[Message]:
    """Returns the messages of a text prompt: one of the user, or those of a dialogue with marks (HH-RLHF,
    Nectar, HelpSteer 2, where the first turn has no mark)."""
    if text.startswith(_HUMAN_TURN) and text.rstrip().endswith(_ASSISTANT_TURN):
        return _turns_of_marks([part.strip() for part in _MARKED_TURN.split(text)[1:-2]])
    return _turns_of_marks(["User", *re.split(r"\n<extra_id_1>(User|Assistant)\n", text)])


def _turns_of_marks(parts: Sequence[str]) -> list[Message]:
    roles = {"Human": "user", "User": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": roles[mark], "content": words} for mark, words in turns]


_CALLS = ("function_call", "tool_call")  # of LLaMA-Factory and of ms-swift
_RENAMED_ROLES = (*_CALLS, "tool_response")
_SHAREGPT_ROLES = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"system": "system", "tool": "tool", "observation": "tool", "tool_response": "tool"},
    **dict.fromkeys(_CALLS, "assistant"),
}
_KEYS_OF_MESSAGES = {"tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking"}
_ROLES = {*_SHAREGPT_ROLES, "developer", "function", "ipython"}


def _pair(row: Row, prompt: Any, chosen: Any, rejected: Any) -> Pair:
    is_text = isinstance(prompt, str)
    for column, completion in zip(SIDES, (chosen, rejected), strict=True):
        values = [completion]
        if not is_text:  # what counts is all but role and name: content, tool calls, ...
            values = [m[key] for m in completion for key in m.keys() - {"role", "name"}]
        if not any(value.strip() if isinstance(value, str) else value for value in values):
            raise BadRow("empty_completion", f"the {column} completion is empty")
        is_asking = is_text and completion.rfind(_HUMAN_TURN) > completion.rfind(_ASSISTANT_TURN)
        if is_asking and prompt.rstrip().endswith(_ASSISTANT_TURN):
            detail = f"{column} ends with a turn of the human ({_HUMAN_TURN!r})"
            raise BadRow("no_assistant_turn", f"{detail}, and only answers are scored")
    return Pair(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        weight=_weight(row),
        template_options={} if is_text else _template_options(row),
    )


def _implicit_prompt_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Returns the length of the common prompt in characters or messages, as TRL's `extract_prompt` finds it:
    a space at its end belongs to the completions, and each completion has an element."""
    shorter = min(len(chosen), len(rejected))
    for length in range(shorter):
        if chosen[length] != rejected[length]:
            return length - (length > 0 and chosen[length - 1] == " ")
    return max(shorter - 1, 0)


def _check_last_turns(chosen: list[Message], rejected: list[Message]) -> None:
    """Raises BadRow unless chosen and rejected are equal before their last turns of the assistant, to which
    tool calls and results belong. Else the prompt is longer than their common beginning."""
    prompts = []
    for column, messages in zip(SIDES, (chosen, rejected), strict=True):
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise BadRow("no_assistant_turn", f"{column} has no message of the role assistant")
        start = len(roles) - 1 - roles[::-1].index("assistant")
        while start > 0 and roles[start - 1] not in ("system", "developer", "user"):
            start -= 1
        prompts.append(messages[:start])
    if prompts[0] != prompts[1]:
        detail = "no prompt column, and chosen and rejected differ before their last answer"
        raise BadRow("no_common_prompt", detail)
    if not prompts[0]:
        raise BadRow("no_common_prompt", "no prompt column, and chosen has no message before its last answer")


def _value(row: Row, column: str) -> Any:
    if column not in row:
        present = ", ".join(str(name) for name in row) or "none"
        raise BadRow("missing_column", f"no column {column!r} (there are: {present})")
    if isinstance(row[column], BadRow):  # the reader put this error in place of an invalid object
        raise row[column]
    return row[column]


def _text(row: Row, column: str) -> str:
    value = _value(row, column)
    if not isinstance(value, str):
        _without_nulls(value, column)  # a date is no JSON at all
        raise BadRow("wrong_type", f"{column} is {kind_of(value)}, not text")
    return value


def _messages(row: Row, column: str) -> list[Message]:
    """Returns the messages. One without `content` (a tool call) gets `content: None`, as templates expect."""
    value = as_list(_value(row, column))
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{column} is {kind_of(value)}, not a list of messages")
    if not value:
        kind = "empty_prompt" if column == "prompt" else "empty_completion"
        raise BadRow(kind, f"{column} has no messages")
    is_plain = [type(m) is dict and type(m.get("content")) is type(m.get("role")) is str for m in value]
    if all(is_plain) and max(map(len, value)) == 2 and not any(m["role"] in _RENAMED_ROLES for m in value):
        return value
    reads_images = isinstance(row.get("images"), RowImages)
    messages: list[Message] = _without_nulls([_message(message, column) for message in value], column)
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


def _token_ids(row: Row, column: str) -> list[int]:
    value = _value(row, column)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise BadRow("wrong_type", f"{column} is not a list of integers")
    return value


def _token_weights(row: Row, column: str, num_tokens: int) -> list[float] | None:
    if row.get(column) is None:
        return None
    weights = _value(row, column)
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


def _as_float(value: Any) -> float:
    """Returns the number in a value, which is a text in a CSV file; NaN if there is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _weight(row: Row) -> float:
    value = row.get("weight")
    if value is None:
        return 1.0
    weight = _as_float(value)
    if isinstance(value, bool) or not 0 <= weight <= _MAX_FLOAT32:
        raise BadRow("invalid_weight", f"weight is {str(value)[:40]!r}, not a finite number of at least 0")
    return weight


def _template_options(row: Row) -> dict[str, Any]:
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

_NO_OUTPUTS = {"preferred_output": "", "non_preferred_output": ""}  # of OpenAI, where prompts suffice

# Of all formats that match and can read a row, `format: auto` takes the first.
FORMATS: dict[str, Format] = {
    "tokenized": Format(
        content="token_ids",
        completion_columns=("chosen_ids", "rejected_ids"),
        prompt_column="prompt_ids",
        pair=tokenized,
        prompt=lambda row: Pair(prompt=_token_ids(row, "prompt_ids")),
    ),
    "conversational": Format(pair=conversational, prompt=conversational_prompt),
    "openai": Format(
        completion_columns=("preferred_output", "non_preferred_output"),
        prompt_column="input",
        pair=lambda row: with_system(row, conversational(openai(row))),
        prompt=lambda row: with_system(row, conversational_prompt(openai({**_NO_OUTPUTS, **row}))),
    ),
    "swift": Format(
        completion_columns=("messages", "rejected_response"),
        prompt_column="messages",
        pair=lambda row: with_system(row, conversational(swift(row))),
        prompt=lambda row: with_system(row, conversational_prompt(swift({"rejected_response": "", **row}))),
    ),
    "transcript": Format(
        content="text",
        prompt_column=None,
        pair=transcript,
        prompt=lambda row: Pair(prompt=transcript(row).prompt),
    ),
    "messages": Format(
        prompt_column="messages", **_as_messages(lambda row: dialogue_prompt(row, "messages"))
    ),
    "sharegpt": Format(
        prompt_column="conversations", **_as_messages(lambda row: dialogue_prompt(row, "conversations"))
    ),
    "alpaca": Format(prompt_column="instruction", **_as_messages(alpaca_prompt)),
    "compared": Format(
        completion_columns=("first", "second"),
        **_as_messages(lambda row: dialogue_prompt(row, "prompt") if "prompt" in row else None, compared),
    ),
    "ranked": Format(
        completion_columns=("answers",),
        **_as_messages(lambda row: dialogue_prompt(row, "prompt"), ranked),
    ),
    "pictured": Format(**_as_messages(lambda row: [{"role": "user", "content": _text(row, "prompt")}])),
    "preference": Format(content="text", infers_prompts=True, pair=preference, prompt=preference_prompt),
}
# In place of `transcript`, where the source has `turns: messages`.
TRANSCRIPT_TURNS = Format(
    prompt_column=None, pair=transcript_turns, prompt=lambda row: Pair(prompt=transcript_turns(row).prompt)
)
